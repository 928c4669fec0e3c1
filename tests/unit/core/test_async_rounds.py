"""Rounds of one step each: who may push, and who is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_ps.core.asynchronous import AsyncRounds
from elastic_ps.core.consistency import Entry
from elastic_ps.errors import RefusalCode, Refused
from tests.testing.rounds import RoundsMachine, commit, push, step


def opened(*workers: int, consistent: bool = True) -> AsyncRounds:
    """Rounds whose open one is on version 5, which `workers` have read."""
    rounds = AsyncRounds(version=5, consistent=consistent)
    for worker in workers:
        rounds.admit(worker)
        rounds.tell_version(worker)
        rounds.computes_on(worker, 5)
    return rounds


def test_each_step_makes_a_version_however_old_its_base_is() -> None:
    rounds = opened(0, 1, consistent=False)
    for _ in range(100):
        push(rounds, 0)
        assert commit(rounds) == [0]
    push(rounds, 1)
    assert rounds.staleness == {1: 100}
    assert commit(rounds) == [1]


def test_who_asks_while_another_one_pushes_waits_until_that_is_in_a_version() -> None:
    rounds = opened(0, 1)
    assert rounds.begin(0, version=5) is Entry.IN
    assert rounds.begin(1, version=5) is Entry.WAIT
    assert rounds.begin(0, version=5) is Entry.IN, "asked twice"
    assert rounds.awaited == {0}
    assert rounds.finish(step(0), version=5, attempt=0)
    assert rounds.begin(1, version=5) is Entry.WAIT
    assert commit(rounds) == [0]
    assert rounds.begin(1, version=5) is Entry.IN


def test_no_version_is_made_while_somebody_reads_the_one_before() -> None:
    rounds = opened(0, 1)
    push(rounds, 0)
    commit(rounds)  # worker 0 reads version 6 from now on
    push(rounds, 1)
    assert (rounds.can_commit(), rounds.awaited) == (False, {0})
    assert not rounds.computes_on(0, 5), "a late message of an earlier version"
    assert not rounds.can_commit()
    assert rounds.computes_on(0, 6)
    assert rounds.can_commit()
    assert rounds.staleness == {1: 1}


def test_who_asks_to_push_has_read_its_version() -> None:
    """It had all of it, and said so, when the parameter server did not know yet that it was made."""
    rounds = opened(0, 1)
    push(rounds, 0)
    commit(rounds)
    push(rounds, 1)
    assert rounds.begin(0, version=6) is Entry.WAIT
    assert rounds.can_commit()


def test_a_newcomer_reads_the_version_that_it_is_told() -> None:
    rounds = opened(0)
    rounds.admit(1)
    push(rounds, 0)
    assert rounds.can_commit(), "it has not been told a version"
    rounds.tell_version(1)
    assert not rounds.can_commit()
    rounds.computes_on(1, 5)
    assert commit(rounds) == [0]


def test_with_inconsistent_reads_nobody_waits_for_who_reads() -> None:
    rounds = opened(0, 1, consistent=False)
    push(rounds, 0)
    commit(rounds)
    rounds.tell_version(1)
    push(rounds, 1)
    assert rounds.can_commit()


@pytest.mark.parametrize("leave", [AsyncRounds.lose, AsyncRounds.withdraw])
def test_who_vanishes_while_it_reads_is_not_waited_for(leave: Callable[[AsyncRounds, int], object]) -> None:
    rounds = opened(0, 1)
    push(rounds, 0)
    commit(rounds)
    push(rounds, 1)
    leave(rounds, 0)
    assert (rounds.can_commit(), rounds.attempt) == (True, 0)


def test_what_a_dead_worker_has_pushed_is_void_and_the_next_one_may_push() -> None:
    rounds = opened(0, 1)
    assert rounds.begin(0, version=5) is Entry.IN
    rounds.lose(0)
    assert (rounds.attempt, rounds.begun) == (1, set())
    with pytest.raises(Refused) as refused:
        rounds.finish(step(0), version=5, attempt=0)
    assert refused.value.code is RefusalCode.STALE_ATTEMPT
    push(rounds, 1)
    assert commit(rounds) == [1]


def test_a_worker_begins_no_step_on_an_older_version_than_it_was_handed() -> None:
    """A worker may be admitted long before it is told a version."""
    rounds = opened(0)
    rounds.admit(1)
    push(rounds, 0)
    commit(rounds)
    rounds.computes_on(0, 6)
    rounds.tell_version(1)
    assert rounds.reading == {1}
    with pytest.raises(Refused, match="begins a step on version 5, but was given 6"):
        rounds.begin(1, version=5)
    assert rounds.begin(1, version=6) is Entry.IN
    assert rounds.finish(step(1), version=6, attempt=0)
    assert rounds.staleness == {1: 0}


class AsyncRoundsMachine(RoundsMachine[AsyncRounds]):
    """Its model also knows which workers read a version."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = AsyncRounds()
        self.reading: set[int] = set()

    @initialize(consistent=st.booleans())
    def choose(self, consistent: bool) -> None:
        self.rounds.consistent = consistent

    def computing(self) -> set[int]:
        return super().computing() - self.reading

    def take_up(self, worker: int) -> None:
        """It is told the version, and begins to read it."""
        super().take_up(worker)
        self.rounds.tell_version(worker)
        self.reading.add(worker)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.reading)
        version = self.on[worker]
        assert version is not None
        if self.rounds.consistent:
            assert version == self.rounds.version, "a version was made while this worker read the one before"
        else:
            version = data.draw(st.integers(version, self.rounds.version))
        self.rounds.computes_on(worker, version)
        self.on[worker] = version
        self.reading.discard(worker)

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        free = not (self.pushing or self.rounds.decided or self.rounds.done)
        entry = self.rounds.begin(worker, version=self.on[worker] or 0)
        assert (entry is Entry.IN) == free
        if entry is Entry.IN:
            self.pushing.add(worker)

    def vanished(self, worker: int) -> None:
        super().vanished(worker)
        self.reading.discard(worker)

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        version = self.rounds.version
        (contribution,) = self.rounds.begin_commit()
        assert self.decided in ([], [contribution])
        worker = contribution.worker
        base = self.on.get(worker)
        if base is not None:
            assert self.rounds.staleness[worker] == version - base
        self.rounds.end_commit()
        self.decided = []
        self.pushing.clear()
        if base is not None:
            self.on[worker] = version + 1
            self.reading.add(worker)
        self.open()

    @invariant()
    def a_finished_step_waits_for_readers_only(self) -> None:
        rounds = self.rounds
        if rounds.done:
            waits = bool(self.reading) and rounds.consistent and not rounds.decided
            assert rounds.can_commit() == (not waits)
            assert rounds.awaited == (self.reading if rounds.consistent else set())


AsyncRoundsMachine.TestCase.settings = settings(stateful_step_count=50)
TestAsyncRounds = AsyncRoundsMachine.TestCase
