"""Drafts: next values that a shard makes and sends before their round is decided. They stand, or are void."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elastic_ps.codec import as_bytes, dtype_of
from elastic_ps.core.partition import Rule, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.shards.pulls import Pull, Pulled, RestartedAs
from tests.testing.shard import HASTY, TERM, Rig, one_bucket, ones, tensor

TWO = partition([tensor("a", 400), tensor("b", 400)], bucket_bytes=1600, shards=1)


def ahead(rig: Rig, worker: int = 0, *, settings: Settings | None = None, **options: Any) -> Iterator[Any]:
    """What a worker in the middle of its step is sent."""
    arguments = {"term": TERM, "attempt": rig.attempt, "held": rig.version, "drafts": {}}
    return rig.shard.pull(
        Pull(
            buckets=[bucket.index for bucket in rig.buckets],
            version=rig.version + 1,
            contributor=(worker, 10 + worker),
            groups=(settings or rig.settings).groups,
            **{**arguments, **options},
        )
    )


def copy_of(item: Any) -> torch.Tensor:
    assert isinstance(item, Pulled)
    return torch.frombuffer(bytearray(item.data), dtype=torch.float32)


@pytest.mark.parametrize(
    ("optimizer", "group", "dtype", "needed"),
    [
        ("SGD", {"lr": 0.1}, "float32", 2 * 4),  # values and sum
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "float32", 3 * 4),
        ("Adam", {"lr": 0.1}, "float32", 4 * 4 + 4 / 400),  # and how many steps were made of a tensor
        ("SGD", {"lr": 0.1}, "bfloat16", 2 + 2 * 4),  # it is stepped in float32
    ],
)
def test_drafts_are_made_if_a_second_copy_does_not_take_too_much(
    optimizer: str, group: dict[str, float], dtype: str, needed: float
) -> None:
    layout = partition(
        [tensor("a", 400, dtype=dtype), tensor("b", 400, dtype=dtype)], bucket_bytes=1600, shards=1
    )
    room = round(800 * needed)
    answers = []
    for draft_bytes in (room - 1, room):
        rig = Rig(
            layout,
            optimizer=optimizer,
            settings=Settings((group,)),
            workers=(0,),
            limits=HASTY,
            draft_bytes=draft_bytes,
        )
        for bucket in layout.buckets:
            rig.push(0, ones(bucket.elements).to(dtype_of(dtype)), bucket=bucket.index)
        answers.append(next(ahead(rig)))
    assert answers[0] is None, "nothing has happened yet"
    assert isinstance(answers[1], Pulled)
    assert answers[1].draft


def test_a_bucket_is_sent_before_the_others_have_all_gradients(threads: ThreadPoolExecutor) -> None:
    rig = Rig(TWO, workers=(0, 1))
    items = ahead(rig)
    rig.push(0, ones(400), bucket=0)
    first = threads.submit(next, items)
    rig.push(1, ones(400, 3.0), bucket=0)
    draft = first.result(10)
    assert (draft.bucket, draft.version, draft.stands) == (0, 1, False)
    assert draft.draft > 0
    assert torch.equal(copy_of(draft), ones(400, -2.0)), "the mean's step"
    assert rig.shard.version == 0
    assert torch.equal(rig.values(0), ones(400, 0.0)), "nothing is decided"
    for worker in (0, 1):
        rig.push(worker, ones(400), bucket=1)
    second = next(items)
    assert second.draft > draft.draft
    rig.commit(0, 1, samples=2)
    ends = list(items)
    assert [(e.bucket, e.stands, e.draft, len(e.data)) for e in ends] == [(0, True, 0, 0), (1, True, 0, 0)]
    assert torch.equal(rig.values(0), copy_of(draft))
    assert torch.equal(rig.values(1), copy_of(second))


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_make_the_same_versions_and_states(name: str, dtype: str) -> None:
    """Some of them are void, since their round starts again."""
    layout = one_bucket(tensor("w", 300, dtype=dtype), tensor("b", 7, dtype=dtype))
    settings = Settings(groups=({"lr": 0.5} | ({"momentum": 0.9} if name == "SGD" else {}),))
    plain, rig = (Rig(layout, optimizer=name, settings=settings, workers=(0, 1)) for _ in range(2))
    chance = torch.Generator().manual_seed(0)
    for version in range(5):
        gradients = [torch.randn(307, generator=chance).to(getattr(torch, dtype)) for _ in (0, 1)]
        present = (True, version != 1)
        if version == 2:
            for worker in (0, 1):
                rig.push(worker, 9 * gradients[0])
            next(ahead(rig))
            rig.restart(0, 1)
        for one in (plain, rig):
            for worker in (0, 1):
                one.push(worker, gradients[worker], samples=2 + worker, present=present)
        items = ahead(rig)
        draft = next(items)
        assert draft.draft
        for one in (plain, rig):
            one.commit(0, 1, samples=5)
        assert next(items).stands
        assert torch.equal(rig.values(), plain.values())
        states = [{(e.tensor, e.start, e.key): e.value for e in one.shard.state()} for one in (plain, rig)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_hyperparameters_that_change_after_the_draft_make_it_void() -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0,))
    rig.push(0, ones(4))
    items = ahead(rig, settings=Settings(groups=({"lr": 7.0},)))
    assert torch.equal(copy_of(next(items)), ones(4, -7.0))
    rig.commit(0, samples=1)
    end = next(items)
    assert not end.stands
    assert torch.equal(copy_of(end), ones(4, -1.0))
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_hyperparameters_that_no_step_can_be_made_with_make_no_draft(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0,))
    rig.push(0, ones(4))
    waits = threads.submit(next, ahead(rig, settings=Settings(groups=())))
    rig.commit(0, samples=1)
    item = waits.result(10)
    assert item.draft == 0
    assert torch.equal(copy_of(item), ones(4, -1.0))


def test_a_draft_of_a_round_that_starts_again_is_void() -> None:
    """Also if the same memory holds the next draft, and who asks has the number of the first one."""
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    for worker in (0, 1):
        rig.push(worker, ones(4))
    items = ahead(rig)
    void = next(items)
    rig.restart(0)
    assert list(items) == [RestartedAs(1)]
    rig.push(0, ones(4, 5.0))
    unaware = ahead(rig, attempt=None, drafts={0: void.draft})
    draft = next(ahead(rig))
    assert draft.draft != void.draft
    rig.commit(0, samples=1)
    end = next(unaware)
    assert not end.stands
    assert torch.equal(copy_of(end), ones(4, -5.0))


def test_no_draft_is_made_before_a_worker_that_is_awaited_has_come(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    rig.push(0, ones(4))
    waits = threads.submit(next, ahead(rig))
    rig.shard.advance(0, 0, {0: 10, 1: 0}, None)
    assert not waits.done()
    rig.shard.advance(0, 0, {0: 10}, None)
    assert waits.result(10).draft
    rig.workers = {0: 10}
    rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.0))


def test_a_worker_that_takes_no_part_any_more_does_not_wait(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    waits = threads.submit(next, ahead(rig, attempt=None))
    rig.restart(1)
    with pytest.raises(Refused) as refused:
        waits.result(10)
    assert refused.value.code is RefusalCode.STALE_INCARNATION


def test_nothing_is_sent_of_a_bucket_that_does_not_change() -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0,))
    rig.push(0, torch.empty(0), present=(False,))
    items = ahead(rig)
    draft = next(items)
    assert draft.draft
    assert draft.unchanged
    rig.commit(0, samples=1)
    end = next(items)
    assert end.unchanged
    assert not end.stands
    assert not len(end.data)


def test_two_workers_get_the_same_draft_and_the_sums_stay_as_they_are() -> None:
    """A standby gets the sums when the round is decided."""
    tensors = [tensor("w", 4), tensor("mean", 4, rule=Rule.MEAN), tensor("most", 4, rule=Rule.MAXIMUM)]
    tensors.append(tensor("bank", 4, rule=Rule.SUM))
    rig = Rig(partition(tensors, bucket_bytes=1024, shards=1), workers=(0, 1))
    for bucket in rig.buckets:
        for worker in (0, 1):
            rig.push(worker, ones(4, 2.0 + worker), bucket=bucket.index, samples=1 + worker)
    drafts = [[next(items) for _ in rig.buckets] for items in (ahead(rig, 0), ahead(rig, 1))]
    assert [d.draft for d in drafts[0]] == [d.draft for d in drafts[1]]
    sums = {s.bucket.index: s.sum.clone() for s in rig.shard.sums()}
    wanted = {Rule.GRADIENT: 8 / 3, Rule.MEAN: 8 / 3, Rule.MAXIMUM: 3.0, Rule.SUM: 5.0}
    for bucket in rig.buckets:
        assert torch.allclose(sums[bucket.index], ones(4, wanted[bucket.rule]))
    rig.commit(0, 1, samples=3)
    for bucket, draft in zip(rig.buckets, drafts[0], strict=True):
        assert draft.bucket == bucket.index
        assert bytes(as_bytes(rig.values(bucket.index))) == bytes(draft.data)


def test_a_wait_that_is_over_is_told_and_the_caller_keeps_its_drafts() -> None:
    rig = Rig(TWO, workers=(0,), limits=HASTY)
    rig.push(0, ones(400), bucket=0)
    draft, nothing = ahead(rig)
    assert nothing is None
    assert list(ahead(rig, drafts={0: draft.draft})) == [None], "it is not sent again"
    rig.push(0, ones(400), bucket=1)
    rig.commit(0, samples=1)
    items = list(
        rig.shard.pull(
            Pull(buckets=[0], version=1, term=TERM, attempt=0, contributor=(0, 10), drafts={0: draft.draft})
        )
    )
    assert [item.stands for item in items if isinstance(item, Pulled)] == [True]
