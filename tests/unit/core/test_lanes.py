"""Each worker index has its own share of the records."""

from __future__ import annotations

import pytest

from elastic_ps.core.lanes import Lanes
from elastic_ps.core.ledger import LedgerError, Range


def drained(lanes: Lanes, worker: int, *, batch: int = 4) -> list[Range]:
    """All records of a worker's lane, trained."""
    seen: list[Range] = []
    while ranges := lanes.take(worker + 10, worker=worker, batch=batch):
        seen += ranges
        lanes.apply(worker + 10, ranges)
    return seen


def test_every_record_is_in_one_lane() -> None:
    lanes = Lanes(records=11, epochs=2, shard_records=4, lanes=3)
    assert (lanes.applied, lanes.expected, lanes.complete_epochs) == (0, 22, 0)
    assert lanes.open_lanes == {0, 1, 2}
    shares = [drained(lanes, worker) for worker in range(3)]
    for share, (start, stop) in zip(shares, [(0, 3), (3, 7), (7, 11)], strict=True):
        for epoch in range(2):
            positions = [p for r in share if r.epoch == epoch for p in range(r.start, r.stop)]
            assert positions == list(range(start, stop))
    assert (lanes.applied, lanes.finished, lanes.complete_epochs) == (22, True, 2)
    assert lanes.open_lanes == frozenset()


def test_a_lane_that_is_behind_keeps_the_epoch_and_the_job_open() -> None:
    lanes = Lanes(records=8, epochs=1, shard_records=4, lanes=2)
    drained(lanes, 0)
    assert (lanes.applied, lanes.finished, lanes.complete_epochs) == (4, False, 0)
    assert lanes.open_lanes == {1}


def test_more_epochs_are_more_records_in_every_lane() -> None:
    lanes = Lanes(records=8, epochs=1, shard_records=4, lanes=2)
    for worker in range(2):
        drained(lanes, worker)
    lanes.extend(2)
    assert (lanes.expected, lanes.finished) == (16, False)
    assert lanes.open_lanes == {0, 1}
    assert drained(lanes, 0) == [Range(1, 0, 4)]
    assert drained(lanes, 1) == [Range(1, 4, 8)]
    assert lanes.finished


def test_a_worker_without_a_lane_is_handed_nothing() -> None:
    lanes = Lanes(records=2, epochs=1, shard_records=4, lanes=3)
    assert lanes.open_lanes == {0, 1}
    assert lanes.take(1, worker=2, batch=1) == []
    assert lanes.held(1) == []
    assert lanes.take(2, worker=1, batch=1) == [Range(0, 1, 2)]


def test_what_a_worker_holds_is_applied_or_given_back_in_its_own_lane() -> None:
    lanes = Lanes(records=16, epochs=1, shard_records=4, lanes=2)
    [taken] = lanes.take(7, worker=1, batch=4)
    assert taken == Range(0, 8, 12)
    assert lanes.held(7) == [taken]
    lanes.check(7, [Range(0, 8, 10)])
    with pytest.raises(LedgerError):
        lanes.check(7, [Range(0, 0, 2)])
    lanes.apply(7, [Range(0, 8, 10)])
    assert (lanes.applied, lanes.held(7)) == (2, [Range(0, 10, 12)])
    with pytest.raises(LedgerError):
        lanes.apply(7, [Range(0, 8, 10)])
    lanes.give_back(7, keep=[Range(0, 11, 12)])
    assert lanes.held(7) == [Range(0, 11, 12)]
    assert lanes.take(8, worker=1, batch=4) == [Range(0, 10, 11)]
    assert lanes.take(9, worker=0, batch=4) == [Range(0, 0, 4)]


def test_whoever_has_taken_nothing_holds_nothing() -> None:
    lanes = Lanes(records=16, epochs=1, shard_records=4, lanes=1)
    assert lanes.held(7) == []
    lanes.give_back(7)
    lanes.give_back_some(7, [])
    with pytest.raises(LedgerError):
        lanes.apply(7, [Range(0, 0, 4)])


def test_a_step_that_is_void_gives_its_records_back_to_their_lane() -> None:
    lanes = Lanes(records=16, epochs=1, shard_records=4, lanes=2)
    assert lanes.take(7, worker=1, batch=4) == [Range(0, 8, 12)]
    lanes.give_back_some(7, [Range(0, 8, 10)])
    assert lanes.held(7) == [Range(0, 10, 12)]
    assert lanes.take(8, worker=1, batch=2) == [Range(0, 8, 10)]
    assert lanes.take(9, worker=0, batch=4) == [Range(0, 0, 4)]


def test_a_copy_goes_its_own_way() -> None:
    lanes = Lanes(records=16, epochs=1, shard_records=4, lanes=2)
    taken = lanes.take(7, worker=1, batch=4)
    other = lanes.copy()
    other.apply(7, taken)
    assert (lanes.applied, other.applied) == (0, 4)
    assert (lanes.held(7), other.held(7)) == (taken, [])
    assert other.take(7, worker=1, batch=4) == [Range(0, 12, 16)]
    other.give_back(7)
    other.take(8, worker=0, batch=4)
    assert lanes.held(8) == []
    assert other.held(8) == [Range(0, 0, 4)]


def test_the_state_is_read_again_and_what_was_held_is_handed_out_anew() -> None:
    lanes = Lanes(records=16, epochs=1, shard_records=4, lanes=2)
    lanes.apply(7, lanes.take(7, worker=1, batch=4))
    lanes.take(7, worker=1, batch=4)
    read = Lanes.from_state(lanes.state(), shard_records=2)
    assert (read.records, read.epochs, read.applied) == (16, 1, 4)
    assert read.held(7) == []
    assert drained(read, 1, batch=2) == [Range(0, 12, 14), Range(0, 14, 16)]
    assert read.open_lanes == {0}


@pytest.mark.parametrize("change", [{"records": 18}, {"epochs": 2}])
def test_lanes_of_other_records_are_refused(change: dict[str, int]) -> None:
    state = Lanes(records=16, epochs=1, shard_records=4, lanes=2).state()
    with pytest.raises(LedgerError, match="do not match"):
        Lanes.from_state(state | change, shard_records=4)
