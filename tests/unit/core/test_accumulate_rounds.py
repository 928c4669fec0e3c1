"""Rounds of a fixed number of gradients: who adds one, who computes another one, and what becomes void."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_ps.core.accumulate import AccumulateRounds
from elastic_ps.core.consistency import Contribution, Entry, SyncRounds
from elastic_ps.errors import RefusalCode, Refused
from tests.testing.rounds import RoundsMachine, step


def opened(*workers: int, wanted: int) -> AccumulateRounds:
    """Rounds whose open one is on version 5, on which `workers` compute."""
    rounds = AccumulateRounds(version=5, wanted=wanted)
    for worker in workers:
        rounds.admit(worker)
    return rounds


def push(rounds: AccumulateRounds, worker: int, number: int = 0) -> None:
    assert rounds.begin(worker, version=rounds.version) is Entry.IN
    assert rounds.finish(step(worker, number), version=rounds.version, attempt=rounds.attempt)


def commit(rounds: AccumulateRounds, *, last: bool = False) -> list[tuple[int, int]]:
    made_of = [(c.worker, c.step) for c in rounds.begin_commit(last=last)]
    rounds.end_commit()
    return made_of


def test_with_as_many_gradients_as_workers_each_adds_one() -> None:
    rounds = opened(0, 1, 2, wanted=3)
    for worker in (2, 0):
        push(rounds, worker)
        assert not rounds.goes_on(worker, 0), "worker 1 computes the third one"
        assert not rounds.can_commit()
    push(rounds, 1)
    assert commit(rounds) == [(0, 0), (1, 0), (2, 0)]
    assert rounds.expected == {0, 1, 2}
    assert rounds.version == 6


def test_two_workers_that_are_owed_a_place_do_not_keep_each_other_out() -> None:
    rounds = opened(0, 1, 2, wanted=1)
    rounds.owed = {0, 1}
    assert rounds.begin(2, version=5) is Entry.LATE
    push(rounds, 0)
    assert rounds.begin(1, version=5) is Entry.LATE, "the round has its only step"
    assert commit(rounds) == [(0, 0)]


def test_with_more_gradients_than_workers_the_fast_ones_add_several() -> None:
    rounds = opened(0, 1, wanted=4)
    for number in (0, 1):
        push(rounds, 0, number)
        assert rounds.goes_on(0, number)
    push(rounds, 0, 2)
    assert not rounds.goes_on(0, 2), "worker 1 computes the fourth one"
    assert not rounds.can_commit()
    push(rounds, 1)
    assert commit(rounds) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_worker_weighs_all_of_its_steps_of_a_version_or_none() -> None:
    rounds = opened(0, wanted=2)
    push(rounds, 0)
    assert rounds.goes_on(0, 0)
    assert rounds.begin(0, version=5) is Entry.IN
    weighed = Contribution(worker=0, incarnation=0, step=1, samples=8, weight=3.0)
    with pytest.raises(Refused, match=r"step 1 of worker 0 was weighed .* step 0 of worker 0 was not"):
        rounds.finish(weighed, version=5, attempt=0)


def test_with_fewer_gradients_than_workers_the_last_to_begin_is_turned_away() -> None:
    rounds = opened(0, 1, 2, wanted=2)
    push(rounds, 1)
    assert rounds.begin(0, version=5) is Entry.IN
    assert rounds.begin(2, version=5) is Entry.LATE
    assert (rounds.late_workers, rounds.takes_part(2)) == ({2}, False)
    rounds.admit(2)
    assert not rounds.takes_part(2), "the round has all that it needs"
    assert rounds.finish(step(0), version=5, attempt=0)
    assert commit(rounds) == [(0, 0), (1, 0)]
    assert rounds.expected == {0, 1, 2}


def test_a_stale_gradient_is_refused() -> None:
    rounds = opened(0, 1, wanted=1)
    push(rounds, 0)
    assert commit(rounds) == [(0, 0)]
    assert rounds.begin(1, version=5) is Entry.LATE
    assert rounds.late_workers == {1}


def test_the_step_of_a_worker_that_takes_no_part_is_late_and_it_is_not_expected_back() -> None:
    rounds = opened(0, 1, wanted=2)
    rounds.withdraw(1)
    assert rounds.begin(1, version=5) is Entry.LATE
    assert rounds.late_workers == set()


def test_a_step_that_will_come_too_late_is_not_waited_for() -> None:
    """Worker 1 computes on a version that is over, so that worker 0 has to add both gradients."""
    rounds = opened(0, 1, 2, wanted=2)
    push(rounds, 0)
    push(rounds, 2)
    commit(rounds)
    rounds.withdraw(2)
    push(rounds, 0, 1)
    assert rounds.goes_on(0, 1)
    push(rounds, 0, 2)
    assert commit(rounds) == [(0, 1), (0, 2)]


def test_who_waits_goes_on_when_another_one_withdraws_or_vanishes() -> None:
    for leave in (AccumulateRounds.withdraw, AccumulateRounds.lose):
        rounds = opened(0, 1, wanted=2)
        push(rounds, 0)
        assert not rounds.goes_on(0, 0)
        leave(rounds, 1)
        assert rounds.goes_on(0, 0)
        push(rounds, 0, 1)
        assert commit(rounds) == [(0, 0), (0, 1)]


def test_what_was_finished_stays_when_its_worker_vanishes_and_its_successor_may_add_more() -> None:
    rounds = opened(0, 1, wanted=2)
    push(rounds, 0)
    assert rounds.lose(0) == []
    rounds.withdraw(1)
    rounds.admit(0)
    assert rounds.takes_part(0)
    push(rounds, 0, 7)
    assert commit(rounds) == [(0, 0), (0, 7)]


def test_when_the_round_starts_again_the_steps_whose_gradients_are_gone_are_void() -> None:
    rounds = opened(0, 1, 2, wanted=5)
    push(rounds, 0)
    assert rounds.goes_on(0, 0)
    push(rounds, 0, 1)
    push(rounds, 1)
    assert rounds.goes_on(1, 0)
    assert rounds.begin(2, version=5) is Entry.IN
    assert rounds.lose(2) == [step(0), step(1)], "worker 0 still has its second step"
    assert (rounds.attempt, rounds.contributions) == (1, [])
    with pytest.raises(Refused) as refused:
        rounds.finish(step(0), version=5, attempt=0)
    assert refused.value.code is RefusalCode.STALE_ATTEMPT
    assert rounds.finish(step(0, 1), version=5, attempt=1)
    assert rounds.goes_on(0, 1)


def test_a_late_copy_of_a_message_changes_nothing() -> None:
    rounds = opened(0, wanted=3)
    push(rounds, 0)
    assert rounds.goes_on(0, 0)
    assert not rounds.goes_on(0, 0)
    assert not rounds.finish(step(0), version=5, attempt=0)
    push(rounds, 0, 1)
    assert not rounds.goes_on(0, 0)
    assert len(rounds.contributions) == 2


def test_the_last_version_has_what_there_is() -> None:
    rounds = opened(0, 1, wanted=9)
    push(rounds, 0)
    assert rounds.goes_on(0, 0)
    rounds.withdraw(0)  # there are no records for it
    assert not rounds.can_commit(last=True), "worker 1 computes"
    push(rounds, 1)
    assert not rounds.can_commit()
    assert not rounds.resting
    assert commit(rounds, last=True) == [(0, 0), (1, 0)]


@given(orders=st.lists(st.permutations(range(4)), max_size=5))
def test_it_is_sync_with_as_many_gradients_as_workers_while_nobody_is_lost(orders: list[list[int]]) -> None:
    sync, accumulate = SyncRounds(expected=set(range(4))), AccumulateRounds(expected=set(range(4)), wanted=4)
    for number, order in enumerate(orders):
        for worker in order:
            assert (sync.can_commit(), accumulate.can_commit()) == (False, False)
            assert accumulate.begin(worker, version=number) is Entry.IN
            for rounds in (sync, accumulate):
                assert rounds.finish(step(worker, number), version=number, attempt=0)
            assert not accumulate.goes_on(worker, number)
        assert sync.begin_commit() == accumulate.begin_commit()
        for rounds in (sync, accumulate):
            rounds.end_commit()
        assert (sync.version, sync.expected) == (accumulate.version, accumulate.expected)


class AccumulateRoundsMachine(RoundsMachine[AccumulateRounds]):
    """Its model also knows which workers have finished a step and wait for their version."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = AccumulateRounds()
        self.waiting: dict[int, int] = {}  # the step that is finished
        self.finished: set[int] = set()  # steps that are finished, in no version and not void

    @initialize(wanted=st.integers(1, 6))
    def choose(self, wanted: int) -> None:
        self.rounds.wanted = wanted

    def computing(self) -> set[int]:
        return super().computing() - self.waiting.keys()

    def _void(self, void: list[Contribution]) -> None:
        numbers = [c.step for c in void]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= self.finished
        self.finished -= set(numbers)

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        version = self.on[worker]
        assert version is not None
        if self.rounds.begin(worker, version=version) is Entry.IN:
            assert version == self.rounds.version
            self.pushing.add(worker)
        else:
            del self.on[worker]
        self.open()

    @precondition(lambda self: self.pushing)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.pushing)
        number = self.waiting.get(worker)
        if number is None:
            self.steps += 1
            number = self.steps
        contribution = step(worker, number)
        assert self.rounds.finish(contribution, version=self.rounds.version, attempt=self.rounds.attempt)
        self.pushing.discard(worker)
        self.waiting[worker] = number
        self.finished.add(number)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.waiting)
        if worker not in self.pushing and self.rounds.goes_on(worker, self.waiting[worker]):
            del self.waiting[worker]

    @precondition(lambda self: self.on)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.on)
        attempt, in_the_sums = self.rounds.attempt, worker in self.pushing
        void = self.rounds.lose(worker)
        assert (self.rounds.attempt > attempt) == in_the_sums
        del self.on[worker]
        self.pushing.discard(worker)
        number = self.waiting.pop(worker, None)
        if in_the_sums:
            self.finished.discard(-1 if number is None else number)  # it was to be pushed again
            self._void([c for c in void if c.step in self.finished])
            self.pushing |= self.waiting.keys()
        else:
            assert void == []
        self.open()

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        contributions = self.rounds.begin_commit()
        assert self.decided in ([], contributions)
        assert len(contributions) == self.rounds.wanted
        assert {c.step for c in contributions} == self.finished
        assert not self.pushing, "nobody who has begun is left out"
        self.rounds.end_commit()
        for worker in self.waiting:
            self.on[worker] = self.rounds.version
        self.waiting.clear()
        self.finished.clear()
        self.decided = []
        self.open()

    @invariant()
    def the_steps_of_the_round_are_those_that_are_finished(self) -> None:
        pushed_again = {self.waiting[w] for w in self.pushing & self.waiting.keys()}
        assert {c.step for c in self.rounds.contributions} == self.finished - pushed_again

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        """Nobody waits for a version that nobody computes for."""
        fresh = {w for w in self.computing() if self.on[w] == self.rounds.version}
        if self.waiting.keys() - self.pushing and not (self.pushing or fresh or self.rounds.can_commit()):
            rounds = self.rounds.copy()
            assert any(rounds.goes_on(worker, number) for worker, number in self.waiting.items())
        if None in self.on.values():
            assert self.rounds.can_commit() or {*self.on.values()} != {None}, "newcomers wait alone"


AccumulateRoundsMachine.TestCase.settings = settings(stateful_step_count=50)
TestAccumulateRounds = AccumulateRoundsMachine.TestCase
