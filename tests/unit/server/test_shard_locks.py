"""A shard whose calls meet: work on one bucket holds up no other bucket, and nobody sees half of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic_ps.codec import as_tensor
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.several import Kind
from elastic_ps.core.partition import partition
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.shards.pulls import Pull, Pulled
from elastic_ps.server.shards.values import BucketValues
from tests.testing.shard import LR, TERM, Rig, one_bucket, ones, refusal, tensor


class Held:
    """A call that does nothing before `let_go`."""

    def __init__(self) -> None:
        self.there, self._free = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.there.set()
        assert self._free.wait(10)

    def let_go(self) -> None:
        self._free.set()


@pytest.fixture
def hold_add(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Held]:
    """The next push to bucket 0 is held when it is to be added."""

    def hold() -> Held:
        held, add = Held(), BucketValues.add

        def method(self: BucketValues, *arguments: Any, **named: Any) -> None:
            if self.bucket.index == 0 and not held.there.is_set():
                held.wait()
            add(self, *arguments, **named)

        # The calls meet where tensors are added, which nobody outside can halt.
        monkeypatch.setattr(BucketValues, "add", method)
        return held

    return hold


class Halting(Optimizers):
    """SGD, whose step of a bucket is held in its middle, once. `after` so many steps of others."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        held = self.held = Held()
        steps = itertools.count()

        class Halted(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                values = self.param_groups[0]["params"][0].data
                # The smaller ones are those by which a shard finds out what state there is.
                if len(values) >= 4 and next(steps) == after:
                    before = values.clone()
                    values[:2] = 77.0
                    held.wait()
                    values.copy_(before)
                super().step(closure)

        self._kind = Halted

    def class_of(self, name: str) -> Kind:
        assert name == "SGD"
        return self._kind


def blocks(future: Future[Any]) -> bool:
    """Whether a call does not return for a while; that it has begun by then cannot be seen."""
    try:
        future.result(0.2)
    except TimeoutError:
        return True
    return False


def two_buckets(optimizers: Optimizers | None = None) -> Rig:
    layout = partition([tensor("a", 400), tensor("b", 400)], bucket_bytes=1600, shards=1)
    rig = Rig(layout, workers=(0, 1), optimizers=optimizers)
    for bucket in (0, 1):
        rig.fill(bucket, ones(400, 5.0))
    return rig


def complete(optimizers: Optimizers) -> tuple[Rig, int, int]:
    """A round for which both workers have pushed all, and its buckets in the order of the steps."""
    rig = two_buckets(optimizers)
    for bucket in (0, 1):
        for worker in (0, 1):
            rig.push(worker, ones(400), bucket=bucket)
    first, second = (bucket.index for bucket in rig.layout.pull_order)
    return rig, first, second


def pulled(answer: Any) -> list[float]:
    assert isinstance(answer, Pulled)
    return sorted(set(as_tensor(memoryview(bytearray(answer.data)), torch.float32).tolist()))


def test_a_bucket_is_handed_out_while_the_next_one_is_stepped(threads: ThreadPoolExecutor) -> None:
    halting = Halting(after=1)
    (rig, first, second), held = complete(halting), halting.held
    committed = threads.submit(rig.commit, 0, 1, samples=2)
    assert held.there.wait(10)
    answers = rig.shard.pull(Pull(buckets=[first, second], version=1, term=TERM, contributor=(0, 10)))
    assert pulled(threads.submit(next, answers).result(10)) == [4.0]
    held.let_go()
    assert pulled(threads.submit(next, answers).result(10)) == [4.0]
    committed.result(10)


def test_a_draft_holds_up_nobody_but_those_of_its_bucket(threads: ThreadPoolExecutor) -> None:
    """The optimizer's step of a large bucket takes long, and every push looks at the round."""
    halting = Halting()
    rig, held = two_buckets(halting), halting.held
    first, second = (bucket.index for bucket in rig.layout.pull_order)
    for worker in (0, 1):
        rig.push(worker, ones(400), bucket=first)
    items = rig.shard.pull(
        Pull(
            buckets=[first, second],
            version=1,
            term=TERM,
            attempt=0,
            contributor=(0, 10),
            held=0,
            groups=rig.settings.groups,
        )
    )
    draft = threads.submit(next, items)
    assert held.there.wait(10)
    pushes = [threads.submit(rig.push, worker, ones(400), bucket=second) for worker in (0, 1)]
    assert [push.result(10) for push in pushes] == [True, True]
    committed = threads.submit(rig.commit, 0, 1, samples=2)
    held.let_go()
    assert pulled(draft.result(10)) == [4.0]
    committed.result(10)
    assert torch.equal(rig.values(first), ones(400, 4.0))


def test_two_buckets_are_added_to_at_the_same_time(
    threads: ThreadPoolExecutor, hold_add: Callable[[], Held]
) -> None:
    rig = two_buckets()
    held = hold_add()
    pushed = threads.submit(rig.push, 0, ones(400), bucket=0)
    assert held.there.wait(10)
    assert threads.submit(rig.push, 1, ones(400), bucket=1).result(10)
    held.let_go()
    assert pushed.result(10)


def restarted_while_added(threads: ThreadPoolExecutor, rig: Rig, held: Held) -> Future[bool]:
    push = threads.submit(rig.push, 0, ones(4, 50.0))
    assert held.there.wait(10)
    rig.restart(0, 1)
    return push


def test_a_round_that_starts_again_while_a_push_is_added_is_not_spoiled_by_it(
    threads: ThreadPoolExecutor, hold_add: Callable[[], Held]
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    held = hold_add()
    late = restarted_while_added(threads, rig, held)
    others = [threads.submit(rig.push, worker, ones(4)) for worker in (0, 1)]
    assert all(blocks(push) for push in others)
    held.let_go()
    assert refusal(late) is RefusalCode.STALE_ATTEMPT
    assert all(push.result(10) for push in others)
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_what_a_worker_has_added_that_was_dropped_meanwhile_is_not_taken_for_the_others_sum(
    threads: ThreadPoolExecutor, hold_add: Callable[[], Held]
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    held = hold_add()
    push = threads.submit(rig.push, 0, ones(4, 50.0))
    assert held.there.wait(10)
    rig.shard.advance(0, 0, {1: 11}, None)  # the same attempt
    held.let_go()
    push.result(10)
    assert rig.push(1, ones(4))
    with pytest.raises(Refused) as refused:
        rig.commit(1, samples=1)
    assert refused.value.code is RefusalCode.INVALID


def test_nothing_is_applied_while_somebody_adds_to_it_who_was_dropped_meanwhile(
    threads: ThreadPoolExecutor, hold_add: Callable[[], Held]
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    assert rig.push(1, ones(4))
    held = hold_add()
    push = threads.submit(rig.push, 0, ones(4, 50.0))
    assert held.there.wait(10)
    rig.shard.advance(0, 0, {1: 11}, None)
    with pytest.raises(Refused) as refused:
        rig.commit(1, samples=1)
    assert refused.value.code is RefusalCode.INVALID
    held.let_go()
    push.result(10)
    rig.restart(1)
    assert rig.push(1, ones(4))
    rig.commit(1, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_an_order_that_is_repeated_while_it_is_carried_out_waits(threads: ThreadPoolExecutor) -> None:
    """Its answer was lost, or it takes longer than the call; the shard has not lost its model."""
    halting = Halting()
    rig, held = two_buckets(halting), halting.held
    for bucket in (0, 1):
        rig.push(0, ones(400), bucket=bucket)
    application = rig.application(0, samples=1)
    assert rig.shard.has_to_apply(1, application)
    committed = threads.submit(rig.commit, 0, samples=1)
    assert held.there.wait(10)
    again = threads.submit(rig.shard.has_to_apply, 1, application)
    norm = threads.submit(rig.shard.norm, 1, application)
    assert blocks(again)
    held.let_go()
    committed.result(10)
    assert not again.result(10)
    assert norm.result(10) == 0.0


def test_a_copy_of_a_bucket_that_is_stepped_is_of_one_version(threads: ThreadPoolExecutor) -> None:
    halting = Halting()
    rig, held = Rig(one_bucket(tensor("w", 4)), workers=(0,), optimizers=halting), halting.held
    rig.fill(0, ones(4, 5.0))
    rig.push(0, ones(4))
    committed = threads.submit(rig.commit, 0, samples=1)
    assert held.there.wait(10)
    answers = rig.shard.pull(Pull(buckets=[0], version=0, term=TERM))
    copied, state = threads.submit(next, answers), threads.submit(lambda: list(rig.shard.state()))
    assert blocks(copied)
    assert blocks(state)
    held.let_go()
    assert pulled(copied.result(10)) == [4.0]
    assert state.result(10) == []
    committed.result(10)


def test_no_draft_is_made_of_a_round_that_is_being_applied(threads: ThreadPoolExecutor) -> None:
    halting = Halting()
    (rig, _, second), held = complete(halting), halting.held
    committed = threads.submit(rig.commit, 0, 1, samples=2)
    assert held.there.wait(10)
    answers = rig.shard.pull(
        Pull(
            buckets=[second],
            version=1,
            term=TERM,
            attempt=0,
            contributor=(0, 10),
            groups=LR.groups,
        )
    )
    answer = threads.submit(next, answers)
    assert blocks(answer)
    held.let_go()
    got = answer.result(10)
    assert isinstance(got, Pulled)
    assert got.draft == 0
    assert pulled(got) == [4.0]
    committed.result(10)
