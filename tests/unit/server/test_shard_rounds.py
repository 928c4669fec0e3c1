"""A shard under orders and pulls: what is applied when, and who gets what."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec import as_bytes
from elastic_ps.core.partition import Rule, partition
from elastic_ps.core.settings import Application, Settings
from elastic_ps.embedding import SGD, Table, TableSpec, constant
from elastic_ps.embedding.module import Gradient
from elastic_ps.embedding.served import StepRows
from elastic_ps.errors import InvalidModel, RefusalCode, Refused
from elastic_ps.server.limits import USUAL
from elastic_ps.server.shards.pulls import Pull, Pulled, RestartedAs
from elastic_ps.server.shards.values import BucketValues
from tests.testing import machine
from tests.testing.shard import HASTY, LR, TERM, Body, Rig, one_bucket, ones, refusal, tensor


def test_nothing_is_applied_unless_the_sums_are_exactly_the_contributions() -> None:
    rig = Rig(partition([tensor("a", 400), tensor("b", 400)], bucket_bytes=1600, shards=1))
    assert len(rig.buckets) == 2
    for bucket in rig.buckets:
        rig.push(0, ones(400), bucket=bucket.index)
    rig.push(1, ones(400), bucket=0)
    wrong = [
        rig.application(0, 1, samples=2),
        rig.application(0, samples=1),
        Application(1, [(0, 10, 0)], 1, LR),
    ]
    for application in wrong:
        with pytest.raises(Refused) as refused:
            rig.shard.advance(1, 0, rig.workers, application)
        assert refused.value.code is RefusalCode.INVALID
    assert rig.shard.version == 0
    rig.push(1, ones(400), bucket=1)
    rig.commit(0, 1, samples=2)
    assert torch.equal(rig.values(0), ones(400, -1.0))


def test_a_repeated_order_is_applied_once(threads: ThreadPoolExecutor) -> None:
    """The call may be repeated while the first is still at work, when its answer takes too long."""
    rig = Rig(partition([tensor(str(i), 50_000) for i in range(20)], bucket_bytes=200_000, shards=1))
    for bucket in rig.buckets:
        rig.push(0, ones(50_000), bucket=bucket.index)
    application = rig.application(0, samples=1)
    orders = [threads.submit(rig.shard.advance, 1, 0, rig.workers, application) for _ in range(8)]
    for order in orders:
        order.result(10)
    rig.shard.advance(1, 0, rig.workers, application)
    for bucket in rig.buckets:
        assert torch.equal(rig.values(bucket.index), ones(50_000, -1.0))


def test_an_order_that_comes_late_changes_nothing() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    rig.push(0, ones(4))
    rig.shard.advance(0, 0, {2: 12}, None)
    rig.shard.advance(0, 3, {2: 12}, None)
    assert rig.shard.version == 1
    assert not rig.push(0, ones(4)), "still in the sum"
    rig.restart(0, 1)
    rig.push(0, ones(4))
    rig.shard.advance(1, 0, {2: 12}, None)
    assert not rig.push(0, ones(4))


def test_a_shard_without_the_version_does_not_go_on_with_what_it_has() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for apply in (None, Application(0, [], 1, LR)):
        with pytest.raises(Refused, match="version 0, but was told to continue from") as refused:
            rig.shard.advance(5, 0, rig.workers, apply)
        assert refused.value.code is RefusalCode.NOT_READY
    assert rig.shard.version == 0


def test_settings_of_a_round_are_used_from_it_on() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    for lr in (1.0, 0.5):
        rig.settings = Settings(({"lr": lr},))
        rig.push(0, ones(4))
        rig.commit(0, samples=1)
    assert torch.equal(rig.values(), ones(4, -1.5))


def test_an_optimizer_that_cannot_be_built_is_refused_in_words() -> None:
    with pytest.raises(InvalidModel, match="LBFGS"):
        Rig(one_bucket(tensor("w", 4)), optimizer="LBFGS")


def pull(rig: Rig, version: int, **options: Any) -> list[Pulled | RestartedAs | None]:
    """Pull all buckets; the values are copied at once."""
    options = {"term": TERM, "attempt": None, "contributor": None, **options}
    numbers = [bucket.index for bucket in rig.layout.pull_order]
    return list(rig.shard.pull(Pull(buckets=numbers, version=version, **options)))


def test_a_pull_waits_for_its_version(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    pulled = threads.submit(pull, rig, 1, contributor=(0, 10), attempt=0)
    rig.push(0, ones(4))
    assert not pulled.done()
    rig.commit(0, samples=1)
    (item,) = pulled.result(10)
    assert isinstance(item, Pulled)
    assert item.version == 1
    assert bytes(item.data) == bytes(as_bytes(ones(4, -1.0)))


def test_a_pull_that_waits_is_told_that_the_round_starts_again(threads: ThreadPoolExecutor) -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    pulled = threads.submit(pull, rig, 1, contributor=(0, 10), attempt=0)
    watching = threads.submit(pull, rig, 1)
    rig.restart(0)
    assert pulled.result(10) == [RestartedAs(1)]
    assert pull(rig, 1, contributor=(0, 10), attempt=0) == [RestartedAs(1)], "also who asks afterwards"
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert isinstance(watching.result(10)[0], Pulled), "who takes no part is not told"


def test_a_pull_of_no_bucket_waits_for_the_version_too() -> None:
    """With fragments a shard may have none of those that are exchanged, and is pushed to for the next."""
    rig = Rig(one_bucket(tensor("w", 4)), limits=HASTY)
    wanted: dict[str, Any] = {"term": TERM, "attempt": 0, "contributor": None}
    assert list(rig.shard.pull(Pull(buckets=[], version=0, **wanted))) == []
    assert list(rig.shard.pull(Pull(buckets=[], version=1, **wanted))) == [None]
    rig.restart(0)
    assert list(rig.shard.pull(Pull(buckets=[], version=1, **wanted))) == [RestartedAs(1)]
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    assert list(rig.shard.pull(Pull(buckets=[], version=1, **wanted))) == []


def test_a_pull_for_which_nothing_happens_says_so() -> None:
    assert pull(Rig(one_bucket(tensor("w", 4)), limits=HASTY), 1) == [None]


@pytest.mark.parametrize(
    ("elements", "is_copied"), [(4, True), (USUAL.small_pull // 4, True), (USUAL.small_pull // 4 + 1, False)]
)
def test_a_copy_stays_as_it_was_and_a_contributor_gets_the_memory_itself(
    elements: int, is_copied: bool
) -> None:
    """Unless it is small: a copy needs no word after it that the contributor still takes part."""
    rig = Rig(one_bucket(tensor("w", elements)))
    (copy,), (live,) = pull(rig, 0), pull(rig, 0, contributor=(0, 10))
    rig.push(0, ones(elements))
    rig.commit(0, samples=1)
    assert isinstance(copy, Pulled)
    assert isinstance(live, Pulled)
    assert bytes(copy.data) == bytes(4 * elements)
    assert bytes(live.data) == (copy.data if is_copied else bytes(as_bytes(ones(elements, -1.0))))
    assert (copy.last, live.last) == (True, is_copied)


def test_who_joins_later_gets_frozen_parameters_too() -> None:
    tensors = [tensor("body", 4, rule=Rule.CONSTANT), tensor("head", 4)]
    rig = Rig(partition(tensors, bucket_bytes=1024, shards=1), limits=HASTY)
    rig.fill(1, ones(4, 5.0))
    rig.push(0, ones(4))
    rig.commit(0, samples=1)
    items = pull(rig, 1)
    assert [item.version for item in items if isinstance(item, Pulled)] == [1, 1]


def test_a_pull_of_another_shards_bucket_is_refused() -> None:
    with pytest.raises(Refused, match="bucket 3 is not on shard 0"):
        list(Rig(one_bucket(tensor("w", 4))).shard.pull(Pull(buckets=[3], version=0, term=TERM)))


def test_a_shard_that_fails_in_the_middle_of_a_step_has_lost_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some buckets are stepped and others are not; going on would train a model that no version ever was."""
    layout = partition((tensor("a", 300), tensor("b", 300)), bucket_bytes=1200, shards=1)
    rig = Rig(layout, workers=[0])
    for bucket in rig.buckets:
        rig.push(0, ones(300), bucket=bucket.index)
    calls = itertools.count(1)
    error = MemoryError("no memory for a step")
    machine.fails(monkeypatch, BucketValues, "apply", error, lambda: next(calls) == 2)
    with pytest.raises(MemoryError):
        rig.commit(0, samples=1)
    for order in (None, rig.application(0, samples=1)):
        with pytest.raises(Refused, match="failed in the middle of a step") as refused:
            rig.shard.advance(rig.version + (order is not None), 0, rig.workers, order)
        assert refused.value.code is RefusalCode.NOT_READY
    assert next(calls) == 3, "no bucket is stepped again"


def test_a_shard_that_fails_in_the_middle_of_the_rows_has_lost_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(one_bucket(tensor("a", 4)), workers=[0])
    rig.push(0, ones(4))
    specs = [TableSpec(name=name, dim=1, init=constant(0.0), optimizer=SGD(lr=1.0)) for name in "ab"]
    one = np.ones(1, dtype=np.int64)
    gradients = {spec.name: Gradient(one, ones(1).view(1, 1), one) for spec in specs}
    rig.shard.tables.push(0, StepRows(10, 0, 1.0, gradients), specs)
    calls = itertools.count(1)
    machine.fails(monkeypatch, Table, "update", MemoryError("no memory for a row"), lambda: next(calls) == 2)
    with pytest.raises(MemoryError):
        rig.commit(0, samples=1)
    with pytest.raises(Refused, match="failed in the middle of a step"):
        rig.shard.advance(1, 0, rig.workers, rig.application(0, samples=1))


def versions(rig: Rig, *, term: int = TERM, contributor: tuple[int, int] | None = (0, 10)) -> list[Any]:
    answers = rig.shard.pull(Pull(buckets=[0], version=rig.version, term=term, contributor=contributor))
    return [answer.version if isinstance(answer, Pulled) else answer for answer in answers]


def test_values_of_another_term_are_not_handed_out() -> None:
    """A worker from before a roll-back would take the same version, made anew, for its own step's."""
    rig = Rig(one_bucket(tensor("w", 4)))
    assert versions(rig) == [0]
    for term in (TERM - 1, TERM + 1):
        with pytest.raises(Refused) as refused:
            versions(rig, term=term)
        assert refused.value.code is RefusalCode.STALE_TERM


def test_values_that_are_not_copied_go_only_to_a_worker_without_whose_push_they_cannot_change() -> None:
    """Else they are of several versions, in silence."""
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1))
    rig.restart(1)
    for contributor in ((0, 10), (1, 10)):
        answers = rig.shard.pull(Pull(buckets=[0], version=0, term=TERM, contributor=contributor))
        with pytest.raises(Refused) as refused:
            next(answers)
        assert refused.value.code is RefusalCode.STALE_INCARNATION
    assert versions(rig, contributor=(1, 11)) == [0]
    assert versions(rig, contributor=None) == [0], "a copy"


def test_a_worker_that_is_dropped_while_it_reads_is_told_so() -> None:
    rig = Rig(one_bucket(tensor("w", 4)))
    answers = rig.shard.pull(Pull(buckets=[0], version=0, term=TERM, contributor=(0, 10)))
    assert isinstance(next(answers), Pulled)
    rig.restart(1)
    with pytest.raises(Refused) as refused:
        next(answers)
    assert refused.value.code is RefusalCode.STALE_INCARNATION


class Shared(Body):
    """Values that lie in memory which both processes have mapped."""

    def view(self) -> memoryview:
        return self._data

    def read_into(self, target: memoryview) -> None:
        raise AssertionError("they are copied")


def test_values_in_shared_memory_are_added_where_they_lie() -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0,))
    rig.fill(0, ones(4, 5.0))
    with pytest.raises(Refused, match="NaN or Inf"):
        rig.push(0, Shared(ones(4, math.nan)))
    assert rig.push(0, Shared(ones(4, 2.0)))
    rig.commit(0, samples=1)
    assert rig.values().tolist() == [3.0] * 4


@pytest.mark.parametrize("code", [RefusalCode.STALE_TERM, RefusalCode.NOT_READY])
def test_whoever_waits_is_told_when_the_shard_s_time_is_over(
    threads: ThreadPoolExecutor, code: RefusalCode
) -> None:
    rig = Rig(one_bucket(tensor("w", 4)), workers=(0, 1), consistency=Consistency(deterministic=True))
    pull = threads.submit(lambda: list(rig.shard.pull(Pull(buckets=[0], version=1, term=TERM))))
    push = threads.submit(rig.push, 1, ones(4))
    rig.shard.retire(code)
    assert [refusal(call) for call in (pull, push)] == [code, code]
