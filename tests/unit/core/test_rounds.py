"""When a round is committed, and with whose steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_ps.core.consistency import Contribution, SyncRounds
from elastic_ps.errors import RefusalCode, Refused


def step(worker: int, number: int = 0, *, incarnation: int | None = None) -> Contribution:
    """A worker's step; its incarnation is the worker's index unless given."""
    return Contribution(
        worker=worker, incarnation=worker if incarnation is None else incarnation, step=number, samples=8
    )


def opened(*workers: int) -> SyncRounds:
    """Rounds whose open one waits for `workers`."""
    rounds = SyncRounds()
    for worker in workers:
        rounds.admit(worker)
    if len(workers) > 1:  # the others take part from the next round on
        rounds.finish(step(workers[0], -1), version=0, attempt=0)
        rounds.begin_commit()
        rounds.end_commit()
    return rounds


def code(rounds: SyncRounds, contribution: Contribution, version: int, attempt: int) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        rounds.finish(contribution, version=version, attempt=attempt)
    return refused.value.code


@pytest.mark.parametrize("weighed_first", [False, True])
def test_a_step_that_was_weighed_and_one_that_was_not_are_in_no_version(*, weighed_first: bool) -> None:
    rounds = opened(0, 1)
    first = replace(step(0), weight=8.0 * weighed_first)
    second = replace(step(1), weight=8.0 * (not weighed_first))
    rounds.finish(first, version=1, attempt=0)
    assert not rounds.finish(first, version=1, attempt=0), "a repeated call"
    with pytest.raises(
        Refused, match=r"of worker [01] was weighed .* of worker [01] was not.* in all"
    ) as told:
        rounds.finish(second, version=1, attempt=0)
    assert told.value.code is RefusalCode.INVALID
    rounds.lose(1)
    rounds.finish(step(0), version=1, attempt=1)
    assert rounds.can_commit(), "the steps of a later attempt are compared with each other"


def test_the_first_worker_takes_part_at_once_the_next_from_the_next_round_on() -> None:
    rounds = SyncRounds()
    rounds.admit(3)
    rounds.admit(1)
    assert (rounds.takes_part(3), rounds.takes_part(1)) == (True, False)
    rounds.finish(step(3), version=0, attempt=0)
    assert rounds.begin_commit() == [step(3)]
    rounds.end_commit()
    assert rounds.expected == {1, 3}


def test_a_round_is_ready_when_all_have_finished_and_lists_them_in_order() -> None:
    rounds = opened(2, 0, 1)
    for worker in (2, 0):
        rounds.finish(step(worker), version=1, attempt=0)
        assert not rounds.can_commit()
        with pytest.raises(ValueError, match="not ready"):
            rounds.begin_commit()
    rounds.finish(step(1), version=1, attempt=0)
    assert [c.worker for c in rounds.begin_commit()] == [0, 1, 2]
    assert not rounds.can_commit(), "it is decided once"


def test_no_round_is_committed_out_of_nothing() -> None:
    rounds = SyncRounds()
    assert not rounds.can_commit()
    rounds.admit(0)
    rounds.withdraw(0)
    assert not rounds.can_commit()


def test_a_repeated_finish_is_known_and_outdated_ones_are_refused() -> None:
    rounds = opened(0, 1)
    assert rounds.finish(step(0), version=1, attempt=0)
    assert not rounds.finish(step(0), version=1, attempt=0)
    assert code(rounds, step(1), 0, 0) is RefusalCode.WRONG_VERSION
    assert code(rounds, step(1), 2, 0) is RefusalCode.WRONG_VERSION
    assert code(rounds, step(5), 1, 0) is RefusalCode.INVALID
    rounds.restart()
    assert code(rounds, step(1), 1, 0) is RefusalCode.STALE_ATTEMPT
    assert rounds.finish(step(1), version=1, attempt=1)


def test_who_vanishes_in_the_middle_of_a_step_makes_the_round_start_again() -> None:
    rounds = opened(0, 1, 2)
    rounds.finish(step(0), version=1, attempt=0)
    assert rounds.lose(1) == []
    assert (rounds.attempt, rounds.done, rounds.expected) == (1, {}, {0, 2})


def test_who_vanishes_after_its_step_still_counts() -> None:
    rounds = opened(0, 1)
    rounds.finish(step(0), version=1, attempt=0)
    assert rounds.lose(0) == []
    assert rounds.attempt == 0
    rounds.finish(step(1), version=1, attempt=0)
    assert rounds.begin_commit() == [step(0), step(1)]
    rounds.end_commit()
    assert rounds.expected == {1}


def test_the_step_of_who_left_is_void_when_the_round_starts_again() -> None:
    """Nobody is there to push it again; the caller gives its records back."""
    rounds = opened(0, 1, 2)
    rounds.finish(step(0), version=1, attempt=0)
    rounds.lose(0)
    assert rounds.lose(1) == [step(0)]
    assert rounds.expected == {2}


def test_a_newcomer_with_the_index_of_one_that_finished_and_left_waits_for_the_next_round() -> None:
    rounds = opened(0, 1)
    rounds.finish(step(0, incarnation=10), version=1, attempt=0)
    rounds.lose(0)
    rounds.admit(0)
    assert not rounds.takes_part(0)
    assert code(rounds, step(0, incarnation=11), 1, 0) is RefusalCode.INVALID
    rounds.finish(step(1), version=1, attempt=0)
    assert [c.incarnation for c in rounds.begin_commit()] == [10, 1]
    rounds.end_commit()
    assert rounds.takes_part(0)


def test_nobody_waits_for_who_has_no_records() -> None:
    rounds = opened(0, 1)
    rounds.finish(step(0), version=1, attempt=0)
    rounds.withdraw(1)
    assert rounds.can_commit()
    rounds.begin_commit()
    rounds.end_commit()
    assert rounds.expected == {0}


def _keys(contributions: list[Contribution]) -> set[tuple[int, int]]:
    """(incarnation, step) of each."""
    return {(c.incarnation, c.step) for c in contributions}


def test_a_worker_that_was_replaced_takes_part_when_the_round_starts_again() -> None:
    """Where a round waits for certain workers, it would wait for ever for one that waits for the next."""
    rounds = opened(0, 1, 2)
    rounds.finish(step(1), version=1, attempt=0)
    rounds.lose(1)
    rounds.admit(1, at_once=True)
    assert not rounds.takes_part(1), "its step is in the sums"
    assert [c.worker for c in rounds.lose(0)] == [1], "the void step's records go to others"
    assert rounds.expected == {1, 2}
    assert not rounds.waiting


def test_nobody_is_let_in_to_a_round_that_is_decided() -> None:
    """Some shards may have applied it: exactly its contributions make the version."""
    rounds = opened(0)
    rounds.finish(step(0), version=0, attempt=0)
    rounds.begin_commit()
    rounds.fail_commit()  # a shard could not be told
    rounds.admit(1, at_once=True)
    assert rounds.expected == {0}
    assert rounds.lose(0) == []
    with pytest.raises(ValueError, match="decided"):
        rounds.restart()
    assert [c.worker for c in rounds.begin_commit()] == [0]
    rounds.end_commit()
    assert rounds.expected == {1}


def assigned(worker: int) -> Contribution:
    return replace(step(worker, 7), assigns=True)


def test_a_worker_that_assigns_values_makes_the_next_version_alone() -> None:
    """The others' steps are void, and they come again with other records."""
    rounds = opened(0, 1, 2)
    rounds.finish(step(0), version=1, attempt=0)
    rounds.admit(3)
    assert rounds.assign(1) == []
    assert (rounds.expected, rounds.waiting, rounds.attempt) == ({1}, {3}, 1)
    assert code(rounds, step(0), 1, 1) is RefusalCode.INVALID
    assert code(rounds, step(1), 1, 1) is RefusalCode.LATE, "a gradient is no value"
    with pytest.raises(ValueError, match="assigns already"):
        rounds.assign(2)
    rounds.finish(assigned(1), version=1, attempt=1)
    assert rounds.following == {1, 3}
    assert rounds.begin_commit() == [assigned(1)]
    rounds.end_commit()
    assert (rounds.expected, rounds.assigner) == ({1, 3}, None)
    assert code(rounds, assigned(1), 2, 0) is RefusalCode.LATE, "a value is no gradient"


def test_a_worker_without_records_takes_part_for_the_assignment_only() -> None:
    rounds = opened(0)
    rounds.assign(5)
    rounds.finish(assigned(5), version=0, attempt=1)
    assert rounds.following == set()
    rounds.begin_commit()
    rounds.end_commit()
    assert not rounds.expected
    rounds.admit(0)
    assert rounds.takes_part(0)


def test_a_worker_that_assigns_values_while_it_waits_to_take_part_takes_part_from_then_on() -> None:
    rounds = opened(0, 1)
    rounds.admit(5)
    assert rounds.waiting == {5}
    rounds.assign(5)
    assert (rounds.expected, rounds.waiting) == ({5}, set())
    rounds.finish(assigned(5), version=1, attempt=1)
    rounds.begin_commit()
    rounds.end_commit()
    assert (rounds.expected, rounds.waiting) == ({5}, set())


@pytest.mark.parametrize("withdraws", [False, True])
def test_without_its_assigner_a_round_begins_again_with_those_that_wait(withdraws: bool) -> None:
    rounds = opened(0, 1)
    rounds.assign(5)
    rounds.admit(0)
    assert not rounds.takes_part(0)
    if withdraws:
        rounds.withdraw(5)
    else:
        assert rounds.lose(5) == []
    assert (rounds.expected, rounds.assigner, rounds.attempt) == ({0}, None, 2)
    rounds.finish(step(0), version=1, attempt=2)
    assert rounds.can_commit()


def test_values_that_are_assigned_survive_their_worker_until_the_round_restarts() -> None:
    rounds = opened(0)
    rounds.assign(0)
    rounds.finish(assigned(0), version=0, attempt=1)
    rounds.restart()
    assert (rounds.assigner, rounds.expected) == (0, {0}), "it pushes them again"
    rounds.finish(assigned(0), version=0, attempt=2)
    rounds.lose(0)
    assert rounds.can_commit()
    rounds.admit(0)
    assert rounds.restart() == [assigned(0)]
    assert (rounds.assigner, rounds.expected) == (None, {0}), "another process is worker 0 now"


class Rounds(RuleBasedStateMachine):
    """Workers come, compute, finish, withdraw and vanish at any moment, also while others do."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = SyncRounds()
        self.alive: dict[int, int] = {}
        self.wants: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.incarnations = 0
        self.vanished_unfinished: set[tuple[int, int]] = set()
        self.void: set[tuple[int, int]] = set()
        self.committed: set[tuple[int, int]] = set()

    def contribution(self, worker: int) -> Contribution:
        incarnation = self.alive[worker]
        return step(worker, self.numbers[incarnation], incarnation=incarnation)

    @rule(worker=st.integers(0, 4))
    def come(self, worker: int) -> None:
        if worker not in self.alive:
            self.incarnations += 1
            self.alive[worker] = self.incarnations
            self.numbers[self.incarnations] = 0

    @precondition(lambda self: set(self.alive) - self.wants)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(set(self.alive) - self.wants)))
        nobody = not self.rounds.expected
        self.rounds.admit(worker)
        self.wants.add(worker)
        assert self.rounds.takes_part(worker) == nobody

    def computing(self) -> list[int]:
        """Live workers that the open round still waits for."""
        return sorted(w for w in self.wants if self.rounds.takes_part(w) and w not in self.rounds.done)

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), stale=st.booleans())
    def finish(self, data: st.DataObject, stale: bool) -> None:
        worker = data.draw(st.sampled_from(self.computing()))
        if stale and self.rounds.attempt:
            with pytest.raises(Refused):
                self.rounds.finish(
                    self.contribution(worker), version=self.rounds.version, attempt=self.rounds.attempt - 1
                )
            return
        arguments = {"version": self.rounds.version, "attempt": self.rounds.attempt}
        assert self.rounds.finish(self.contribution(worker), **arguments)
        assert not self.rounds.finish(self.contribution(worker), **arguments)

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.wants)))
        if worker not in self.rounds.done or worker in self.rounds.waiting:
            self.rounds.withdraw(worker)
            self.wants.discard(worker)
            assert not self.rounds.takes_part(worker)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        was_computing, attempt = worker in self.computing(), self.rounds.attempt
        gone_before = _keys([self.rounds.done[w] for w in self.rounds.gone])
        if was_computing:
            self.vanished_unfinished.add((self.alive[worker], self.numbers[self.alive[worker]]))
        void = self.rounds.lose(worker)
        assert (self.rounds.attempt > attempt) == was_computing
        assert _keys(void) == (gone_before if was_computing else set())
        self.void |= _keys(void)
        if was_computing:
            assert not self.rounds.done
        del self.alive[worker]
        self.wants.discard(worker)

    @rule()
    def restart(self) -> None:
        self.void |= _keys(self.rounds.restart())
        assert not self.rounds.done
        assert not self.rounds.gone

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        before = set(self.rounds.waiting)
        contributions = self.rounds.begin_commit()
        keys = _keys(contributions)
        assert not keys & (self.committed | self.vanished_unfinished | self.void)
        assert not self.computing(), "nobody who is still at it is left out"
        self.committed |= keys
        version = self.rounds.version
        self.rounds.end_commit()
        assert (self.rounds.version, self.rounds.attempt) == (version + 1, 0)
        assert before <= self.rounds.expected
        for c in contributions:
            if self.alive.get(c.worker) == c.incarnation:
                self.numbers[c.incarnation] += 1

    @invariant()
    def there_is_no_deadlock(self) -> None:
        """Each round waits for live workers only; who wants to compute takes part or waits for its turn."""
        rounds = self.rounds
        assert rounds.expected - rounds.done.keys() <= self.alive.keys()
        assert self.wants == (rounds.expected - rounds.gone) | rounds.waiting
        assert rounds.expected or not rounds.waiting
        if rounds.expected and not self.computing():
            assert rounds.can_commit()


Rounds.TestCase.settings = settings(stateful_step_count=40)
TestRounds = Rounds.TestCase
