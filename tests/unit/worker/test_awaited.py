"""When a step's buckets are pushed, and what a worker's training thread waits for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.partition import Bucket, partition
from elastic_ps.errors import ConnectionLost
from elastic_ps.worker.awaited import FINISH, Asks, Awaited, Pushing, Says, When
from elastic_ps.worker.dialogue import Ending, Step
from tests.testing.shard import tensor

SYNC: dict[str, Any] = {}
BACKUP = {"backupWorkers": 1}
ACCUMULATE = {"mode": "accumulate", "gradients": 4}
BOUNDED = {"mode": "bounded", "maxStaleness": 2}
ASYNC = {"mode": "async"}
BUCKETS = partition([tensor(name, 4) for name in "abc"], bucket_bytes=16, shards=1).pushed
STEP, ENDING = cast("Step", None), Ending(ranges=(), settings="", metrics={})


def test_what_went_wrong_with_a_step_is_nothing_of_the_next_one() -> None:
    awaited = Awaited((), lambda _: None)
    awaited.begin(STEP)
    awaited.expect({FINISH})
    awaited.fail(ConnectionLost("reset"), awaited.generation)
    with pytest.raises(ConnectionLost):
        awaited.wait(0.0)
    awaited.begin(STEP)
    awaited.expect({FINISH})
    awaited.arrived(FINISH, awaited.generation)
    assert awaited.wait(0.0)


@pytest.mark.parametrize(
    ("fields", "small", "expected"),
    [
        (SYNC, False, Pushing(When.EARLY, Asks.NEVER, Says.NEVER, several=False, together=True)),
        (SYNC, True, Pushing(When.IN_ONE_CALL, Asks.NEVER, Says.NEVER, several=False, together=False)),
        (BACKUP, False, Pushing(When.EARLY, Asks.FIRST, Says.NEVER, several=False, together=False)),
        (BACKUP, True, Pushing(When.IN_ONE_CALL, Asks.LAST, Says.NEVER, several=False, together=False)),
        (ACCUMULATE, True, Pushing(When.EARLY, Asks.FIRST, Says.NEVER, several=True, together=False)),
        (BOUNDED, False, Pushing(When.AT_THE_END, Asks.LAST, Says.IF_NEWER, several=False, together=False)),
        (ASYNC, True, Pushing(When.IN_ONE_CALL, Asks.LAST, Says.ALWAYS, several=False, together=False)),
    ],
)
def test_the_consistency_says_how_steps_are_pushed(
    fields: dict[str, Any], small: bool, expected: Pushing
) -> None:
    assert Pushing.of(Consistency.model_validate(fields), small=small) == expected


@pytest.mark.parametrize(
    ("fields", "small", "early"), [(SYNC, False, 2), (BOUNDED, False, 0), (SYNC, True, 0)]
)
def test_buckets_are_pushed_in_their_order_and_again_when_the_round_starts_again(
    fields: dict[str, Any], small: bool, early: int
) -> None:
    assert len(BUCKETS) == 3
    pushed: list[Bucket] = []
    awaited = Awaited(BUCKETS, pushed.append)
    awaited.pushing = Pushing.of(Consistency.model_validate(fields), small=small)
    awaited.begin(STEP)
    for bucket in reversed(BUCKETS):
        assert not pushed
        awaited.ready(bucket, [True])
    assert pushed == list(BUCKETS[:early])
    with awaited.lock:
        awaited.end(ENDING)
    awaited.restart(1, awaited.generation)
    again = [] if small else [*BUCKETS, *BUCKETS]
    assert pushed == again
    assert awaited.owing == small
