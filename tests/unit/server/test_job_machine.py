"""Members, records, rounds and the shards' sums together, whoever comes, dies and lives on as a ghost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_ps.core.consistency import Contribution
from elastic_ps.core.ledger import Ledger, Range
from elastic_ps.core.membership import Members
from elastic_ps.core.sequence import PushKey, PushLog
from elastic_ps.core.stages import Stage
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.job.state import JobState

RECORDS, BATCH, SHARDS = 40, 4, 2


class MembersMachine(RuleBasedStateMachine):
    """`Members` against a table of who is here until when."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members(lease=timedelta(seconds=10))
        self.now = 0.0
        self.here: dict[int, tuple[int, float]] = {}
        self.gone: dict[int, str] = {}
        self.given: list[tuple[int, int]] = []

    @rule(worker=st.integers(0, 3))
    def join(self, worker: int) -> None:
        if worker in self.here:
            self.remove(worker, "lost")
        member = self.members.join(worker, pid=1, host="h", version=0, now=self.now)
        assert all(member.incarnation > incarnation for _, incarnation in self.given)
        self.given.append((worker, member.incarnation))
        self.here[worker] = (member.incarnation, self.now + 10)

    @rule(worker=st.integers(0, 3), outcome=st.sampled_from(["left", "lost", "hung"]))
    def remove(self, worker: int, outcome: str) -> None:
        member = self.members.remove(worker, outcome=outcome, version=0, now=self.now)
        assert (member is not None) == (worker in self.here)
        if worker in self.here:
            self.gone[self.here.pop(worker)[0]] = outcome

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        worker, incarnation = data.draw(st.sampled_from(self.given))
        current = self.here.get(worker, (None, 0))[0]
        if current == incarnation:
            self.members.check(worker, incarnation, self.now)
            self.here[worker] = (incarnation, max(self.here[worker][1], self.now + 10))
            return
        with pytest.raises(Refused) as refused:
            self.members.check(worker, incarnation, self.now)
        hung = self.gone[incarnation] == "hung"
        assert refused.value.code is (RefusalCode.HUNG if hung else RefusalCode.STALE_INCARNATION)

    @invariant()
    def the_same_are_here(self) -> None:
        assert {worker: member.incarnation for worker, member in self.members.live.items()} == {
            worker: incarnation for worker, (incarnation, _) in self.here.items()
        }
        overdue = {worker for worker, (_, until) in self.here.items() if until <= self.now}
        assert set(self.members.expired(self.now)) == overdue
        assert {s.incarnation: s.outcome for s in self.members.all() if s.outcome} == self.gone


@dataclass(eq=False)
class Ghost:
    """A worker's process, which goes on pushing also when it was declared gone."""

    worker: int
    incarnation: int
    step: int = 0
    pushed: set[tuple[int, int, int]] = field(default_factory=set)


class Job(RuleBasedStateMachine):
    """`JobState`, and on two shards the `PushLog` that it tells who takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState(term=1, lease=timedelta(hours=1), stage=Stage.TRAINING)
        self.ledger = self.state.ledger = Ledger(RECORDS, 1, BATCH)
        self.shards = [PushLog(term=1) for _ in range(SHARDS)]
        self.processes: list[Ghost] = []
        self.trained: Counter[int] = Counter()

    def tell(self) -> None:
        rounds = self.state.rounds
        for shard in self.shards:
            shard.open(version=rounds.version, attempt=rounds.attempt, expected=self.state.expected)

    def is_member(self, process: Ghost) -> bool:
        member = self.state.members.live.get(process.worker)
        return member is not None and member.incarnation == process.incarnation

    def current(self, process: Ghost) -> set[int]:
        """The shards that have this process's push for the open attempt."""
        rounds = self.state.rounds
        return {s for s, v, a in process.pushed if (v, a) == (rounds.version, rounds.attempt)}

    @rule(worker=st.integers(0, 3))
    def join(self, worker: int) -> None:
        self.state.drop(worker, "lost")
        member = self.state.members.join(worker, pid=1, host="h", version=self.state.version, now=0)
        self.processes.append(Ghost(worker, member.incarnation))
        self.ask(self.processes[-1])

    def ask(self, process: Ghost) -> None:
        """For records; with some the worker takes part."""
        held = self.ledger.held(process.incarnation)
        if held or self.state.take(process.worker, process.incarnation, BATCH):
            self.state.admit(process.worker, 0)
        elif not self.current(process):
            self.state.rounds.withdraw(process.worker)
        self.tell()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def wait_for_records(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.processes))
        if self.is_member(process) and not self.state.rounds.knows(process.worker):
            self.ask(process)

    @rule(worker=st.integers(0, 3))
    def die(self, worker: int) -> None:
        self.state.drop(worker, "lost")
        self.tell()

    @precondition(lambda self: self.state.members.live and self.state.rounds.assigner is None)
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.state.members.live)))
        others = {w for w in self.state.rounds.expected if w != worker}
        self.state.assign(self.state.members.live[worker])
        assert self.state.rounds.expected == {worker}
        assert not any(self.ledger.held(self.state.members.live[w].incarnation) for w in others & self.live)
        self.tell()

    @property
    def live(self) -> set[int]:
        return set(self.state.members.live)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1), late=st.integers(0, 1))
    def push(self, data: st.DataObject, shard: int, late: int) -> None:
        self.push_to(data.draw(st.sampled_from(self.processes)), shard, late)

    def push_to(self, process: Ghost, shard: int, late: int = 0) -> None:
        rounds, log = self.state.rounds, self.shards[shard]
        attempt = max(0, rounds.attempt - late)
        key = PushKey(
            term=1,
            worker=process.worker,
            incarnation=process.incarnation,
            step=process.step,
            bucket=0,
            version=rounds.version,
            attempt=attempt,
        )
        takes_part = self.is_member(process) and rounds.takes_part(process.worker)
        try:
            new = log.decide(key)
        except Refused:
            assert attempt < rounds.attempt or not takes_part, "a member that takes part is refused"
            return
        if new:
            assert takes_part, "a ghost is in the sums"
            log.add(key)
            process.pushed.add((shard, rounds.version, attempt))
        else:
            assert shard in self.current(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_step(data.draw(st.sampled_from(self.processes)))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def make_a_step(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self.processes))
        for shard in range(SHARDS):
            self.push_to(process, shard)
        self.finish_step(process)

    def finish_step(self, process: Ghost) -> None:
        rounds = self.state.rounds
        if len(self.current(process)) < SHARDS or not self.is_member(process):
            return
        assigns = rounds.assigner == process.worker
        contribution = Contribution(
            worker=process.worker,
            incarnation=process.incarnation,
            step=process.step,
            samples=BATCH,
            records=() if assigns else tuple(self.ledger.held(process.incarnation)),
            assigns=assigns,
        )
        rounds.finish(contribution, version=rounds.version, attempt=rounds.attempt)

    @precondition(lambda self: self.state.ready)
    @rule()
    def commit(self) -> None:
        contributions = self.state.rounds.begin_commit()
        for shard in self.shards:
            assert shard.complete([0], [(c.worker, c.incarnation, c.step) for c in contributions])
        following = self.state.following
        self.state.book(contributions, 0, decided=0)
        assert self.state.expected == following
        for c in contributions:
            self.trained.update(position for r in c.records for position in range(r.start, r.stop))
        self.tell()
        finished = {c.incarnation for c in contributions}
        for process in self.processes:
            if process.incarnation in finished:
                process.step += 1
                if self.is_member(process):
                    self.ask(process)

    @invariant()
    def no_record_is_in_two_places(self) -> None:
        places = Counter(self.trained)
        for process in self.processes:
            held: list[Range] = self.ledger.held(process.incarnation)
            places.update(position for r in held for position in range(r.start, r.stop))
        assert all(count == 1 for count in places.values())
        assert sum(self.trained.values()) == self.ledger.applied

    def teardown(self) -> None:
        """Whatever has happened, one worker that comes then finishes the job."""
        for worker in range(4):
            self.die(worker)
        self.join(0)
        last = self.processes[-1]
        while not self.state.finished:
            for shard in range(SHARDS):
                self.push_to(last, shard)
            self.finish_step(last)
            self.commit()
        assert self.trained == Counter(range(RECORDS))


TestMembers = MembersMachine.TestCase
TestJob = Job.TestCase
TestMembers.settings = settings(stateful_step_count=40)
TestJob.settings = settings(stateful_step_count=60)
