"""The records of a version are cut into portions: all of them, each once, whoever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_ps.core.ledger import Range
from elastic_ps.core.portions import PortionedLedger, apportion, cut

WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=7)


@given(total=st.integers(0, 500), weights=WEIGHTS, least=st.integers(1, 3))
def test_parts_are_in_proportion(total: int, weights: list[float], least: int) -> None:
    parts = apportion(total, weights, least=least)
    assert sum(parts) == total
    assert all(part >= least for part in parts if part) or [part for part in parts if part] == [total]
    assert sum(map(bool, parts)) == min(len(weights), max(total // least, bool(total)))
    quotas = [total * weight / sum(weights) for weight in weights]
    if min(quotas) >= least:
        assert all(abs(part - quota) < 1 for part, quota in zip(parts, quotas, strict=True))


def test_who_has_the_largest_remainder_gets_one_more_and_nobody_gets_nothing() -> None:
    assert apportion(100, [1, 1, 1]) == [34, 33, 33]
    assert apportion(10, [1, 2]) == [3, 7]
    assert apportion(100, [1, 1000]) == [1, 99]
    assert apportion(2, [1, 1, 1]) == [1, 1, 0]
    assert apportion(2, [1, 1, 1], least=2) == [2, 0, 0]
    assert apportion(5, [1, 3, 2], least=2) == [0, 3, 2]


def test_ranges_are_cut_in_order() -> None:
    ranges = [Range(0, 4, 6), Range(0, 9, 14)]
    assert cut(ranges, [3, 0, 2, 9]) == [
        [Range(0, 4, 6), Range(0, 9, 10)],
        [],
        [Range(0, 10, 12)],
        [Range(0, 12, 14)],
    ]


EVEN = {0: 1.0, 1: 1.0, 2: 1.0}


def ledger(*, records: int = 25, epochs: int = 2, size: int = 10) -> PortionedLedger:
    return PortionedLedger(records, epochs, 4, size=size)


def test_a_version_is_cut_up_for_who_takes_part_and_the_next_one_opens_when_it_is_over() -> None:
    job = ledger()
    assert job.take_portion(11, worker=1, weights=EVEN) == [Range(0, 4, 7)]
    assert job.take_portion(11, worker=1, weights=EVEN) == [], "it had its portion"
    assert job.take_portion(12, worker=2, weights=EVEN) == [Range(0, 7, 10)]
    assert job.take_portion(13, worker=3, weights=EVEN | {3: 1.0}) == [], "it has come too late"
    assert job.take_portion(10, worker=0, weights=EVEN) == [Range(0, 0, 4)]
    assert job.left == 0
    for holder, part in [(10, Range(0, 0, 4)), (11, Range(0, 4, 7)), (12, Range(0, 7, 10))]:
        job.apply(holder, [part])
    assert job.take_portion(12, worker=2, weights={2: 3.0, 0: 2.0}) == [Range(0, 14, 20)]


def test_the_last_version_of_an_epoch_has_the_rest() -> None:
    job = ledger()
    for start in (0, 10):
        job.apply(1, job.take_portion(1, worker=0, weights={0: 1}))
        assert job.applied == start + 10
    assert job.take_portion(1, worker=0, weights={0: 1}) == [Range(0, 20, 25)]
    job.apply(1, [Range(0, 20, 25)])
    assert job.complete_epochs == 1
    assert job.take_portion(1, worker=0, weights={0: 1}) == [Range(1, 0, 10)]


def test_what_is_given_back_or_not_fetched_goes_to_those_who_are_there() -> None:
    job = ledger()
    assert job.take_portion(11, worker=1, weights=EVEN) == [Range(0, 4, 7)]
    assert job.take_portion(10, worker=0, weights=EVEN) == [Range(0, 0, 4)]
    job.give_back(11)
    there = {0: 1.0, 3: 1.0}
    assert job.portion(0, there) == [Range(0, 4, 7)], "worker 2 has not come for its portion"
    assert job.take_portion(13, worker=3, weights=there) == [Range(0, 7, 10)]
    assert job.take_portion(10, worker=0, weights=there) == [Range(0, 4, 7)]
    job.apply(10, [Range(0, 0, 4), Range(0, 4, 7)])
    assert job.left == 0
    job.apply(13, [Range(0, 7, 10)])
    assert job.open_records == 10


def test_skipped_records_count_and_their_version_is_smaller() -> None:
    job = ledger()
    assert job.take_portion(1, worker=0, weights={0: 1, 1: 1}) == [Range(0, 0, 5)]
    job.skip(1, [Range(0, 0, 5)])
    assert (job.open_records, job.left) == (5, 5)
    assert job.take_portion(2, worker=1, weights={0: 1, 1: 1}) == [Range(0, 5, 10)]
    job.apply(2, [Range(0, 5, 10)])
    assert job.portion(0, {0: 1}) == [Range(0, 10, 20)]


@pytest.mark.parametrize("taken", [0, 1])
def test_the_state_is_read_again(taken: int) -> None:
    job = ledger()
    job.apply(1, job.take_portion(1, worker=0, weights={0: 1}))
    if taken:
        job.take_portion(1, worker=0, weights=EVEN)
    read = PortionedLedger.from_state(job.state(), shard_records=4)
    read.size = 10
    assert read.take_portion(2, worker=0, weights={0: 1}) == [Range(0, 10, 20)]


def test_a_copy_goes_its_own_way() -> None:
    job = ledger()
    assert job.portion(0, EVEN) == [Range(0, 0, 4)]
    other = job.copy()
    assert other.take_portion(10, worker=0, weights=EVEN) == [Range(0, 0, 4)]
    assert (job.held_by_all, set(job.kept), set(other.kept)) == (0, {0, 1, 2}, {1, 2})


def test_a_job_in_another_mode_goes_on_with_versions_of_this_size() -> None:
    """Some records were given back, so that those that are in the model are not the first ones."""
    state = {"records": 25, "epochs": 2, "applied": 7, "skipped": 0, "next": [0, 12]}
    job = PortionedLedger.from_state(state | {"returned": [[0, 2, 5], [0, 8, 10]]}, shard_records=4)
    job.size = 10
    sizes = []
    while taken := job.take_portion(1, worker=0, weights={0: 1}):
        job.apply(1, taken)
        sizes.append(sum(r.records for r in taken))
    assert (sizes, job.finished) == ([3, 10, 5, 10, 10, 5], True)


class Workers(RuleBasedStateMachine):
    """Workers come, take portions, skip and vanish; a version is made when all of it is finished."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[int, int] = {}  # incarnation
        self.weights: dict[int, float] = {}
        self.finished: dict[int, list[Range]] = {}  # by incarnation
        self.incarnations = 0
        self.made: list[list[Range]] = []
        self.skipped: list[Range] = []

    @initialize(records=st.integers(1, 40), epochs=st.integers(1, 2), size=st.integers(1, 15))
    def begin(self, records: int, epochs: int, size: int) -> None:
        self.ledger = PortionedLedger(records, epochs, 4, size=min(size, records))

    @rule(worker=st.integers(0, 5), weight=st.floats(0.1, 9))
    def come(self, worker: int, weight: float) -> None:
        if worker not in self.here:
            self.incarnations += 1
            self.here[worker], self.weights[worker] = self.incarnations, weight

    def unfinished(self, holder: int) -> list[Range]:
        return self.ledger.held(holder, besides=self.finished.get(holder, ()))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        kept = self.ledger.portion(worker, self.weights)
        assert self.ledger.take_portion(self.here[worker], worker=worker, weights=self.weights) == kept

    @precondition(lambda self: any(self.unfinished(holder) for holder in self.here.values()))
    @rule(data=st.data(), skip=st.booleans())
    def finish(self, data: st.DataObject, skip: bool) -> None:
        holders = sorted(h for h in self.here.values() if self.unfinished(h))
        holder = data.draw(st.sampled_from(holders))
        done = self.unfinished(holder)[0]
        done = done._replace(stop=data.draw(st.integers(done.start + 1, done.stop)))
        if skip:
            self.ledger.skip(holder, [done])
            self.skipped.append(done)
        else:
            self.finished.setdefault(holder, []).append(done)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), void=st.booleans())
    def vanish(self, data: st.DataObject, void: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.here)))
        holder = self.here.pop(worker)
        del self.weights[worker]
        if void:
            self.finished.pop(holder, None)
        self.ledger.give_back(holder, keep=self.finished.get(holder, ()))

    @precondition(lambda self: self.finished)
    @rule()
    def commit(self) -> None:
        finished = sum(r.records for ranges in self.finished.values() for r in ranges)
        if self.ledger.left or finished < self.ledger.held_by_all:
            return
        made: list[Range] = []
        for holder, ranges in self.finished.items():
            self.ledger.apply(holder, ranges)
            made += ranges
        self.finished.clear()
        self.made.append(made)

    def drain(self) -> None:
        """One worker that stays trains all that is left."""
        for worker in list(self.here):
            self.ledger.give_back(self.here[worker], keep=self.finished.get(self.here[worker], ()))
        self.here, self.weights = {9: 99}, {9: 1.0}
        while not self.ledger.finished:
            self.finished.setdefault(99, []).extend(self.ledger.take_portion(99, worker=9, weights={9: 1.0}))
            before = self.ledger.applied
            self.commit()
            assert self.ledger.applied > before

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.drain()
        records, size = self.ledger.records, self.ledger.size
        out = {(r.epoch, i) for r in self.skipped for i in range(r.start, r.stop)}
        sets = [
            [(epoch, i) for i in range(start, min(start + size, records)) if (epoch, i) not in out]
            for epoch in range(self.ledger.epochs)
            for start in range(0, records, size)
        ]
        made = [sorted((r.epoch, i) for r in each for i in range(r.start, r.stop)) for each in self.made]
        assert made == [each for each in sets if each]

    @invariant()
    def no_more_than_a_version_is_handed_out(self) -> None:
        if hasattr(self, "ledger"):
            kept = sum(r.records for ranges in self.ledger.kept.values() for r in ranges)
            assert 0 <= kept <= self.ledger.left
            assert self.ledger.held_by_all <= self.ledger.size


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(stateful_step_count=30)
