"""Each worker index has its own share of the records."""

from __future__ import annotations

import pickle

import pytest

from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import LedgerError, Range


def drained(schedule: FixedSchedule, worker: int, *, batch: int = 4) -> list[Range]:
    """All records of a worker's share, trained."""
    seen: list[Range] = []
    while ranges := schedule.take(worker + 10, worker=worker, batch=batch):
        seen += ranges
        schedule.apply(worker + 10, ranges)
    return seen


def test_every_record_is_in_one_share() -> None:
    schedule = FixedSchedule(records=11, epochs=2, shard_records=4, shares=3)
    assert (schedule.applied, schedule.total, schedule.complete_epochs) == (0, 22, 0)
    assert schedule.open_shares == {0, 1, 2}
    shares = [drained(schedule, worker) for worker in range(3)]
    for share, (start, stop) in zip(shares, [(0, 3), (3, 7), (7, 11)], strict=True):
        for epoch in range(2):
            positions = [p for r in share if r.epoch == epoch for p in range(r.start, r.stop)]
            assert positions == list(range(start, stop))
    assert (schedule.applied, schedule.finished, schedule.complete_epochs) == (22, True, 2)
    assert schedule.open_shares == frozenset()


def test_a_share_that_is_behind_keeps_the_epoch_and_the_job_open() -> None:
    schedule = FixedSchedule(records=8, epochs=1, shard_records=4, shares=2)
    drained(schedule, 0)
    assert (schedule.applied, schedule.finished, schedule.complete_epochs) == (4, False, 0)
    assert schedule.open_shares == {1}


def test_more_epochs_are_more_records_in_every_share() -> None:
    schedule = FixedSchedule(records=8, epochs=1, shard_records=4, shares=2)
    for worker in range(2):
        drained(schedule, worker)
    schedule.extend(2)
    assert (schedule.total, schedule.finished) == (16, False)
    assert schedule.open_shares == {0, 1}
    assert drained(schedule, 0) == [Range(1, 0, 4)]
    assert drained(schedule, 1) == [Range(1, 4, 8)]
    assert schedule.finished


def test_a_worker_without_a_share_is_handed_nothing() -> None:
    schedule = FixedSchedule(records=2, epochs=1, shard_records=4, shares=3)
    assert schedule.open_shares == {0, 1}
    assert schedule.take(1, worker=2, batch=1) == []
    assert schedule.held(1) == []
    assert schedule.take(2, worker=1, batch=1) == [Range(0, 1, 2)]


def test_what_a_worker_holds_is_applied_or_given_back_in_its_own_share() -> None:
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2)
    [taken] = schedule.take(7, worker=1, batch=4)
    assert taken == Range(0, 8, 12)
    assert schedule.held(7) == [taken]
    assert schedule.held(7, besides=[Range(0, 8, 10)]) == [Range(0, 10, 12)]
    with pytest.raises(LedgerError):
        schedule.held(7, besides=[Range(0, 0, 2)])
    schedule.apply(7, [Range(0, 8, 10)])
    assert (schedule.applied, schedule.held(7)) == (2, [Range(0, 10, 12)])
    with pytest.raises(LedgerError):
        schedule.apply(7, [Range(0, 8, 10)])
    schedule.give_back(7, keep=[Range(0, 11, 12)])
    assert schedule.held(7) == [Range(0, 11, 12)]
    assert schedule.take(8, worker=1, batch=4) == [Range(0, 10, 11)]
    assert schedule.take(9, worker=0, batch=4) == [Range(0, 0, 4)]


def test_whoever_has_taken_nothing_holds_nothing() -> None:
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=1)
    assert schedule.held(7) == []
    schedule.give_back(7)
    schedule.give_back_some(7, [])
    with pytest.raises(LedgerError):
        schedule.apply(7, [Range(0, 0, 4)])


def test_holders_that_have_come_and_gone_leave_nothing_behind() -> None:
    """A job may replace its workers for weeks. What a gone worker's finished step holds stays until it is
    applied.
    """
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2)
    [kept] = schedule.take(1000, worker=1, batch=4)
    schedule.give_back(1000, keep=[kept])
    sizes = []
    for holder in range(1001, 1100):
        schedule.take(holder, worker=1, batch=4)
        sizes.append(len(pickle.dumps(schedule)))
        schedule.give_back(holder)
    assert len(set(sizes)) == 1
    schedule.apply(1000, [kept])
    assert schedule.applied == 4


def test_a_step_that_is_void_gives_its_records_back_to_their_share() -> None:
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2)
    assert schedule.take(7, worker=1, batch=4) == [Range(0, 8, 12)]
    schedule.give_back_some(7, [Range(0, 8, 10)])
    assert schedule.held(7) == [Range(0, 10, 12)]
    assert schedule.take(8, worker=1, batch=2) == [Range(0, 8, 10)]
    assert schedule.take(9, worker=0, batch=4) == [Range(0, 0, 4)]


def test_a_copy_goes_its_own_way() -> None:
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2)
    taken = schedule.take(7, worker=1, batch=4)
    other = schedule.copy()
    other.apply(7, taken)
    assert (schedule.applied, other.applied) == (0, 4)
    assert (schedule.held(7), other.held(7)) == (taken, [])
    assert other.take(7, worker=1, batch=4) == [Range(0, 12, 16)]
    other.give_back(7)
    other.take(8, worker=0, batch=4)
    assert schedule.held(8) == []
    assert other.held(8) == [Range(0, 0, 4)]


def test_the_state_is_read_again_and_what_was_held_is_handed_out_anew() -> None:
    schedule = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2)
    schedule.apply(7, schedule.take(7, worker=1, batch=4))
    schedule.take(7, worker=1, batch=4)
    read = FixedSchedule.from_state(schedule.state(), shard_records=2)
    assert (read.records, read.epochs, read.applied) == (16, 1, 4)
    assert read.held(7) == []
    assert drained(read, 1, batch=2) == [Range(0, 12, 14), Range(0, 14, 16)]
    assert read.open_shares == {0}


@pytest.mark.parametrize("change", [{"records": 18}, {"epochs": 2}])
def test_shares_of_other_records_are_refused(change: dict[str, int]) -> None:
    state = FixedSchedule(records=16, epochs=1, shard_records=4, shares=2).state()
    with pytest.raises(LedgerError, match="do not match"):
        FixedSchedule.from_state(state | change, shard_records=4)
