"""When a step's buckets are pushed, and what of its version has not arrived."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.partition import Bucket, partition
from elastic_ps.core.pushing import FINISH, BaseReport, BeginTime, Progress, PushPolicy, PushTime
from elastic_ps.errors import ConnectionLost
from tests.testing.shard import tensor

SYNC: dict[str, Any] = {}
BACKUP = {"backupWorkers": 1}
ACCUMULATE = {"mode": "accumulate", "gradients": 4}
BOUNDED = {"mode": "bounded", "maxStaleness": 2}
ASYNC = {"mode": "async"}
BUCKETS = partition([tensor(name, 4) for name in "abc"], bucket_bytes=16, shards=1).pushed


def progress(fields: dict[str, Any], *, small: bool = False) -> Progress[str]:
    return Progress(BUCKETS, PushPolicy.of(Consistency.model_validate(fields), small=small))


def test_what_went_wrong_with_a_step_is_nothing_of_the_next_one() -> None:
    step = progress(SYNC)
    step.begin()
    step.missing = {FINISH}
    step.fail(ConnectionLost("reset"), step.generation)
    assert step.over
    assert step.error is not None
    before = step.generation
    step.begin()
    step.missing = {FINISH}
    step.arrived(FINISH, before)
    assert not step.over
    step.arrived(FINISH, step.generation)
    assert step.over
    assert step.error is None


@pytest.mark.parametrize(
    ("fields", "small", "policy"),
    [
        (SYNC, False, (PushTime.EARLY, BeginTime.NEVER, BaseReport.NEVER, False, True)),
        (SYNC, True, (PushTime.IN_ONE_CALL, BeginTime.NEVER, BaseReport.NEVER, False, False)),
        (BACKUP, False, (PushTime.EARLY, BeginTime.FIRST, BaseReport.NEVER, False, False)),
        (BACKUP, True, (PushTime.IN_ONE_CALL, BeginTime.LAST, BaseReport.NEVER, False, False)),
        (ACCUMULATE, True, (PushTime.EARLY, BeginTime.FIRST, BaseReport.NEVER, True, False)),
        (BOUNDED, False, (PushTime.AT_THE_END, BeginTime.LAST, BaseReport.IF_NEWER, False, False)),
        (ASYNC, True, (PushTime.IN_ONE_CALL, BeginTime.LAST, BaseReport.ALWAYS, False, False)),
    ],
)
def test_the_consistency_says_how_steps_are_pushed(
    fields: dict[str, Any], small: bool, policy: tuple[Any, ...]
) -> None:
    assert PushPolicy.of(Consistency.model_validate(fields), small=small) == PushPolicy(*policy)


@pytest.mark.parametrize(
    ("fields", "small", "early"), [(SYNC, False, 2), (BOUNDED, False, 0), (SYNC, True, 0)]
)
def test_buckets_are_pushed_in_their_order_and_again_when_the_round_starts_again(
    fields: dict[str, Any], small: bool, early: int
) -> None:
    assert len(BUCKETS) == 3
    pushed: list[Bucket] = []
    step = progress(fields, small=small)
    step.begin()
    for bucket in reversed(BUCKETS):
        assert not pushed
        pushed += step.ready(bucket, [True])
    assert pushed == list(BUCKETS[:early])
    pushed += step.end("the end")
    pushed += step.restart(1, step.generation)
    assert pushed == ([] if small else [*BUCKETS, *BUCKETS])
    assert not step.restart(1, step.generation), "that attempt has begun"
    assert step.owing == small
