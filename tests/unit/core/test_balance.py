"""Work follows the measured speed, and does not flutter."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.balance import LEAST, TOLERANCE, Balance
from elastic_ps.core.consistency import Contribution, Entry
from elastic_ps.core.ledger import Range
from elastic_ps.core.membership import Member
from elastic_ps.core.stages import Stage
from elastic_ps.server.job.state import JobState

SECONDS = st.dictionaries(st.integers(0, 5), st.floats(1e-6, 1e3), max_size=6)


def test_who_takes_twice_as_long_has_half_the_weight() -> None:
    balance = Balance()
    assert balance.weight(1) == 1
    balance.follow({1: 0.1, 2: 0.2, 3: 0.4}, [1, 2, 3, 4])
    assert [balance.weight(who) for who in (1, 2, 3, 4)] == [1, 0.5, 0.25, 0.5], "4 was not measured"
    balance.follow({1: 0.1, 2: 0.2}, [2])
    assert balance.weight(2) == 1


def test_small_changes_change_nothing() -> None:
    balance = Balance()
    balance.follow({1: 1.0, 2: 1.0}, [1, 2])
    for measured in (1.1, 0.9, 1.15):
        balance.follow({1: 1.0, 2: measured}, [1, 2])
        assert balance.weight(2) == 1
    balance.follow({1: 1.0, 2: 1.25}, [1, 2])
    assert balance.weight(2) == 0.8


@given(before=SECONDS, after=SECONDS)
def test_what_counts_is_near_what_is_measured(before: dict[int, float], after: dict[int, float]) -> None:
    balance = Balance()
    balance.follow(before, range(6))
    copied = copy.deepcopy(balance)
    balance.follow(after, range(6))
    for who in range(6):
        assert LEAST <= balance.weight(who) <= 1
        if who in after:
            off = abs(1 / after[who] - balance.speeds[who])
            assert off <= TOLERANCE * balance.speeds[who] * (1 + 1e-9)
            if who in before and balance.speeds[who] != copied.speeds[who]:
                assert balance.speeds[who] == 1 / after[who]


class Job:
    """Two workers and their records. Worker 1 takes three times as long for each."""

    def __init__(self, **consistency: object) -> None:
        spec = Consistency.model_validate(consistency)
        self.state = JobState(1, timedelta(seconds=10), spec, stage=Stage.TRAINING)
        self.state.open_ledger(10_000, 1, shares=0)
        self.now = 0.0
        self.members = [
            self.state.members.join(worker, pid=worker, host="here", version=0, now=0) for worker in range(2)
        ]
        self.state.starved |= {0, 1}

    def portion(self, member: Member, batch: int) -> list[Range]:
        taken = self.state.take(member.worker, member.incarnation, batch)
        self.state.starved.discard(member.worker)
        if not self.state.rounds.knows(member.worker):
            self.state.rounds.admit(member.worker, at_once=True)
        return taken

    def version(self, number: int, batch: int) -> list[int]:
        """Make one; returns how many records each worker had."""
        state, parts, began = self.state, [], self.now
        taken = [self.portion(member, batch) for member in self.members]
        for member, ranges, seconds in zip(self.members, taken, (0.1, 0.3), strict=True):
            done, records = member.last_step + 1, sum(r.records for r in ranges)
            if state.consistency.several_steps:
                assert state.begin(member, version=state.version, step=done) is Entry.IN
            made = self.contribution(member, done, ranges)
            assert state.rounds.finish(made, version=state.version, attempt=0)
            self.now = began + seconds * records
            state.pace.finished(member.incarnation, 0, self.now, records=records)
            parts.append(records)
        assert state.ready
        state.book(state.begin_commit(), self.now, decided=self.now)
        assert state.version == number
        return parts

    @staticmethod
    def contribution(member: Member, step: int, ranges: list[Range]) -> Contribution:
        records = sum(r.records for r in ranges)
        return Contribution(
            worker=member.worker,
            incarnation=member.incarnation,
            step=step,
            samples=records,
            records=tuple(ranges),
        )


@pytest.mark.parametrize(("balance", "expected"), [("speed", [75, 25]), ("even", [50, 50])])
def test_portions_follow_the_speed(balance: str, expected: list[int]) -> None:
    job = Job(globalBatchSize=100, balance=balance)
    parts = [job.version(number, 10) for number in range(1, 6)]
    assert parts[0] == parts[1] == [50, 50], "the first step of a process is not measured"
    assert parts[2:] == [expected] * 3


def test_local_steps_follow_the_speed() -> None:
    job = Job(mode="local", steps=12, balance="speed")
    assert job.state.steps(0) == job.state.steps(1) == 12
    for number in range(1, 5):
        job.version(number, 8)
    assert (job.state.steps(0), job.state.steps(1)) == (12, 4)
    even = Job(mode="local", steps=12)
    for number in range(1, 5):
        even.version(number, 8)
    assert even.state.steps(1) == 12
    assert Job(globalBatchSize=10).state.steps(0) == 0
