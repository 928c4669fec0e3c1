"""Rounds of bounded staleness: whose steps make a version, and for whom the others wait."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Entry, SyncRounds
from elastic_ps.errors import RefusalCode, Refused
from tests.testing.rounds import RoundsMachine, commit, push, step


def opened(*workers: int, most: int = 2) -> BoundedRounds:
    """Rounds whose open one is on version 5, on which `workers` compute."""
    rounds = BoundedRounds(version=5, max_staleness=most)
    for worker in workers:
        rounds.admit(worker)
    return rounds


def test_a_version_is_made_as_soon_as_somebody_has_a_step() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 1)
    assert rounds.staleness == {1: 0}
    assert commit(rounds) == [1]
    push(rounds, 0)
    assert rounds.staleness == {0: 1}
    assert commit(rounds) == [0]
    assert rounds.bases == {0: 7, 1: 6, 2: 5}


def test_the_bound_counts_from_the_version_that_a_worker_has_pulled() -> None:
    rounds = opened(0, 1)
    for _ in range(2):
        push(rounds, 0)
        commit(rounds)
    push(rounds, 0)
    assert rounds.awaited == {1}
    assert rounds.computes_on(1, 7), "it was handed 5, and found 7 when it pulled"
    assert (rounds.awaited, rounds.can_commit()) == (set(), True)
    assert not rounds.computes_on(1, 6), "said before, and arrived late"
    assert not rounds.computes_on(9, 7), "not a worker of these rounds"
    commit(rounds)
    push(rounds, 1)
    assert rounds.staleness == {1: 1}
    assert not rounds.computes_on(1, 8), "its step is being sent already"


def test_at_the_bound_the_others_wait_for_the_slowest_and_share_its_round() -> None:
    rounds = opened(0, 1, 2)
    for _ in range(2):
        push(rounds, 0)
        commit(rounds)
    push(rounds, 0)
    assert (rounds.can_commit(), rounds.awaited) == (False, {1, 2})
    push(rounds, 1)
    assert (rounds.can_commit(), rounds.awaited) == (False, {2})
    push(rounds, 2)
    assert rounds.staleness == {0: 0, 1: 2, 2: 2}
    assert commit(rounds) == [0, 1, 2]


def test_those_who_send_at_the_same_time_share_a_round_but_nobody_joins_them_when_one_is_done() -> None:
    rounds = opened(0, 1, 2)
    for worker in (0, 1):
        assert rounds.begin(worker, version=5) is Entry.IN
    assert rounds.finish(step(0), version=5, attempt=0)
    assert rounds.begin(2, version=5) is Entry.WAIT
    assert rounds.begin(1, version=5) is Entry.IN, "asked twice"
    assert not rounds.can_commit()
    assert rounds.finish(step(1), version=5, attempt=0)
    assert commit(rounds) == [0, 1]
    assert rounds.begin(2, version=5) is Entry.IN


def test_a_round_that_waits_for_the_slowest_is_open_to_all() -> None:
    rounds = opened(0, 1, 2, most=1)
    push(rounds, 0)
    commit(rounds)
    push(rounds, 0)
    assert rounds.awaited == {1, 2}
    push(rounds, 1)
    assert rounds.begin(2, version=5) is Entry.IN


def test_a_newcomer_that_came_when_the_round_was_decided_takes_part_when_it_starts_again() -> None:
    rounds = opened(0)
    push(rounds, 0)
    rounds.begin_commit()
    rounds.admit(1)
    assert not rounds.takes_part(1)
    rounds.fail_commit()  # a shard has not got all of it
    rounds.undecide()
    assert rounds.bases == {0: 5, 1: 5}
    for worker in (0, 1):
        assert rounds.begin(worker, version=5) is Entry.IN
    push(rounds, 0, 1)
    assert rounds.staleness == {0: 0, 1: 0}


def test_a_newcomer_is_handed_the_current_version_and_waited_for_by_nobody() -> None:
    rounds = opened(0)
    for _ in range(9):
        push(rounds, 0)
        commit(rounds)
    rounds.admit(1)
    assert rounds.bases == {0: 14, 1: 14}
    push(rounds, 0)
    assert commit(rounds) == [0]


def test_who_was_handed_a_newer_version_than_was_known_counts_from_that() -> None:
    """Values may have changed while it pulled them."""
    rounds = opened(0, 1, most=1)
    push(rounds, 0)
    commit(rounds)
    assert rounds.begin(1, version=6) is Entry.IN
    assert rounds.finish(step(1), version=6, attempt=0)
    assert rounds.staleness == {1: 0}
    assert rounds.can_commit()
    commit(rounds)
    assert rounds.begin(0, version=9) is Entry.WAIT, "a shard may have applied what is not booked yet"


@pytest.mark.parametrize(
    ("worker", "version", "reason"),
    [(3, 5, "worker 3 holds no records"), (0, 4, "a step on version 4, but was given 5")],
)
def test_a_step_that_does_not_fit_is_refused(worker: int, version: int, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        opened(0).begin(worker, version=version)
    assert refused.value.code is RefusalCode.INVALID


def test_in_a_sync_job_nobody_asks() -> None:
    with pytest.raises(Refused, match="asks before it pushes its step") as refused:
        SyncRounds(expected={0}).begin(0, version=0)
    assert refused.value.code is RefusalCode.INVALID


def test_only_a_loss_that_is_in_the_sums_starts_the_round_again() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 0)
    rounds.lose(2)
    assert (rounds.attempt, rounds.can_commit()) == (0, True)
    rounds = opened(0, 1, 2)
    for worker in (0, 1):
        assert rounds.begin(worker, version=5) is Entry.IN
    assert rounds.finish(step(0), version=5, attempt=0)
    rounds.lose(1)
    assert (rounds.attempt, rounds.done, rounds.begun) == (1, {}, {0})
    assert rounds.finish(step(0), version=5, attempt=1)
    assert commit(rounds) == [0]


def test_who_vanishes_or_withdraws_at_the_bound_is_not_waited_for() -> None:
    for leave in (BoundedRounds.lose, BoundedRounds.withdraw):
        rounds = opened(0, 1, most=1)
        for _ in range(2):
            assert not rounds.can_commit()
            push(rounds, 0)
            if rounds.can_commit():
                commit(rounds)
        leave(rounds, 1)
        assert commit(rounds) == [0]


def test_a_finished_step_of_who_vanishes_counts_and_its_successor_begins_with_the_next_version() -> None:
    rounds = opened(0, 1, most=1)
    push(rounds, 1)
    rounds.lose(1)
    rounds.admit(1)
    assert rounds.knows(1)
    assert not rounds.takes_part(1)
    assert commit(rounds) == [1]
    assert rounds.bases == {0: 5, 1: 6}


def test_a_round_that_starts_again_is_open_to_who_waited_for_the_next_one() -> None:
    rounds = opened(0, 1, 2)
    push(rounds, 1)
    assert rounds.begin(2, version=5) is Entry.WAIT
    rounds.lose(1)
    rounds.admit(1)  # its successor waits for the next round
    assert rounds.held_up == {1, 2}
    rounds.restart()  # and worker 0 may be slow
    assert rounds.bases == {0: 5, 1: 5, 2: 5}


def test_who_has_to_ask_again_is_held_up_until_it_is_let_in_or_gone() -> None:
    rounds = opened(0, 1, 2, 3)
    assert rounds.begin(1, version=5) is Entry.IN
    push(rounds, 0)
    for worker in (2, 3):
        assert rounds.begin(worker, version=5) is Entry.WAIT
    assert (rounds.held_up, rounds.awaited) == ({0, 2, 3}, {1})
    rounds.lose(0)
    rounds.lose(3)
    assert rounds.held_up == {2}, "the step of who is gone holds nobody up"
    assert rounds.finish(step(1), version=5, attempt=0)
    commit(rounds)
    assert rounds.begin(2, version=5) is Entry.IN
    assert rounds.held_up == set()


def test_a_round_that_was_decided_is_made_of_the_same_steps() -> None:
    rounds = opened(0, 1)
    push(rounds, 0)
    decided = rounds.begin_commit()
    rounds.fail_commit()  # a shard's answer was lost
    rounds.admit(3)
    assert rounds.begin(1, version=5) is Entry.WAIT
    assert rounds.begin_commit() == decided
    rounds.end_commit()
    assert rounds.bases == {0: 6, 1: 5, 3: 6}


def test_a_worker_that_vanishes_while_it_waits_for_a_decided_round_is_not_held_up() -> None:
    rounds = opened(0, 1)
    push(rounds, 0)
    rounds.begin_commit()
    rounds.fail_commit()  # a shard's answer was lost
    assert rounds.begin(1, version=5) is Entry.WAIT
    assert rounds.held_up == {0, 1}
    rounds.lose(1)
    assert rounds.held_up == {0}


class BoundedRoundsMachine(RoundsMachine[BoundedRounds]):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = BoundedRounds()

    @initialize(most=st.integers(1, 4))
    def choose(self, most: int) -> None:
        self.rounds.max_staleness = most

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        if self.rounds.begin(worker, version=self.on[worker] or 0) is Entry.IN:
            self.pushing.add(worker)
        else:
            assert worker in self.rounds.held_up
            assert self.rounds.can_commit() or self.rounds.awaited, "it waits for somebody, or for a commit"

    @precondition(lambda self: self.rounds.can_commit())
    @rule()
    def commit(self) -> None:
        version = self.rounds.version
        contributions = self.rounds.begin_commit()
        made_of = {c.worker for c in contributions}
        assert self.decided in ([], contributions)
        assert self.pushing <= made_of, "nobody who has begun is left out"
        for worker in made_of & self.on.keys():
            base = self.on[worker]
            if base is not None:
                assert self.rounds.staleness[worker] == version - base <= self.rounds.max_staleness
        self.rounds.end_commit()
        for worker in made_of & self.on.keys():
            if self.on[worker] is not None:
                self.on[worker] = version + 1
        self.decided = []
        self.pushing.clear()
        self.open()

    @invariant()
    def who_waits_waits_for_somebody(self) -> None:
        rounds = self.rounds
        assert rounds.held_up <= self.on.keys()
        if rounds.waiting:
            assert rounds.can_commit() or rounds.awaited

    @invariant()
    def nobody_falls_back_further_than_the_bound(self) -> None:
        most = self.rounds.version - self.rounds.max_staleness
        assert all(base is None or base >= most for base in self.on.values())

    @invariant()
    def what_is_awaited_is_enough(self) -> None:
        """When all who are awaited have finished, and somebody has, the round can be committed."""
        rounds = self.rounds.copy()
        for worker in sorted(rounds.awaited):
            assert rounds.begin(worker, version=rounds.version) is Entry.IN, (
                "a round is closed to the slowest"
            )
            rounds.finish(step(worker, self.steps + 1), version=rounds.version, attempt=rounds.attempt)
        assert rounds.can_commit() or not rounds.done

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def one_is_fast(self, data: st.DataObject) -> None:
        """It makes versions alone, until somebody is as far back as may be."""
        fast = self.one_of(data, self.computing())
        rounds = self.rounds.copy()
        for worker in self.sending():
            rounds.finish(step(worker, self.steps + 1), version=rounds.version, attempt=rounds.attempt)
        if rounds.can_commit():
            commit(rounds)
        if fast not in rounds.bases:
            return
        while not rounds.awaited - {fast}:
            if rounds.bases.keys() == {fast} and rounds.version > self.rounds.version + 5:
                return
            push(rounds, fast)
            assert rounds.can_commit()
            commit(rounds)
        slowest = min(rounds.bases.values())
        assert rounds.version - slowest == rounds.max_staleness


BoundedRoundsMachine.TestCase.settings = settings(stateful_step_count=50)
TestBoundedRounds = BoundedRoundsMachine.TestCase
