"""The state of a job on shard 0: members, records, the open round, settings and what scripts reported.

It has no threads, clocks or I/O: `guarded` guards it, `commit` gives orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import Data
from elastic_ps.api.mutable import MutableFields
from elastic_ps.core import dataset, scales, schedules
from elastic_ps.core.all_reduce import AllReduceRounds, StateHolders
from elastic_ps.core.balance import Balance
from elastic_ps.core.calls import Calls
from elastic_ps.core.chiefs import Chiefs
from elastic_ps.core.consistency import After, AskedRounds, Contribution, Entry, SyncRounds
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.late_records import LateRecords
from elastic_ps.core.ledger import LEAST, Ledger, LedgerError, Range
from elastic_ps.core.membership import Member, Members
from elastic_ps.core.modes import rounds_of
from elastic_ps.core.pace import Pace, Waiting
from elastic_ps.core.portions import PortionedLedger
from elastic_ps.core.results import Results
from elastic_ps.core.script_state import EMPTY
from elastic_ps.core.settings import Divisors, Settings
from elastic_ps.core.stages import STAGES, Stage, StageEvent
from elastic_ps.core.weights import is_weight
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.orders import Model
from elastic_ps.transport import messages_pb2 as pb

INCARNATIONS_PER_TERM = 1 << 32
"""Each term's incarnations start at a multiple of this, so none is used twice after a roll-back."""

GRACE = 0.25
"""With `grace: auto`, a round waits for this share of a worker's mean time between two exchanges."""


@dataclass
class JobState:
    """A job at a version.

    Attributes:
        term: the parameter server's term.
        lease: how long a member may be silent.
        consistency: the mode of the rounds, and its options.
        data: the order of the records, and how many are handed out together.
        model: None before the first worker has joined.
        stage: the stage of the model.
        initialiser: the worker that sends the first values; None if no worker does.
        together: in mode `sync`, workers that come during the first round take part in it.
        ledger: None before a worker has described its data set.
        fingerprint: identifies the records. The first worker that has one names it.
        stopped: why a script has stopped the training, so that no records are handed out; "" if none has.
        bucket_bytes: the bucket size that was chosen for this job; 0 for none.
        assigned: the last version of values that a script assigned; 0 for none.
        chiefs: the workers that evaluate and save at the end of the epochs.
        script_state: the state that scripts keep with the job, as JSON; see `core.script_state`.
        results: the results that steps have reported.
        batch: the records of a batch, as the last worker has said that took some; 0 before.
        late_records: records whose steps were late.
        starved: workers that have asked for records when none were left.
        mutable: the mutable fields that a checkpoint of this version has.
        opened_with: while the open round is decided, the settings of this version; `settings` are then those
            of the next version. Otherwise None.
        last_round: the record of the version's commit for the histories; {} if this process did not make it.
        state_holders: the workers that have the values, with `strategy: all-reduce`; None if the parameter
            server has them.
    """

    term: int
    lease: timedelta
    consistency: Consistency = field(default_factory=Consistency)
    data: Data = field(default_factory=Data)
    members: Members = field(init=False)
    rounds: SyncRounds = field(init=False)
    ledger: Ledger | FixedSchedule | None = None
    fingerprint: str = ""
    model: Model | None = None
    stage: Stage = Stage.EMPTY
    initialiser: int | None = None
    together: bool = False
    settings: Settings = field(default_factory=lambda: Settings(groups=()))
    opened_with: Settings | None = None
    stopped: str = ""
    bucket_bytes: int = 0
    assigned: int = 0
    script_state: str = EMPTY
    chiefs: Chiefs = field(default_factory=Chiefs)
    results: Results = field(default_factory=Results)
    last_round: dict[str, Any] = field(default_factory=dict)
    batch: int = 0
    late_records: LateRecords = field(default_factory=LateRecords)
    starved: set[int] = field(default_factory=set)
    waits_for_steps: Waiting = field(default_factory=Waiting)
    waits_for_late: Waiting = field(default_factory=Waiting)
    pace: Pace = field(default_factory=Pace)
    balance: Balance = field(default_factory=Balance)
    calls: Calls[pb.TakeReply] = field(default_factory=Calls)
    mutable: MutableFields = field(default_factory=MutableFields)
    state_holders: StateHolders | None = None

    def __post_init__(self) -> None:
        first = self.term * INCARNATIONS_PER_TERM
        self.members = Members(lease=self.lease, last_incarnation=first)
        self.rounds = rounds_of(self.consistency) if self.state_holders is None else AllReduceRounds()

    @property
    def version(self) -> int:
        return self.rounds.version

    @property
    def finished(self) -> bool:
        """Whether training is over: every record of every epoch is in the model, or it was stopped.

        With fragments, the workers that take part must have exchanged all fragments, too.
        """
        if self.ledger is None:
            return False
        if self.ledger.finished and not (self.consistency.fragments or 1) > 1:
            return True
        return (self.ledger.finished or bool(self.stopped)) and self.rounds.resting

    @property
    def required(self) -> frozenset[int]:
        """Workers that each round needs: with a fixed schedule, all that have records left."""
        if self.stopped or not isinstance(self.ledger, FixedSchedule):
            return frozenset()
        return self.ledger.open_shares

    @property
    def ready(self) -> bool:
        """Whether the open round can be committed. None is before version 0 is on disk."""
        if self.stage is Stage.BEGUN:
            return False
        complete = self.rounds.can_commit() or (self.rounds.can_commit(last=True) and self._all_in_hand)
        return complete and self.required <= self.rounds.done.keys()

    def begin_commit(self) -> Sequence[Contribution]:
        """Decide the open round, which is `ready`. Returns its steps."""
        return self.rounds.begin_commit(last=not self.rounds.can_commit() and self._all_in_hand)

    @property
    def _all_in_hand(self) -> bool:
        """Whether all records that are left belong to the open round's steps."""
        if self.ledger is None:
            return False
        held = sum(r.records for c in self.rounds.contributions for r in c.ranges)
        if isinstance(self.ledger, PortionedLedger):  # of the open version
            return held == self.ledger.held_by_all and bool(self.stopped or not self.ledger.left)
        return bool(self.stopped) or self.ledger.applied + self.ledger.skipped + held == self.ledger.total

    @property
    def expected(self) -> dict[int, int]:
        """The workers whose contributions the open round has or waits for; see `PushLog.expected`.

        Before there is a model: the worker that brings it.
        """
        if not self.initialised:
            return {} if self.initialiser is None else self._incarnations({self.initialiser})
        done = {worker: c.incarnation for worker, c in self.rounds.done.items()}
        return self._incarnations(self.rounds.expected | self.required) | done

    @property
    def following(self) -> dict[int, int]:
        """The value of `expected` after the commit of the open round."""
        return self._incarnations(self.rounds.following | self.required)

    def _incarnations(self, workers: Iterable[int]) -> dict[int, int]:
        live = self.members.live
        return {worker: live[worker].incarnation if worker in live else 0 for worker in workers}

    @property
    def values_are_here(self) -> bool:
        """Whether workers have sent the shards the first values, and with all-reduce those of the version."""
        arrived = self.initialised or self.stage is Stage.ARRIVED
        return arrived and (self.state_holders is None or self.state_holders.version == self.version)

    def orphaned(self, now: float) -> bool:
        """Return True if no member has the version, and no former one may return with it."""
        if self.state_holders is None or not self.initialised or self.values_are_here or self.rounds.decided:
            return False
        holders, members = self.state_holders, self.members
        return not (holders.among(*members.live.values()) or holders.among(*members.may_return(now)))

    @property
    def all_reduce(self) -> tuple[AllReduceRounds, StateHolders]:
        """The rounds of a job with all-reduce. Raises Refused (INVALID) in another job."""
        if self.state_holders is None or not isinstance(self.rounds, AllReduceRounds):
            raise Refused(RefusalCode.INVALID, "workers meet only in a job with strategy all-reduce")
        return self.rounds, self.state_holders

    @property
    def may_join(self) -> bool:
        """Whether a worker may join: there is a model, or none at all. Not while its first values arrive."""
        return self.initialised or self.stage in (Stage.EMPTY, Stage.LAID_OUT)

    @property
    def initialised(self) -> bool:
        """Whether there is a model to train."""
        return self.stage in (Stage.BEGUN, Stage.RESUMED, Stage.TRAINING)

    @property
    def resumed(self) -> bool:
        """Whether the job continues from a checkpoint, and no worker has taken records since."""
        return self.stage is Stage.RESUMED

    def note(self, event: StageEvent, *, initialiser: int | None = None) -> None:
        """Note an event of the model, and set `initialiser`. Raises ImpossibleTransition."""
        self.stage, self.initialiser = STAGES.after(self.stage, event), initialiser
        self.together |= event is StageEvent.BEGIN and type(self.rounds) is SyncRounds

    def begin(self, member: Member, *, version: int, step: int) -> Entry:
        """Let a worker push a step. If it is LATE, its records go to others. See `SyncRounds.begin`.

        Raises:
            Refused: STALE_CALL; the worker has begun a later step.
        """
        if self.stopped and self.finished:
            self.give_back(member.incarnation)
            return Entry.LATE
        finished = [c.step for c in self.rounds.contributions if c.incarnation == member.incarnation]
        if step < member.last_begun or step <= member.last_step or step <= max(finished, default=-1):
            text = (
                f"worker {member.worker} asks to push step {step}, "
                f"but has begun step {member.last_begun} since"
            )
            raise Refused(RefusalCode.STALE_CALL, text)
        member.last_begun = step
        took_part = self.rounds.takes_part(member.worker)
        if isinstance(self.rounds, AskedRounds):
            live = self.members.live.items()
            self.rounds.owed = self.late_records.owed(
                lambda: {worker: self.to_compute_on(each.incarnation) for worker, each in live}
            )
        entry = self.rounds.begin(member.worker, version=version)
        if entry is Entry.LATE:
            if took_part and self.ledger is not None and (held := self.to_compute_on(member.incarnation)):
                self.late_records.add(held[0])
            member.late += took_part
            self.give_back(member.incarnation)
        return entry

    def after_step(self, member: Member, *, attempt: int, step: int, now: float) -> After | None:
        """Decide what a worker does after it has pushed a step in mode `accumulate`; None: it waits.

        Args:
            attempt: the attempt for which the step was pushed.
            step: the worker's own count of its steps.

        Raises:
            Refused: see `SyncRounds.after`.
        """
        if step <= member.last_step:
            return After.PULL
        anyway = bool(self.stopped or self._has_more(member))
        after = self.rounds.after(member.worker, attempt=attempt, step=step, anyway=anyway)
        if after is After.COMPUTE:
            self._begins(member.incarnation, now)
        return after

    def _has_more(self, member: Member) -> bool:
        """Whether the member has more records of the open version, if these are cut into portions."""
        if not isinstance(self.ledger, PortionedLedger):
            return False
        mine = self.ledger.portion(member.worker, self._weights, least=self._least)
        return bool(mine or self.to_compute_on(member.incarnation))

    @property
    def _least(self) -> int:
        """The least records of a portion. Batch norm cannot use one record, but the script may want one."""
        return LEAST if self.batch >= LEAST else 1

    @property
    def _weights(self) -> dict[int, float]:
        """The weights of the workers that get portions: those that compute, or wait for records."""
        workers = self.rounds.expected | self.rounds.waiting | self.starved
        live = self.members.live
        return {worker: self.balance.weight(live[worker].incarnation) for worker in workers & live.keys()}

    def steps(self, worker: int) -> int:
        """The number of local steps until a worker's next exchange, in mode `local`; else 0."""
        most, member = self.consistency.steps, self.members.live.get(worker)
        if most is None or member is None:
            return most or 0
        return max(self.consistency.fragments or 1, round(most * self.balance.weight(member.incarnation)))

    def standing(self, worker: int, version: int) -> tuple[int, int]:
        """A version, and the number of its steps that a member's process has made; see `messages.Standing`.

        Args:
            version: the version that the member has pulled. It may be the one that is being committed.
        """
        member, rounds = self.members.live.get(worker), self.rounds
        last = -1 if member is None else self.members.last_step(member)
        if member is None or not (rounds.committing and version > rounds.version):
            return rounds.version, last + 1
        process = {each.incarnation for each in self.members.all() if each.instance == member.instance}
        steps = [c.step for c in rounds.contributions if c.worker == worker and c.incarnation in process]
        return version, max(last, *steps, -1) + 1

    def open_ledger(self, records: int, epochs: int, *, shares: int) -> None:
        """Open the ledger for a data set. With `shares`, the schedule is fixed for so many workers."""
        if self.ledger is not None:
            return
        shard_records, size = self.data.shard_records, self.consistency.global_batch_size
        if size is not None:
            self.ledger = PortionedLedger(records, epochs, shard_records, size=size)
        elif shares:
            self.ledger = FixedSchedule(records, epochs, shard_records, shares)
        else:
            self.ledger = Ledger(records, epochs, shard_records)

    def match_ledger(self, records: int, epochs: int, batch: int, data: str = "") -> str:
        """Compare a worker's data set with the job's. Returns the difference in words; "" if there is none.

        A job that continues from a checkpoint may have more epochs than before. The first worker that takes
        records decides.
        """
        assert self.ledger is not None
        self.batch = batch
        if self.resumed and records == self.ledger.records and epochs > self.ledger.epochs:
            self.stopped = ""
            self.ledger.extend(epochs)
        if wrong := dataset.other(self.ledger, records, epochs, resumed=self.resumed):
            return wrong
        if wrong := dataset.other_records(self.fingerprint, data, resumed=self.resumed):
            return wrong
        self.fingerprint = self.fingerprint or data
        if self.resumed:
            self.note(StageEvent.TAKE)
        return dataset.too_small(self.ledger, batch, self.consistency, begins=not self.version)

    def take(self, worker: int, incarnation: int, batch: int) -> list[Range]:
        """Hand records to a worker; none if the training was stopped."""
        if self.stopped:
            return []
        if isinstance(self.ledger, FixedSchedule):
            return self.ledger.take(incarnation, worker=worker, batch=batch)
        assert self.ledger is not None
        if isinstance(self.ledger, PortionedLedger):
            weights = self._weights
            if worker not in weights or self.rounds.is_behind(worker):
                return []  # it has to get the open round's version first
            return self.ledger.take_portion(incarnation, worker=worker, weights=weights, least=self._least)
        # A worker that was late with some records would get the same ones again.
        fresh = worker in self.rounds.late_workers
        return self.ledger.take(incarnation, batch=batch, workers=len(self.members.live), fresh=fresh)

    def admit(self, worker: int, now: float) -> None:
        """Note that a worker has records to compute on. With a fixed schedule the open round waits for it.

        So does the first round until version 0 is on disk and a worker has finished its step: workers come
        one after the other.
        """
        early = self.stage is Stage.BEGUN or not (self.version or self.rounds.done)
        first = self.together and early and self.rounds.assigner is None
        self.rounds.admit(worker, at_once=first or isinstance(self.ledger, FixedSchedule))
        self._begins(self.members.live[worker].incarnation, now)

    def _begins(self, incarnation: int, now: float) -> None:
        """Note that a worker begins a step of the open round, to measure how long it takes."""
        self.waits_for_steps.begins(incarnation)
        if self.consistency.global_batch_size is not None:
            self.pace.begins(incarnation, now)
        else:
            self.pace.idled(incarnation, now)

    def assign(self, member: Member) -> None:
        """Let a worker's values become the next version. Other workers' steps are dropped."""
        others = [who for worker, who in self.members.live.items() if worker in self.rounds.expected]
        self._give_back_steps(self.rounds.assign(member.worker))
        for other in others:
            if other is not member:
                self.give_back(other.incarnation)

    @property
    def last_epoch(self) -> int:
        """The number of the last epoch, from 0."""
        assert self.ledger is not None
        return self.ledger.epochs - 1

    @property
    def end(self) -> tuple[int, int, int, str] | None:
        """The last term and version of training, the chief, and the scripts' state.

        None before there is a chief.
        """
        if not self.finished or self.last_epoch not in self.chiefs.of:
            return None
        return self.term, self.version, self.chiefs.of[self.last_epoch], self.script_state

    def choose_chief(self, member: Member, epoch: int) -> bool:
        """See `Chiefs.choose`."""
        live, stopped = self.members.live, bool(self.stopped)
        return self.chiefs.choose(member, epoch, live=live, ledger=self.ledger, stopped=stopped)

    def hung(self, now: float, limit: timedelta, *, queued: Set[int] = frozenset()) -> dict[int, float]:
        """The workers for which others have waited longer than `limit`, and the seconds.

        The open round lacks their step while another worker's is finished or a new worker waits for the next
        round, or a worker waits for the records that they hold.

        Args:
            queued: in deterministic mode, the workers that wait for their turn to push.
        """
        rounds, live = self.rounds, self.members.live
        missing: set[int] = set()
        if rounds.held_up or queued:
            missing |= rounds.awaited | (self.required - rounds.done.keys())
        if self.starved & live.keys():
            missing |= (rounds.expected | self.required) - rounds.done.keys() - rounds.held_up
        awaited = {live[worker].incarnation: worker for worker in (missing - queued) & live.keys()}
        overdue = self.waits_for_steps.overdue((rounds.version, rounds.attempt), awaited, now, limit)
        return {awaited[incarnation]: seconds for incarnation, seconds in overdue.items()}

    @property
    def grace(self) -> timedelta | None:
        """How long the open round waits for other workers when it has its quorum; None: without a limit.

        With `grace: auto` it is a share of the workers' time between two exchanges. In the first rounds of a
        term that is the time until the quorum's first exchanges.
        """
        if isinstance(self.consistency.grace, timedelta):
            return self.consistency.grace
        return None if self.pace.about is None else timedelta(seconds=GRACE * self.pace.about)

    def hasten(self, now: float) -> float | None:
        """Stop the open round's wait for late workers if `grace` is over.

        Returns the seconds that are left; 0: the wait has just ended; None: the round does not wait so.
        """
        lagging = self.rounds.lagging
        if not lagging or (grace := self.grace) is None:
            return None
        waited = self.waits_for_late.waited((self.version, self.rounds.attempt), lagging, now)
        left = grace.total_seconds() - max(waited.values())
        if left > 0:
            return left
        self.rounds.hasten()
        return 0.0

    def stop_computing(self, member: Member, *, abandoned: bool) -> None:
        """Take a worker out of the rounds for now, and give its records to others.

        Args:
            abandoned: the sums may have a part of a step that it will not finish.
        """
        if abandoned:
            self._give_back_steps(self.rounds.lose(member.worker))
        else:
            self.withdraw(member.worker)
        self.give_back(member.incarnation)

    def withdraw(self, worker: int) -> None:
        """Take a worker that is between two steps out of the rounds for now.

        With `strategy: all-reduce`, if the worker was in the group of the round, the others form a new one.
        """
        if self.state_holders is not None:
            self._give_back_steps(self.rounds.lose(worker))
        else:
            self.rounds.withdraw(worker)

    def drop(self, worker: int, outcome: str, reason: str = "", now: float | None = None) -> Member | None:
        """Remove a member. Its records go to others, except those of a finished step."""
        member = self.members.remove(worker, outcome=outcome, version=self.version, reason=reason, now=now)
        if member is None:
            return None
        self.starved.discard(worker)
        self.calls.forget(member.incarnation)
        self.chiefs.gone(member)
        self._give_back_steps(self.rounds.lose(worker))
        self.give_back(member.incarnation)
        if self.initialiser == worker:
            self.note(StageEvent.LOSE)
            self.model = None
        return member

    def give_back(self, incarnation: int) -> None:
        """Give a worker's records to others, except those of its finished steps."""
        if self.ledger is not None:
            self.ledger.give_back(incarnation, keep=self._records_of_steps(incarnation))

    def to_compute_on(self, incarnation: int) -> list[Range]:
        """The records that a worker holds, except those of its finished steps."""
        assert self.ledger is not None
        return self.ledger.held(incarnation, besides=self._records_of_steps(incarnation))

    def check_records(self, step: Contribution) -> None:
        """Raise LedgerError unless a worker holds its step's records, each once, for this step alone.

        Raise it, too, if the step counts as more than its records, unless it is of a fragment, which was
        trained on the records of earlier exchanges; or if its weight is none.
        """
        records = sum(r.records for r in step.records)
        if step.samples > max(1, records) and not self.consistency.fragments:
            raise LedgerError(
                f"step {step.step} of worker {step.worker} counts as {step.samples} samples, but it has "
                f"{records} records"
            )
        if not (is_weight(step.weight) or step.assigns):
            raise LedgerError(f"step {step.step} of worker {step.worker} has the weight {step.weight}")
        if self.ledger is None:
            return
        before = self.rounds.done.get(step.worker)  # the same step, if its round was restarted
        others = [c for c in self._steps_of(step.incarnation) if c != step and c is not before]
        self.ledger.held(step.incarnation, besides=[r for c in (step, *others) for r in c.ranges])

    def _steps_of(self, incarnation: int) -> list[Contribution]:
        return [c for c in self.rounds.contributions if c.incarnation == incarnation]

    def _records_of_steps(self, incarnation: int) -> list[Range]:
        return [r for c in self._steps_of(incarnation) for r in c.ranges]

    def _give_back_steps(self, void: Iterable[Contribution]) -> None:
        """Give the records of these steps, which are in no version, to others."""
        for c in void:
            if self.ledger is not None:
                self.ledger.give_back_some(c.incarnation, c.ranges)

    def restart_open_round(self) -> None:
        """Restart the open round, which must not be decided."""
        self._give_back_steps(self.rounds.restart())

    def restart_round(self) -> None:
        """Restart the round, decided or not: a shard has other sums than the round needs."""
        self.settings, self.opened_with = self.settings_of_version, None
        again = self.rounds.undecide if self.rounds.decided else self.rounds.restart
        self._give_back_steps(again())

    @property
    def settings_of_version(self) -> Settings:
        """The settings of the version that the open round continues from."""
        return self.settings if self.opened_with is None else self.opened_with

    def decide_settings(self, contributions: Sequence[Contribution]) -> None:
        """Set the settings of the version that the round makes; see `schedules.after`.

        Workers may pull that version before it is booked. The settings are decided once for a round, however
        often the order is repeated, since they count the version as a step.
        """
        if self.opened_with is None:
            self.opened_with, stale = self.settings, self.consistency.may_be_stale
            self.settings = schedules.after(
                self.settings, contributions, self.members, self.ledger, may_be_stale=stale
            )

    def settings_to_step_with(self, contributions: Sequence[Contribution]) -> Settings:
        """The settings for the optimizer's step with these contributions; see `schedules.to_step_with`."""
        stalest, steps = self._stalest(contributions), self.settings_of_version.position.steps
        return schedules.to_step_with(self.settings, self.consistency, stalest=stalest, steps=steps)

    def divisors_with(self, contributions: Sequence[Contribution]) -> Divisors:
        """By what the staleness of these contributions divides learning rates."""
        return scales.divisors(self.consistency.scale, self._stalest(contributions))

    def _stalest(self, contributions: Sequence[Contribution]) -> int:
        staleness = self.rounds.staleness if self.consistency.may_be_stale else {}
        return max(staleness.get(c.worker, 0) for c in contributions)

    def book(self, contributions: Sequence[Contribution], now: float, *, decided: float) -> None:
        """Book the round, which was decided at `decided` and applied by the shards, and open the next."""
        staleness, sent = self.rounds.staleness, {c.incarnation for c in contributions}
        for c in contributions:
            if self.ledger is not None:
                self.ledger.apply(c.incarnation, c.records)
                self.ledger.skip(c.incarnation, c.skipped)
            self.late_records.trained(c.ranges)
            if (member := self.members.find(c.worker, c.incarnation)) is not None:
                member.steps, member.last_step = member.steps + (not c.assigns), c.step
                member.staleness = staleness[c.worker]
                member.records += sum(r.records for r in c.records)
        self.rounds.end_commit()
        self.opened_with = None
        if any(c.assigns for c in contributions):
            self.assigned = self.version
        here = {member.incarnation for member in self.members.live.values()}
        if self.state_holders is not None:
            self.state_holders.holders = sent & here  # who was dropped is not told to make its step
        beginning = here & sent if self.consistency.may_be_stale else here
        self.pace.opened(here, now, beginning=beginning)
        if self.consistency.balance == "speed":
            self.balance.follow(self.pace.of_a_record, here)
        self.last_round = {
            "term": self.term,
            "version": self.version,
            "decided": decided,
            "contributions": [c.record(staleness[c.worker]) for c in contributions],
        }
        self.results.add(contributions, self.version, self.ledger, now, staleness=staleness)
