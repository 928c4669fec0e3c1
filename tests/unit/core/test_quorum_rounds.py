"""Rounds that wait for a quorum, and a little longer for the rest."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.consistency import Entry
from elastic_ps.core.modes import rounds_of
from elastic_ps.core.quorum import QuorumRounds
from elastic_ps.server.job.state import JobState
from tests.testing.rounds import RoundsMachine, commit, push
from tests.testing.state import finish, join, training


def opened(*workers: int, quorum: int = 2) -> QuorumRounds:
    """Rounds whose open one is on version 5, on which `workers` compute."""
    rounds = QuorumRounds(version=5, quorum=quorum)
    for worker in workers:
        rounds.admit(worker)
    return rounds


def test_it_waits_for_its_quorum_however_long_that_takes() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 1)
    assert (rounds.can_commit(), rounds.awaited, rounds.lagging) == (False, {0, 2}, set())


def test_with_its_quorum_it_waits_for_the_others_until_it_is_hastened() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 1, 0)
    assert (rounds.can_commit(), rounds.lagging) == (False, {2})
    rounds.hasten()
    assert (rounds.can_commit(), rounds.lagging) == (True, set())
    assert rounds.begin(2, version=5) is Entry.WAIT
    assert commit(rounds) == [0, 1]


def test_who_comes_too_late_is_part_of_a_later_round() -> None:
    rounds = opened(0, 1, 2)
    for _ in range(3):
        push(rounds, 0, 1)
        rounds.hasten()
        assert commit(rounds) == [0, 1]
    push(rounds, 2, 0)
    assert rounds.staleness == {2: 3, 0: 0}
    assert rounds.lagging == {1}, "the grace period is that of each round"


def test_with_all_that_take_part_there_is_nobody_to_wait_for() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 0, 1, 2)
    assert commit(rounds) == [0, 1, 2]
    for worker in (0, 1):
        rounds.withdraw(worker)
    push(rounds, 2)
    assert commit(rounds) == [2], "the quorum may be more than there are"


def test_it_waits_for_who_is_sending_after_the_grace_period_too() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 0, 1)
    assert rounds.begin(2, version=5) is Entry.IN
    rounds.hasten()
    assert (rounds.can_commit(), rounds.awaited) == (False, {2})
    rounds.lose(2)  # some of it may be in the sums
    push(rounds, 0)
    assert (rounds.attempt, rounds.can_commit()) == (1, False), "worker 1 pushes again"
    push(rounds, 1)
    assert commit(rounds) == [0, 1]


def job(grace: timedelta | None) -> JobState:
    """A job of three workers, of which two have made their exchanges."""
    state = training()
    state.consistency = Consistency(mode="local", steps=2, quorum=2, grace=grace)
    state.rounds = rounds_of(state.consistency)
    members = [join(state, worker) for worker in range(3)]
    for member in members[:2]:
        assert state.begin(member, version=0, step=0) is Entry.IN
        finish(state, member)
    return state


def test_the_grace_period_begins_with_the_quorum() -> None:
    state = job(timedelta(seconds=5))
    assert state.hasten(100.0) == 5.0
    assert state.hasten(104.0) == 1.0
    assert not state.ready
    assert state.hasten(105.0) == 0.0
    assert state.ready
    assert state.hasten(106.0) is None


def test_no_grace_is_none() -> None:
    state = job(timedelta())
    assert state.hasten(100.0) == 0.0
    assert state.ready


def test_by_itself_the_grace_period_is_a_quarter_of_what_an_exchange_takes() -> None:
    state = job(None)
    assert state.grace is None
    assert state.hasten(100.0) is None
    assert state.hasten(1e9) is None, "nothing is known yet"
    state.pace.seconds = {1: 8.0, 2: 12.0, 3: 40.0}
    assert state.grace == timedelta(seconds=3)
    assert state.hasten(1e9 + 1) == 3.0
    assert state.hasten(1e9 + 4) == 0.0


def test_the_first_round_of_a_term_waits_for_a_quarter_of_what_the_quorum_has_taken() -> None:
    """Else a slow worker would hold up the first two rounds after each loss of the parameter server."""
    state = training()
    state.consistency = Consistency(mode="local", steps=2, quorum=2)
    state.rounds = rounds_of(state.consistency)
    for worker in range(3):
        member = join(state, worker)
        state.admit(worker, 10.0)
        assert state.begin(member, version=0, step=0) is Entry.IN
        if worker < 2:
            finish(state, member)
            state.pace.finished(member.incarnation, 0, (14.0, 18.0)[worker])
    assert state.grace == timedelta(seconds=1.5)
    assert state.hasten(18.0) == 1.5
    assert state.hasten(20.0) == 0.0


class QuorumRoundsMachine(RoundsMachine[QuorumRounds]):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = QuorumRounds()

    @initialize(quorum=st.integers(1, 4))
    def choose(self, quorum: int) -> None:
        self.rounds.quorum = quorum

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        if self.rounds.begin(worker, version=self.on[worker] or 0) is Entry.IN:
            self.pushing.add(worker)
        else:
            assert worker in self.rounds.held_up
            assert self.rounds.can_commit() or self.rounds.awaited, "it waits for somebody, or for a commit"

    @precondition(lambda self: self.rounds.lagging)
    @rule()
    def hasten(self) -> None:
        assert len(self.rounds.done) >= self.rounds.quorum
        self.rounds.hasten()
        assert self.rounds.can_commit() == (not self.sending())

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        version = self.rounds.version
        contributions = self.rounds.begin_commit()
        made_of = {c.worker for c in contributions}
        assert self.decided in ([], contributions)
        assert self.pushing <= made_of, "nobody who has begun is left out"
        taking_part = {worker for worker, base in self.on.items() if base is not None}
        if not self.decided:
            assert len(made_of) >= self.rounds.quorum or taking_part <= made_of
        for worker in made_of & taking_part:
            base = self.on[worker]
            assert base is not None
            assert self.rounds.staleness[worker] == version - base
        self.rounds.end_commit()
        for worker in made_of & taking_part:
            self.on[worker] = version + 1
        self.decided = []
        self.pushing.clear()
        self.open()

    @invariant()
    def whoever_takes_part_can_go_on(self) -> None:
        rounds = self.rounds
        if rounds.done:
            assert rounds.can_commit() or rounds.awaited
            assert rounds.lagging <= rounds.awaited


QuorumRoundsMachine.TestCase.settings = settings(stateful_step_count=50)
TestQuorumRounds = QuorumRoundsMachine.TestCase
