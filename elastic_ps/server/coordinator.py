"""Shard 0's second part: it admits members, hands out records, and takes finished steps.

The decisions are `core`'s, the state is `state.JobState`, and `commit` tells the shards; here the workers'
calls meet them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elastic_ps.api.tuning import Tuning
from elastic_ps.codec.plan import Plan
from elastic_ps.core.consistency import After, Contribution, Entry
from elastic_ps.core.ledger import LedgerError, Range
from elastic_ps.core.membership import Stay
from elastic_ps.core.metrics import keep
from elastic_ps.core.partition import Layout, TensorSpec, difference
from elastic_ps.core.reduced import Peer
from elastic_ps.core.settings import Settings, read_settings
from elastic_ps.core.sizing import Link, Turn
from elastic_ps.core.stages import Stage, StageEvent
from elastic_ps.errors import InvalidModel, RefusalCode, Refused
from elastic_ps.process.telemetry import History
from elastic_ps.server.checkpointer import Checkpointer
from elastic_ps.server.commit import CommitCoordinator
from elastic_ps.server.guarded import Guarded, Look
from elastic_ps.server.state import JobState, Model, Taken

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """The answer to a worker that has become a member."""

    stay: Stay
    term: int
    version: int
    layout: Layout
    initialise: bool
    settings: Settings
    tuning: Tuning
    codecs: Sequence[str]


class NotYet(Enum):
    """The answer to a worker that cannot become a member now: it asks again, when it has done this."""

    WAIT = auto()
    MEASURE = auto()


@dataclass(frozen=True)
class Begun:
    """The open round, which a step is let in to."""

    version: int
    attempt: int


@dataclass(frozen=True)
class Assigning:
    """What a worker that assigns values is to do: push them for the round, or nothing more, as it is `done`.

    Attributes:
        version, attempt: of the open round.
        done: values were assigned since the worker's version.
        takes_part: with `done`, the worker takes part in the open round.
    """

    version: int
    attempt: int
    done: bool
    takes_part: bool = False


class Coordinator:
    """What workers may ask of a job. All methods may be called from any thread and may block.

    Args:
        job: its state.
        commit: gives the shards the orders that a call makes necessary.
        checkpoints: decides whether workers may be told that the job is finished.
        history: where joins and skipped records are recorded.
    """

    def __init__(
        self, job: Guarded, commit: CommitCoordinator, checkpoints: Checkpointer, history: History
    ) -> None:
        self.job = job
        self._commit, self._checkpoints, self._history = commit, checkpoints, history
        self._turn = Turn()

    # --- members

    def _check(self, worker: int, incarnation: int) -> Stay:
        return self.job.state.members.check(worker, incarnation, self.job.clock())

    def join(
        self,
        worker: int,
        *,
        pid: int,
        host: str,
        tensors: tuple[TensorSpec, ...],
        optimizer: str,
        settings: Settings,
        again: bool = False,
        instance: str = "",
        transport: str = "",
        call: int = 0,
        follows: int = 0,
        peer: Peer | None = None,
        measures: bool = False,
        link: Link | None = None,
    ) -> Joined | NotYet:
        """Admit a worker. It has to wait while another one measures its network, or initialises the model.

        Args:
            again: the process was a member before, and its model is not the one that it began with any more.
            instance, call: which process it is, and which of its joins; see `Membership.known`.
            follows: its stay before; see `Stay`.
            peer: what the other workers have to know of it, with `strategy: all-reduce`.
            measures: whether the worker can measure its network.
            link: what it has found; None before it has measured.

        Raises:
            Refused: MODEL_MISMATCH; SUPERSEDED; STALE_CALL; MODEL_LOST; INVALID: also if the worker cannot
                speak to the others.
        """
        with self.job.settled() as state:
            if known := state.members.known(worker, instance, call):
                return self._joined(known)
            if state.model is not None and state.initialised:
                _require_same(state.model, tensors, optimizer)  # before it takes anybody's place
            _require_speakable(state, worker, peer)
            self.job.drop(worker, "lost")
            has_to_measure = measures and link is None
            may_join = self.job.changed.wait_for(
                lambda: self.job.closing or self._may_join(worker, has_to_measure=has_to_measure),
                timeout=self.job.limits.answer.total_seconds(),
            )
            if not may_join or self.job.closing:
                return NotYet.WAIT
            if again and not self.job.state.initialised:
                raise Refused(
                    RefusalCode.MODEL_LOST,
                    "the parameter server has lost the model and has no checkpoint to continue from",
                )
            if has_to_measure and self._size_is_open:
                self._turn.take(worker, self.job.clock())
                return NotYet.MEASURE
            self._turn.end(worker)
            if configure := self.job.state.stage is Stage.EMPTY:
                self.job.state.note(StageEvent.CONFIGURE)
        if configure:
            self._commit.configure(tensors, optimizer, settings, link)
        with self.job.settled() as state:
            if known := state.members.known(worker, instance, call):
                return self._joined(known)
            self.job.drop(worker, "lost")
            if not self._may_join(worker):  # another one has begun to initialise the model since
                return NotYet.WAIT
            _require_same(state.model, tensors, optimizer)
            stay = state.members.join(
                worker,
                pid=pid,
                host=host,
                version=state.version,
                now=self.job.clock(),
                instance=instance,
                transport=transport,
                call=call,
                follows=follows,
            )
            if state.custody is not None and peer is not None:
                live = [each.incarnation for each in state.members.live.values()]
                state.custody.introduce(stay.incarnation, peer, live)
            if not state.initialised:
                state.note(StageEvent.BRING, initialiser=worker)
                self.job.told()
            joined = self._joined(stay)
        self._history.record(
            "join", worker=worker, incarnation=stay.incarnation, version=joined.version, term=joined.term
        )
        text = "worker %d (pid %d on %s) joined at version %d; its calls come over %s"
        logger.info(text, worker, pid, host, joined.version, transport)
        self._commit.drive()
        return joined

    @property
    def _size_is_open(self) -> bool:
        """Whether the next worker brings the model, and the size of buckets follows from its network."""
        return self.job.spec.chooses_buckets and self.job.state.model is None

    def _may_join(self, worker: int, *, has_to_measure: bool = False) -> bool:
        if has_to_measure and self._size_is_open and self._turn.is_anothers(worker, self.job.clock()):
            return False
        return self.job.state.may_join

    def _joined(self, stay: Stay) -> Joined:
        """What a member is told when it joins; the lock is held."""
        state = self.job.state
        assert state.model is not None
        initialise = state.initialiser == stay.worker
        layout, tuning, codecs = state.model.layout, self.job.tuning, Plan(self.job.spec.compression).names
        settings = state.settings_of_version
        return Joined(stay, state.term, state.version, layout, initialise, settings, tuning, codecs)

    def initialised(self, worker: int, incarnation: int) -> None:
        """The first worker has sent its values: they are kept, and the model can be trained.

        Blocks for a while, until version 0 is on disk, so that there is something to go back to. The values
        stay what they are if the worker ends meanwhile: they may be on disk already.

        Raises:
            Refused: NOT_READY; it is not on disk yet. STALE_TERM; a shard has lost the values.
        """
        with self.job.settled() as state:
            self._check(worker, incarnation)
            if state.initialiser == worker:
                state.note(StageEvent.ARRIVE)
                self.job.told()
            elif state.stage not in (Stage.ARRIVED, Stage.TRAINING):
                text = f"worker {worker} with incarnation {incarnation} is not the one that brings the model"
                raise Refused(RefusalCode.STALE_INCARNATION, text)
        self._commit.drive()
        self._checkpoints.keep_what_must_be(patience=self.job.limits.answer)
        with self.job.settled() as now:
            if now is not state:
                raise Refused(RefusalCode.STALE_TERM, f"term {state.term} is over")
            if not state.initialised:
                text = f"version 0 is not on disk yet. {self._checkpoints.failure}"
                raise Refused(RefusalCode.NOT_READY, text)

    def heartbeat(self, worker: int, incarnation: int) -> None:
        """Raises Refused (STALE_INCARNATION) if the worker was declared gone."""
        with self.job.lock:
            self._check(worker, incarnation)

    def computes_on(self, worker: int, incarnation: int, *, version: int) -> None:
        """See `SyncRounds.computes_on`. Raises Refused: the worker is not a member (any more)."""
        with self.job.settled() as state:
            self._check(worker, incarnation)
            if state.rounds.computes_on(worker, version):
                self.job.told()
        self._commit.drive()

    def leave(self, worker: int, incarnation: int, *, call: int) -> None:
        """A worker says goodbye, between two steps; what it holds goes to others."""
        with self.job.settled() as state:
            stay = self._check(worker, incarnation)
            state.calls.begin(incarnation, call)
            state.stop_computing(stay, abandoned=False)
            self.job.drop(worker, "left")
        self._commit.drive()

    def gone(self, worker: int, instance: str) -> None:
        """A worker's process has ended; nothing happens if a newer one has taken its place."""
        with self.job.settled() as state:
            stay = state.members.live.get(worker)
            if stay is not None and stay.instance == instance:
                self.job.drop(worker, "lost")
        self._commit.drive()

    # --- records and steps

    def take(
        self,
        worker: int,
        incarnation: int,
        *,
        call: int,
        records: int,
        epochs: int,
        batch: int,
        wait: bool,
        abandoned: bool = False,
        skipped: Sequence[Range] = (),
        early: bool = False,
        data: str = "",
        epoch: int | None = None,
    ) -> Taken:
        """Hand out records. With `wait` the worker has none, and no round waits for it until it gets some.

        Args:
            call: the number of the worker's call; see `Calls`.
            abandoned: see `JobState.stop_computing`.
            skipped: with `wait`, records that nobody is to train; the worker must hold them.
            early: with `wait`, the worker's script is not in the last epoch; see `JobState.early`.
            data: what identifies the worker's records; see `JobState.fingerprint`.
            epoch: that the script is in, if it asks for epochs and has begun one.

        Raises:
            Refused: STALE_INCARNATION; INVALID: the data set is not the one of the other workers.
        """
        with self.job.settled() as state:
            stay = self._check(worker, incarnation)
            new = state.calls.begin(incarnation, call)
            if (known := state.calls.answer(incarnation)) is not None:
                return known
            self._open_ledger(records, epochs, batch, data)
            if epoch is not None:
                state.loops[worker] = epoch
            if not wait:
                taken = Taken(state.take(worker, incarnation, batch), finished=state.finished)
                return state.calls.answered(incarnation, taken)
            if new:
                self._skip(state, stay, skipped)
                self._withdraw(state, stay, abandoned)

        def decide(state: JobState) -> Taken | Look | None:
            self._check(worker, incarnation)
            state.calls.require_last(incarnation, call)
            if (known := state.calls.answer(incarnation)) is not None:
                return known
            due = self.job.due
            held = self._hold(worker, incarnation, batch)
            if early and not held:
                state.early.add(worker)
            else:
                state.early.discard(worker)
            if not held and state.finished and state.choose_chief(stay, state.last_epoch):
                return Look.AGAIN  # it is kept with the last version
            if not held and self._checkpoints.may_finish() and not state.awaits_chief(stay):
                chief = state.is_chief(stay, state.last_epoch)
                self.job.changed.notify_all()
                taken = Taken(finished=True, version=state.version, chief=chief)
                return state.calls.answered(incarnation, taken)
            if held and state.rounds.takes_part(worker) and not self.job.behind:
                state.rounds.hand_out(worker)
                if early and epoch is None:  # its script asks for epochs, and begins with this one
                    state.loops[worker] = held[0].epoch
                return state.calls.answered(incarnation, Taken(held, state.version))
            # What is new here is told to the shards at once, not by the ticker.
            return Look.AGAIN if self.job.due and not due else None

        return self.job.poll(decide, self._drive_and_keep) or Taken(pending=True)

    def _drive_and_keep(self) -> None:
        self._commit.drive()
        self._checkpoints.keep_what_must_be()

    def _skip(self, state: JobState, stay: Stay, skipped: Sequence[Range]) -> None:
        """A script has left records out, and makes no step to tell so with; the lock is held."""
        if not skipped or not state.rounds.knows(stay.worker):
            return  # its step came late: what it held has gone to others, who train it
        assert state.ledger is not None
        try:
            state.ledger.check(stay.incarnation, skipped)
        except LedgerError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        state.ledger.skip(stay.incarnation, skipped)
        self._history.record(
            "skip", worker=stay.worker, incarnation=stay.incarnation, records=[list(r) for r in skipped]
        )

    def _withdraw(self, state: JobState, stay: Stay, abandoned: bool) -> None:
        """A worker computes nothing for now; the lock is held."""
        if abandoned or state.rounds.takes_part(stay.worker) or stay.worker in state.rounds.waiting:
            state.stop_computing(stay, abandoned=abandoned)
        else:  # it may be late, and has to stay known as that
            state.give_back(stay.incarnation)
        state.starved.add(stay.worker)
        self.job.told()

    def _hold(self, worker: int, incarnation: int, batch: int) -> list[Range]:
        """The records of a worker that waits for some; with them it is admitted. The lock is held."""
        state = self.job.state
        assert state.ledger is not None
        if state.stopped:
            state.give_back(incarnation)
            takes_part = state.rounds.takes_part(worker)
            state.withdraw(worker)
            if takes_part and not state.rounds.takes_part(worker):  # the shards may wait for its push
                self.job.told()
            return []
        held = state.to_compute_on(incarnation) or state.take(worker, incarnation, batch)
        if held:
            state.starved.discard(worker)
        else:
            state.starved.add(worker)
            if worker in state.rounds.turned_away:  # it is not coming back to the open round
                state.withdraw(worker)
                self.job.told()
        if held and not state.rounds.knows(worker):  # else two that wait would wake each other
            state.admit(worker, self.job.clock())
            self.job.told()
        return held

    def _open_ledger(self, records: int, epochs: int, batch: int, data: str) -> None:
        state, spec = self.job.state, self.job.spec
        lanes = spec.worker.replicas if spec.consistency.fixed_workers else 0
        state.open_ledger(records, epochs, lanes=lanes)
        if wrong := state.match_ledger(records, epochs, batch, data):
            raise Refused(RefusalCode.INVALID, wrong)

    def release(
        self,
        worker: int,
        incarnation: int,
        *,
        call: int,
        abandoned: bool = False,
        skipped: Sequence[Range] = (),
        leaves: bool = False,
    ) -> None:
        """A worker gives back its records; rounds no longer wait for it. It stays a member. See `take`.

        Args:
            leaves: see `JobState.resign`.
        """
        with self.job.settled() as state:
            stay = self._check(worker, incarnation)
            if not state.calls.begin(incarnation, call):
                return
            self._skip(state, stay, skipped)
            state.stop_computing(stay, abandoned=abandoned)
            state.starved.discard(worker)
            if leaves:
                state.resign(stay)
            self.job.told()
        self._commit.drive()

    def is_chief(self, worker: int, incarnation: int, *, epoch: int, passes: bool = False) -> bool:
        """Whether the worker is the one to evaluate and save in this epoch; see `JobState.chiefs`.

        Args:
            passes: others have trained the epoch, and its script comes to the end of it only if it is.
        """
        with self.job.settled() as state:
            stay = self._check(worker, incarnation)
            if not passes or state.chief == worker:
                state.choose_chief(stay, epoch)
            elif state.chiefs.get(epoch) != worker:
                state.loops[worker] = epoch + 1
            return state.is_chief(stay, epoch)

    def read_state(self) -> str:
        """What scripts keep with the job; see `JobState.script_state`."""
        with self.job.settled() as state:
            return state.script_state

    def write_state(
        self, worker: int, incarnation: int, text: str, *, call: int, again: bool = False
    ) -> None:
        """The chief's script changes it.

        Args:
            call: see `take`.
            again: see `JobState.write_state`.

        Raises:
            Refused: INVALID; the worker is not the chief.
        """
        with self.job.settled() as state:
            stay = self._check(worker, incarnation)
            if state.calls.begin(incarnation, call):
                state.write_state(stay, text, again=again)

    def stop(self, worker: int, incarnation: int, reason: str) -> None:
        """A script ends the training; see `JobState.stopped`. The first reason counts."""
        with self.job.settled() as state:
            self._check(worker, incarnation)
            if not (state.stopped or state.finished):
                state.stopped = reason
                logger.info("worker %d stops the training at version %d: %s", worker, state.version, reason)
                self.job.told()
        self._commit.drive()

    def begin(self, worker: int, incarnation: int, *, version: int, step: int) -> Begun | None:
        """Where rounds are not made of everybody's steps, before the first push of one. Blocks.

        Args:
            version: that the step was computed on.
            step: the worker's own count of its steps.

        Returns the round that it is let in to; None: nothing has happened, ask again.

        Raises:
            Refused: LATE: enough others have begun theirs. The step is void, and its records go to others.
        """
        round_: int | None = None
        late: Refused | None = None

        def decide(state: JobState) -> Begun | Look | None:
            nonlocal round_, late
            stay = self._check(worker, incarnation)
            entry = Entry.IN if round_ is not None else state.begin(stay, version=version, step=step)
            if entry is Entry.LATE:
                self.job.told()
                late = Refused(
                    RefusalCode.LATE,
                    f"worker {worker} wants to push a step on version {version}, but the round on version "
                    f"{state.version} has enough other workers",
                )
                return Look.OVER
            if entry is Entry.IN:
                round_ = state.version if round_ is None else round_
                if state.version != round_:  # it has asked again, been answered, and finished
                    return Look.OVER
                if not self.job.behind:
                    return Begun(round_, state.rounds.attempt)
            return None

        begun = self.job.poll(decide, self._commit.drive)
        if late is not None:
            self._commit.drive()
            raise late
        return begun

    def await_version(
        self, worker: int, incarnation: int, *, attempt: int, step: int
    ) -> tuple[After, int] | None:
        """In mode `accumulate`, after a step: what the worker is to do. Blocks until that is known.

        Args:
            attempt: that the step was pushed for.
            step: the worker's own count of its steps.

        Returns that, and the round's attempt; None: nothing has happened, ask again.

        Raises:
            Refused: see `SyncRounds.after`.
        """

        def decide(state: JobState) -> tuple[After, int] | None:
            stay = self._check(worker, incarnation)
            after = state.after_step(stay, attempt=attempt, step=step, now=self.job.clock())
            if after is None or (after is After.PUSH and self.job.behind):
                return None
            return after, state.rounds.attempt

        return self.job.poll(decide, self._commit.drive)

    def assign(self, worker: int, incarnation: int, *, version: int) -> Assigning | None:
        """A worker's values are to become the next version. Blocks.

        The worker asks again until the answer is `done`, and pushes its values whenever it is told to. Of the
        workers that assign values without knowing of each other's, the first one's count.

        Args:
            version: that the worker had when its script changed the values.

        Returns None if nothing has happened: ask again.

        Raises:
            Refused: INVALID; consistency is one in which no values can be assigned.
        """
        if not self.job.spec.consistency.may_assign:
            raise Refused(RefusalCode.INVALID, "values can be assigned with consistency.mode sync alone")

        def decide(state: JobState) -> Assigning | Look | None:
            stay = self._check(worker, incarnation)
            rounds = state.rounds
            settled = not self.job.behind
            kept = not state.finished or self._checkpoints.is_kept()
            if state.assigned > version and settled and kept:
                return Assigning(state.version, rounds.attempt, True, rounds.takes_part(worker))
            if rounds.assigner is None and not rounds.decided and state.assigned <= version:
                state.assign(stay)
                self.job.told()
                return Look.AGAIN
            if rounds.assigner == worker and worker not in rounds.done and settled:
                return Assigning(rounds.version, rounds.attempt, False)
            return None

        return self.job.poll(decide, self._drive_and_keep)

    def finish(
        self,
        contribution: Contribution,
        *,
        version: int,
        attempt: int,
        traffic: Mapping[str, Any] | None = None,
    ) -> bool:
        """A worker's step is complete on all shards. Returns False if that was known.

        Args:
            traffic: see `Stay.traffic`.

        The call that completes a round commits it and returns when the shards have applied it.

        Raises:
            Refused: see `SyncRounds.finish`; INVALID: records that the worker does not hold, or settings that
                the optimizer cannot step with.
        """
        with self.job.settled() as state:
            stay = self._check(contribution.worker, contribution.incarnation)
            if contribution.step <= stay.last_step:
                return False
            if not state.rounds.takes_part(contribution.worker):
                text = f"step {contribution.step} of worker {contribution.worker} is void: it takes no part"
                raise Refused(RefusalCode.LATE, text)
            try:
                state.check_records(contribution)
                if contribution.settings:
                    state.settings.check_follows(read_settings(contribution.settings))
            except (LedgerError, InvalidModel) as error:
                raise Refused(RefusalCode.INVALID, str(error)) from error
            new = state.rounds.finish(contribution, version=version, attempt=attempt)
            stay.traffic.update(traffic or {})
            if new and not contribution.assigns:
                records = sum(r.records for r in contribution.records)
                state.pace.finished(contribution.incarnation, attempt, self.job.clock(), records=records)
                self.job.hasten()
        self._commit.drive()
        return new

    def is_applied(self, worker: int, incarnation: int, step: int) -> bool:
        """Whether the worker's step is in the model. Raises Refused: it is not a member (any more)."""
        with self.job.settled():
            return step <= self._check(worker, incarnation).last_step

    def report(self, worker: int, incarnation: int, metrics: Mapping[str, float]) -> None:
        """Keep values that a script reports outside a step.

        A loss that is not finite is what a worker reports of a step whose gradient was refused for that.
        A worker that has not joined reports, too, with 0: its script uses `session.server` alone.
        """
        with self.job.lock:
            if incarnation:
                self._check(worker, incarnation)
            keep(self.job.state.metrics, metrics)
            if not math.isfinite(metrics.get("loss", 0.0)):
                self.job.state.judge(math.nan)


def _require_speakable(state: JobState, worker: int, peer: Peer | None) -> None:
    """Raise Refused (INVALID) if a worker cannot be of a group with the others; the lock is held."""
    if state.custody is None or peer is None:
        return
    members = {stay.worker: stay.incarnation for stay in state.members.live.values()}
    if problem := state.custody.refuse(worker, peer, members):
        raise Refused(RefusalCode.INVALID, problem)


def _require_same(model: Model | None, tensors: tuple[TensorSpec, ...], optimizer: str) -> None:
    """Raise Refused (MODEL_MISMATCH) if a worker's model is not the job's; NOT_READY if that is gone."""
    if model is None:
        raise Refused(RefusalCode.NOT_READY, "the worker that brought the model is gone; join again")
    different = difference(tensors, model.layout.tensors)
    if optimizer != model.optimizer:
        text = f"optimizer: this worker has {optimizer}, the parameter server has {model.optimizer}"
        different = f"{text}; {different}" if different else text
    if different:
        raise Refused(RefusalCode.MODEL_MISMATCH, different)
