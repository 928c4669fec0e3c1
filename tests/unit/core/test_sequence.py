"""The push log: duplicates are recognised, what is outdated is refused, orders and sums are complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.sequence import PushKey, PushLog
from elastic_ps.errors import RefusalCode, Refused

KEY = PushKey(term=2, worker=1, incarnation=5, step=9, bucket=0, version=7, attempt=1)


@pytest.fixture
def log() -> PushLog:
    return PushLog(term=2, version=7, attempt=1, expected={0: 4, 1: 5, 2: 6})


def code(log: PushLog, key: PushKey) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        log.decide(key)
    return refused.value.code


def test_a_push_is_added_once(log: PushLog) -> None:
    assert log.decide(KEY)
    log.add(KEY)
    assert not log.decide(KEY)
    assert log.decide(KEY._replace(bucket=1))
    assert log.decide(KEY._replace(worker=2, incarnation=6))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"term": 1}, RefusalCode.STALE_TERM),
        ({"term": 3}, RefusalCode.STALE_TERM),
        ({"version": 6}, RefusalCode.STALE_ATTEMPT),
        ({"version": 6, "attempt": 9}, RefusalCode.STALE_ATTEMPT),
        ({"attempt": 0}, RefusalCode.STALE_ATTEMPT),
        ({"attempt": 2}, RefusalCode.WRONG_VERSION),
        ({"version": 8, "attempt": 0}, RefusalCode.WRONG_VERSION),
        ({"worker": 3}, RefusalCode.STALE_INCARNATION),
        ({"incarnation": 4}, RefusalCode.STALE_INCARNATION),
        ({"incarnation": 6}, RefusalCode.STALE_INCARNATION),
    ],
)
def test_what_is_of_another_round_is_refused(
    log: PushLog, change: dict[str, int], expected: RefusalCode
) -> None:
    assert code(log, KEY._replace(**change)) is expected


def test_a_worker_has_one_step_in_a_round(log: PushLog) -> None:
    log.add(KEY)
    assert code(log, KEY._replace(incarnation=6)) is RefusalCode.STALE_INCARNATION
    assert code(log, KEY._replace(incarnation=4)) is RefusalCode.STALE_INCARNATION
    assert code(log, KEY._replace(step=10)) is RefusalCode.STALE_INCARNATION


def test_who_was_declared_gone_cannot_spoil_the_sums_of_the_others(log: PushLog) -> None:
    """It learns from a pull that the round started again, and pushes for the new attempt."""
    log.open(version=7, attempt=2, expected={0: 4, 2: 6})
    assert code(log, KEY._replace(attempt=2)) is RefusalCode.STALE_INCARNATION
    assert log.decide(KEY._replace(worker=0, incarnation=4, attempt=2))


def test_another_attempt_or_version_voids_the_sums(log: PushLog) -> None:
    log.add(KEY)
    log.open(version=7, attempt=1, expected={1: 5})
    assert not log.decide(KEY), "only who takes part has changed"
    log.open(version=7, attempt=2, expected={1: 5})
    assert log.decide(KEY._replace(attempt=2))
    log.add(KEY._replace(attempt=2))
    log.open(version=8, attempt=0, expected={1: 5})
    assert not log.added


@given(st.sets(st.integers(0, 6), min_size=1), st.permutations(range(7)))
def test_in_deterministic_order_exactly_one_worker_has_its_turn(
    expected: set[int], arrivals: list[int]
) -> None:
    log = PushLog(term=2, expected=dict.fromkeys(expected, 5))
    for turn in sorted(expected):
        able = [w for w in arrivals if w in expected and log.turn(w, 0)]
        assert [w for w in able if not _has(log, w)] == [turn]
        log.add(KEY._replace(worker=turn))


def _has(log: PushLog, worker: int) -> bool:
    return any(entry[0] == worker for entry in log.added.get(0, ()))


def test_a_vanished_worker_is_not_waited_for(log: PushLog) -> None:
    assert not log.turn(1, 0)
    log.open(version=7, attempt=2, expected={1: 5, 2: 6})
    assert log.turn(1, 0)


@given(
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2))),
    st.sets(st.integers(0, 2)),
)
def test_sums_are_complete_if_made_of_exactly_the_contributions(
    pushes: set[tuple[int, int]], contributors: set[int]
) -> None:
    log = PushLog(term=2)
    for bucket, worker in pushes:
        log.add(KEY._replace(bucket=bucket, worker=worker))
    entries = [(worker, KEY.incarnation, KEY.step) for worker in contributors]
    assert log.complete([0, 1], entries) == all(
        {w for b, w in pushes if b == bucket} == contributors for bucket in (0, 1)
    )
    assert not log.complete([0], [*entries, (9, KEY.incarnation, KEY.step)])
    assert not log.complete([0], [(w, i + 1, s) for w, i, s in entries] or [(0, 0, 0)])
