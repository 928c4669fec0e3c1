"""Rounds with backup workers: who may push, when such a round is committed, and with whose steps."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_ps.core.backup import BackupRounds
from elastic_ps.core.consistency import Entry
from elastic_ps.errors import RefusalCode, Refused
from tests.testing.rounds import RoundsMachine, step


def opened(*workers: int, spare: int = 1) -> BackupRounds:
    """Rounds whose open one, on version 5, may be made of steps of `workers`."""
    return BackupRounds(version=5, spare=spare, expected=set(workers))


def let_in(rounds: BackupRounds, worker: int, *, version: int) -> bool:
    return rounds.begin(worker, version=version) is Entry.IN


def finish(rounds: BackupRounds, *workers: int) -> None:
    for worker in workers:
        assert rounds.finish(step(worker), version=rounds.version, attempt=rounds.attempt)


def test_the_last_to_begin_is_turned_away() -> None:
    rounds = opened(0, 1, 2)
    assert let_in(rounds, 2, version=5)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 0, version=5), "asked twice"
    assert not let_in(rounds, 1, version=5)
    finish(rounds, 0)
    assert not rounds.can_commit(), "worker 2 has begun, so its values are in the sums"
    finish(rounds, 2)
    assert [c.worker for c in rounds.begin_commit()] == [0, 2]
    rounds.end_commit()
    assert rounds.expected == {0, 2}


def test_two_workers_that_are_owed_a_place_are_both_let_in() -> None:
    rounds = opened(0, 1, 2, spare=2)
    rounds.owed = {0, 1}
    assert not let_in(rounds, 2, version=5)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 1, version=5)


def test_a_round_does_not_wait_for_who_has_not_begun() -> None:
    rounds = opened(0, 1, 2)
    for worker in (0, 1):
        assert let_in(rounds, worker, version=5)
    finish(rounds, 0, 1)
    assert [c.worker for c in rounds.begin_commit()] == [0, 1]
    rounds.end_commit()
    assert not let_in(rounds, 2, version=5), "its step is on a version that is over"
    assert rounds.wanted == 2, "with as many workers a round is made of as many steps"
    rounds.admit(2)
    assert rounds.takes_part(2)
    assert let_in(rounds, 1, version=6)
    assert let_in(rounds, 2, version=6), "else the round would wait for 0, which may be the slowest"


def test_who_was_turned_away_is_back_in_the_next_round() -> None:
    rounds = opened(0, 1, 2)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 1, version=5)
    assert not let_in(rounds, 2, version=5)
    rounds.admit(2)
    finish(rounds, 0, 1)
    rounds.begin_commit()
    rounds.end_commit()
    assert rounds.expected == {0, 1, 2}
    assert let_in(rounds, 2, version=6)


def test_who_was_turned_away_counts_as_such_until_it_comes_back_or_gives_up() -> None:
    rounds = opened(0, 1, 2, 3, spare=2)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 1, version=5)
    assert not let_in(rounds, 2, version=5)
    assert not let_in(rounds, 3, version=5)
    assert rounds.late_workers == {2, 3}
    rounds.admit(2)
    assert rounds.late_workers == {3}
    rounds.withdraw(3)
    assert rounds.late_workers == set()
    assert not let_in(rounds, 0, version=4)
    rounds.lose(0)
    assert rounds.late_workers == set()


def test_who_was_turned_away_and_has_not_come_back_is_the_one_to_do_without() -> None:
    rounds = opened(0, 1, 2)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 1, version=5)
    assert not let_in(rounds, 2, version=5)  # its script will notice at the end of its backward
    finish(rounds, 0, 1)
    rounds.begin_commit()
    rounds.end_commit()
    assert rounds.wanted == 2
    assert let_in(rounds, 0, version=6)
    assert let_in(rounds, 1, version=6)
    rounds.lose(2)
    assert rounds.wanted == 1


def test_who_comes_to_a_round_that_was_full_does_not_make_it_wait() -> None:
    rounds = opened(0, 1)
    assert let_in(rounds, 0, version=5)
    assert not let_in(rounds, 1, version=5)
    rounds.admit(2)
    assert not rounds.takes_part(2)
    finish(rounds, 0)
    assert [c.worker for c in rounds.begin_commit()] == [0]
    rounds.end_commit()
    assert rounds.expected == {0, 2}


def test_a_full_round_whose_workers_vanish_is_open_again() -> None:
    rounds = opened(0, 1)
    assert let_in(rounds, 0, version=5)
    assert not let_in(rounds, 1, version=5)
    rounds.admit(1)
    rounds.admit(2)
    rounds.lose(0)
    assert rounds.expected == {1, 2}
    assert let_in(rounds, 2, version=5)


def test_who_gets_records_need_not_wait_for_the_slowest() -> None:
    rounds = opened(0, 1, 2)
    for worker in (0, 1):  # they have run out of records, and 2 is slow
        rounds.withdraw(worker)
    for worker in (0, 1):
        rounds.admit(worker)
        assert let_in(rounds, worker, version=5)
    finish(rounds, 0, 1)
    assert rounds.can_commit()


def test_a_round_that_was_decided_is_made_of_the_same_steps() -> None:
    rounds = opened(0, 1, 2)
    for worker in (0, 1):
        assert let_in(rounds, worker, version=5)
    finish(rounds, 0, 1)
    decided = rounds.begin_commit()
    rounds.fail_commit()  # a shard's answer was lost
    rounds.admit(3)
    assert not rounds.takes_part(3)
    assert not let_in(rounds, 2, version=5)
    assert rounds.begin_commit() == decided


def test_only_a_loss_that_is_in_the_sums_starts_the_round_again() -> None:
    rounds = opened(0, 1, 2)
    assert let_in(rounds, 0, version=5)
    rounds.lose(2)
    assert (rounds.attempt, rounds.expected) == (0, {0, 1})
    assert not let_in(rounds, 1, version=5), "of two workers one is enough"
    rounds = opened(0, 1, 2)
    assert let_in(rounds, 0, version=5)
    finish(rounds, 0)
    assert let_in(rounds, 1, version=5)
    rounds.lose(1)
    assert (rounds.attempt, rounds.done) == (1, {})
    finish(rounds, 0)
    assert rounds.can_commit(), "of two workers one is enough"


def test_a_round_that_starts_again_does_not_wait_for_who_came_in_the_place_of_one_that_had_finished() -> None:
    rounds = opened(0, 1, 2, spare=1)
    assert let_in(rounds, 0, version=5)
    assert let_in(rounds, 1, version=5)
    finish(rounds, 0)
    rounds.lose(0)
    rounds.admit(0)
    rounds.lose(1)
    assert rounds.expected == {0, 2}
    assert not rounds.begun
    assert let_in(rounds, 2, version=5)
    finish(rounds, 2)
    assert rounds.can_commit(), "of two workers one is enough"


def test_a_single_worker_is_enough_and_needed() -> None:
    rounds = opened(0, spare=3)
    assert let_in(rounds, 0, version=5)
    finish(rounds, 0)
    assert rounds.can_commit()


def test_a_step_that_nobody_has_let_in_is_refused() -> None:
    rounds = opened(0, 1)
    with pytest.raises(Refused, match="pushed its step without asking") as refused:
        finish(rounds, 0)
    assert refused.value.code is RefusalCode.INVALID


class BackupRoundsMachine(RoundsMachine[BackupRounds]):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = BackupRounds()

    @initialize(spare=st.integers(1, 3))
    def choose(self, spare: int) -> None:
        self.rounds.spare = spare

    @rule(worker=st.integers(0, 5))
    def come(self, worker: int) -> None:
        """Also one that was turned away, which gets records at once."""
        if self.on.get(worker) is None:
            self.rounds.admit(worker)
            self.on[worker] = None
        self.open()

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        if let_in(self.rounds, worker, version=self.on[worker] or 0):
            assert self.on[worker] == self.rounds.version
            self.pushing.add(worker)
        else:
            self.on[worker] = None
            assert not self.rounds.knows(worker)
        self.open()

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        version = self.rounds.version
        contributions = self.rounds.begin_commit()
        assert contributions
        assert self.decided in ([], contributions)
        self.decided = []
        assert self.pushing <= {c.worker for c in contributions}, "nobody who has begun is left out"
        self.rounds.end_commit()
        for c in contributions:
            if c.worker in self.on:
                self.on[c.worker] = version + 1
        self.pushing.clear()
        self.open()

    @invariant()
    def there_is_no_deadlock(self) -> None:
        """Somebody can go on: push, finish, or be let in by the commit of a round that is ready."""
        rounds = self.rounds
        assert rounds.begun - rounds.gone <= self.on.keys()
        assert self.pushing == rounds.begun - rounds.gone
        waiting = [w for w, version in self.on.items() if version is None and rounds.knows(w)]
        can_go_on = self.computing() or self.sending() or rounds.can_commit()
        assert can_go_on or not waiting

    @precondition(lambda self: len(self.on) > 1)
    @rule(data=st.data())
    def some_are_slow(self, data: st.DataObject) -> None:
        """A round is made without as many as there are backup workers, whichever they are."""
        idle = sorted(self.on.keys() - self.pushing)
        most = min(self.rounds.spare, len(self.on) - 1)
        slow = data.draw(st.sets(st.sampled_from(idle), max_size=most)) if idle else set()
        rounds, on, pushing = self.rounds.copy(), dict(self.on), set(self.pushing)
        for _ in range(3):
            for worker in self.on.keys() - slow - pushing:
                if on[worker] is None and not rounds.knows(worker):
                    rounds.admit(worker)
                if on[worker] is None and rounds.takes_part(worker):
                    on[worker] = rounds.version
                version = on[worker]
                if version is not None and let_in(rounds, worker, version=version):
                    pushing.add(worker)
                else:
                    on[worker] = None
            for worker in pushing - rounds.done.keys():
                rounds.finish(step(worker, self.steps + 1), version=rounds.version, attempt=rounds.attempt)
        assert rounds.can_commit()


BackupRoundsMachine.TestCase.settings = settings(stateful_step_count=50)
TestBackupRounds = BackupRoundsMachine.TestCase
