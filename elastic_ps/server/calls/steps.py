"""Shard 0's handlers of the calls for records and steps.

`core` decides, `state.JobState` is the state, and `CommitCoordinator` sends orders to the shards.
messages.proto describes the calls. If a handler returns None, nothing has happened, and the worker repeats
the call.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from elastic_ps.codec.auto import CANDIDATES
from elastic_ps.core.all_reduce import Barrier
from elastic_ps.core.consistency import After, Contribution, Entry
from elastic_ps.core.ledger import Ledger, LedgerError, Range
from elastic_ps.core.membership import Member
from elastic_ps.core.overlap import Overlap
from elastic_ps.core.stages import CourseEvent
from elastic_ps.data.order import Order
from elastic_ps.errors import InvalidModel, Malformed, RefusalCode, Refused
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.job.guarded import Look
from elastic_ps.server.job.state import JobState
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.calls import answers
from elastic_ps.transport.convert import (
    fields,
    from_message,
    ranges_from_message,
    ranges_to_message,
    settings_from_message,
)

logger = logging.getLogger(__name__)


class StepCalls:
    """Answers for a `Service`. All methods may be called from any thread and may block.

    Attributes:
        job: the job's state.
    """

    def __init__(self, shard_zero: ShardZero) -> None:
        self.job, self._commit = shard_zero.job, shard_zero.commit
        self._checkpoints, self._history = shard_zero.checkpoints, shard_zero.history

    def _drive_and_keep(self) -> None:
        self._commit.drive()
        self._checkpoints.keep_what_must_be()

    # --- records

    @answers(calls.TAKE)
    def take(self, request: pb.TakeRequest, _: Incoming) -> pb.TakeReply:
        """Hand out records. With `wait`, the worker has none, and no round waits for it until it has some.

        Raises:
            Refused: STALE_INCARNATION; INVALID: the other workers have another data set.
        """
        if not (request.records and request.epochs and request.batch):
            raise Refused(RefusalCode.MALFORMED, "records, epochs and batch must be at least 1")
        caller = request.caller
        worker, incarnation = caller.worker, caller.incarnation
        with self.job.member(caller) as (state, member):
            new = state.calls.begin(incarnation, caller.call)
            if (known := state.calls.answer(incarnation)) is not None:
                return known
            self._open_ledger(state, request)
            if request.HasField("epoch"):
                state.chiefs.loops[worker] = request.epoch
            if not request.wait:
                taken = state.take(worker, incarnation, request.batch)
                return self._taken(state, incarnation, taken)
            if new:
                self._skip(state, member, ranges_from_message(request.skipped))
                self._withdraw(state, member, request.abandoned)

        def decide(state: JobState) -> pb.TakeReply | Look | None:
            self.job.check(caller)
            state.calls.require_last(incarnation, caller.call)
            if (known := state.calls.answer(incarnation)) is not None:
                return known
            unsent = self.job.unsent
            held = self._grant(state, member, request.batch)
            if request.early and not held:
                state.chiefs.early.add(worker)
            else:
                state.chiefs.early.discard(worker)
            if not held and state.finished and state.choose_chief(member, state.last_epoch):
                return Look.AGAIN  # the chief is written with the last version
            if (
                not held
                and self._checkpoints.may_finish()
                and not state.chiefs.awaits(member, state.last_epoch, state.members.live)
            ):
                chief = state.chiefs.tell(member, state.last_epoch)
                self.job.changed.notify_all()
                return self._taken(state, incarnation, finished=True, version=state.version, chief=chief)
            if held and state.rounds.takes_part(worker) and not self.job.behind:
                state.rounds.tell_version(worker)
                if request.early and not request.HasField("epoch"):
                    # Its script loops over epochs, and begins with this one.
                    state.chiefs.loops[worker] = held[0].epoch
                return self._taken(state, incarnation, held, version=state.version)
            # `_grant` has changed who takes part. Tell the shards at once: the ticker would be later.
            return Look.AGAIN if self.job.unsent and not unsent else None

        answer = self.job.poll(decide, self._drive_and_keep)
        return pb.TakeReply(pending=True, stopped=self.job.state.stopped) if answer is None else answer

    def _taken(
        self, state: JobState, incarnation: int, ranges: Sequence[Range] = (), **said: Any
    ) -> pb.TakeReply:
        """The answer to the member's last call, and to its repetitions. The lock is held."""
        reply = pb.TakeReply(ranges=ranges_to_message(ranges), stopped=state.stopped, **said)
        return state.calls.answered(incarnation, reply)

    def _open_ledger(self, state: JobState, request: pb.TakeRequest) -> None:
        spec = self.job.spec
        shares = spec.worker.replicas if spec.consistency.fixed_workers else 0
        state.open_ledger(request.records, request.epochs, shares=shares)
        if wrong := state.match_ledger(request.records, request.epochs, request.batch, request.data):
            raise Refused(RefusalCode.INVALID, wrong)
        if request.order and isinstance(state.ledger, Ledger) and state.ledger.run_end is None:
            try:
                order = Order.from_text(request.order, records=request.records, seed=state.data.seed)
            except ValueError as error:
                raise Refused(RefusalCode.MALFORMED, str(error)) from error
            state.ledger.run_end = order.run_end

    def _skip(self, state: JobState, member: Member, skipped: Sequence[Range]) -> None:
        """Skip records that a script has left out without a step. The lock is held."""
        if not skipped or not state.rounds.knows(member.worker):
            return  # its step was late, and other workers train its records
        assert state.ledger is not None
        try:
            state.ledger.skip(member.incarnation, skipped)
        except LedgerError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        state.late_records.trained(skipped)
        self._history.record(
            "skip", worker=member.worker, incarnation=member.incarnation, records=[list(r) for r in skipped]
        )

    def _withdraw(self, state: JobState, member: Member, abandoned: bool) -> None:
        """Note that a worker computes nothing for now. The lock is held."""
        if abandoned or state.rounds.takes_part(member.worker) or member.worker in state.rounds.waiting:
            state.stop_computing(member, abandoned=abandoned)
        else:  # it may be late, and has to stay known as late
            state.give_back(member.incarnation)
        state.starved.add(member.worker)
        self.job.note_change()

    def _grant(self, state: JobState, member: Member, batch: int) -> list[Range]:
        """Give records to a worker that waits for some, and admit it. The lock is held."""
        worker, incarnation = member.worker, member.incarnation
        if state.stopped:
            state.give_back(incarnation)
            takes_part = state.rounds.takes_part(worker)
            state.withdraw(worker)
            if takes_part and not state.rounds.takes_part(worker):  # the shards may wait for its push
                self.job.note_change()
            return []  # mutant: equal
        held = state.to_compute_on(incarnation) or state.take(worker, incarnation, batch)
        if held:
            state.starved.discard(worker)
        else:
            state.starved.add(worker)
            if worker in state.rounds.late_workers:  # it does not return to the open round
                state.withdraw(worker)
                self.job.note_change()
        if held and not state.rounds.knows(worker):  # otherwise two that wait would wake each other
            state.admit(worker, self.job.clock())
            self.job.note_change()
        return held

    @answers(calls.RELEASE)
    def release(self, request: pb.ReleaseRequest, _: Incoming) -> None:
        """Take back a worker's records. Rounds no longer wait for it, but it stays a member."""
        with self.job.member(request.caller) as (state, member):
            if not state.calls.begin(member.incarnation, request.caller.call):
                return
            self._skip(state, member, ranges_from_message(request.skipped))
            state.stop_computing(member, abandoned=request.abandoned)
            state.starved.discard(member.worker)
            if request.leaves:
                state.chiefs.resign(member)
            self.job.note_change()
        self._commit.drive()

    # --- steps

    @answers(calls.BEGIN)
    def begin(self, request: pb.BeginRequest, _: Incoming) -> pb.BeginReply | None:
        """The round in which a worker may push its step.

        Raises:
            Refused: LATE: the round has enough other steps. The step is dropped; its records go to others.
        """
        worker, version = request.caller.worker, request.version
        round_: int | None = None

        def decide(state: JobState) -> pb.BeginReply | None:
            nonlocal round_
            member = self.job.check(request.caller)
            if round_ is None:
                entry = state.begin(member, version=version, step=request.step)
                if entry is Entry.LATE:
                    self.job.note_change()
                    raise Refused(
                        RefusalCode.LATE,
                        f"worker {worker} wants to push a step on version {version}, but the round on "
                        f"version {state.version} has enough other workers",
                    )
                if entry is not Entry.IN:
                    return None
                round_ = state.version
            if state.version != round_:  # a repeated call was answered, and the worker has finished
                return pb.BeginReply(pending=True)
            return None if self.job.behind else pb.BeginReply(version=round_, attempt=state.rounds.attempt)

        try:
            return self.job.poll(decide, self._commit.drive)
        except Refused:
            self._commit.drive()  # a late worker no longer takes part
            raise

    @answers(calls.AWAIT)
    def await_version(self, request: pb.AwaitRequest, _: Incoming) -> pb.AwaitReply | None:
        """Say what a worker does after a step in mode `accumulate`. Raises Refused; see `after_step`."""

        def decide(state: JobState) -> pb.AwaitReply | None:
            member, now = self.job.check(request.caller), self.job.clock()
            after = state.after_step(member, attempt=request.attempt, step=request.step, now=now)
            if after is After.PULL:
                return pb.AwaitReply(made=True)
            if after is After.COMPUTE:
                return pb.AwaitReply(compute=True, stopped=state.stopped)
            if after is None or self.job.behind:
                return None
            return pb.AwaitReply(attempt=state.rounds.attempt)

        return self.job.poll(decide, self._commit.drive)

    @answers(calls.ASSIGN)
    def assign(self, request: pb.AssignRequest, _: Incoming) -> pb.AssignReply | None:
        """Let a worker's values become the next version.

        The worker repeats the call until the answer is `done`, and pushes its values when the answer says so.
        If several workers assign values to the same version, those of the first count.

        Raises:
            Refused: INVALID; the mode does not allow it.
        """
        if not self.job.spec.consistency.may_assign:
            raise Refused(RefusalCode.INVALID, "session.assign needs consistency.mode sync")
        worker, version = request.caller.worker, request.version

        def decide(state: JobState) -> pb.AssignReply | Look | None:
            member, rounds = self.job.check(request.caller), state.rounds
            settled = not self.job.behind
            kept = not state.finished or self._checkpoints.is_kept()
            reply = pb.AssignReply(version=rounds.version, attempt=rounds.attempt)
            if state.assigned > version and settled and kept:
                reply.done, reply.takes_part = True, rounds.takes_part(worker)
                return reply
            if rounds.assigner is None and not rounds.decided and state.assigned <= version:
                state.assign(member)
                self.job.note_change()
                return Look.AGAIN
            return reply if rounds.assigner == worker and worker not in rounds.done and settled else None

        return self.job.poll(decide, self._drive_and_keep)

    @answers(calls.FINISH)
    def finish(self, request: pb.FinishRequest, _: Incoming) -> pb.Done:
        """See `end_step`."""
        return pb.Done(duplicate=not self.end_step(request, request.caller))

    def end_step(self, request: pb.FinishRequest, caller: pb.Caller) -> bool:
        """Note that a step is complete on all shards. A Push or a Meet of `caller` may carry this call.

        The call that completes a round commits it, and returns when the shards have applied it. Returns False
        if the step is known already.

        Raises:
            Refused: see `SyncRounds.finish`; INVALID: records that the worker does not hold, or settings that
                the optimizer cannot step with; FORBIDDEN: the step is of another worker than `caller`.
        """
        if request.caller.worker != caller.worker:
            raise Refused(RefusalCode.FORBIDDEN, f"worker {caller.worker} ends a step of another worker")
        settings = settings_from_message(request.settings) if request.settings else None
        contribution = from_message(
            Contribution,
            request,
            **fields(request.caller, "worker", "incarnation"),
            records=ranges_from_message(request.ranges),
        )
        with self.job.member(request.caller) as (state, member):
            if contribution.step <= member.last_step:
                return False
            if not state.rounds.takes_part(member.worker):
                text = (
                    f"step {contribution.step} of worker {member.worker} is dropped: the worker takes no part"
                )
                raise Refused(RefusalCode.LATE, f"{text} in the round")
            try:
                state.check_records(contribution)
                if settings is not None:
                    state.settings.check_follows(settings)
            except (LedgerError, InvalidModel) as error:
                raise Refused(RefusalCode.INVALID, str(error)) from error
            new = state.rounds.finish(contribution, version=request.version, attempt=request.attempt)
            member.traffic.update(_traffic(request))
            if new and not contribution.assigns:
                records = sum(r.records for r in contribution.records)
                state.pace.finished(member.incarnation, request.attempt, self.job.clock(), records=records)
                self.job.hasten()
        self._commit.drive()
        return new

    def is_applied(self, request: pb.PushRequest) -> bool:
        """Return whether the model has this push's step. Raises Refused if the caller is not a member."""
        with self.job.member(request.caller) as (_, member):
            return request.step <= member.last_step

    # --- with strategy all-reduce

    @answers(calls.MEET)
    def meet(self, request: pb.MeetRequest, _: Incoming) -> pb.MeetReply | None:
        """Let a worker wait at a barrier of the open round, or tell it that another round is open.

        Gradients and values are not sent here, except the values of a version that is written to disk, which
        one worker sends.

        Raises:
            Refused: STALE_INCARNATION; LATE: the worker does not make the open round.
        """
        worker, version, attempt = request.caller.worker, request.version, request.attempt
        if request.parts:
            return self._part(request)
        if request.HasField("finish"):
            try:
                self.end_step(request.finish, request.caller)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:  # the answer names the open round
                    raise
        try:
            barrier = Barrier(request.barrier) if request.HasField("barrier") else None
        except ValueError as error:
            raise Malformed(str(error)) from error
        known = (version, attempt if request.HasField("attempt") else None)

        def decide(state: JobState) -> pb.MeetReply | Look | None:
            member = self.job.check(request.caller)
            rounds, state_holders = state.all_reduce
            if request.holds and version == rounds.version:
                state_holders.holders.add(member.incarnation)
            if (rounds.version, rounds.attempt) != known:
                return None if self.job.behind else _met(state, worker)
            if request.broken and not rounds.decided:
                text = "worker %d reports that the group of version %d, attempt %d, has lost the connection"
                logger.info(text, worker, version, attempt)
                state.restart_open_round()
                self.job.note_change()
                return Look.AGAIN
            if barrier is None:
                return None
            if not rounds.takes_part(worker):
                text = f"worker {worker} takes no part in the round on version {version}"
                raise Refused(RefusalCode.LATE, text)
            if rounds.meet(worker, barrier, holds=request.holds):
                self.job.changed.notify_all()
            if not rounds.together(barrier) or self.job.behind:
                return None
            if barrier is Barrier.GRADIENTS or rounds.source is not None or state.values_are_here:
                return _met(state, worker, barrier)
            if state_holders.among(*state.members.may_return(self.job.clock())):
                return None
            self.job.note_course(CourseEvent.ROLL_BACK)  # no worker of the group has the version
            return Look.AGAIN

        return self.job.poll(decide, self._commit.drive)

    def _part(self, request: pb.MeetRequest) -> pb.MeetReply:
        """Whether a worker that leaves the rounds has to send the values of the version first.

        If no other worker of the open round has the values, they would be lost with this worker.
        """
        with self.job.member(request.caller) as (state, member):
            rounds, _ = state.all_reduce
            last = rounds.version == request.version and rounds.part(member.worker)
            return pb.MeetReply(send=last and not state.values_are_here)


def _met(state: JobState, worker: int, barrier: Barrier | None = None) -> pb.MeetReply:
    """The reply with the open round. `barrier`: all of the group have reached it. The lock is held."""
    rounds, state_holders = state.all_reduce
    live = state.members.live
    group = [live[other] for other in rounds.group if other in live]
    wanted = state_holders.wanted == rounds.version and not state.values_are_here
    return pb.MeetReply(
        version=rounds.version,
        attempt=rounds.attempt,
        lacking=rounds.lacking,
        group=[
            pb.Peer(
                worker=member.worker,
                incarnation=member.incarnation,
                address=state_holders.peers[member.incarnation].address,
            )
            for member in group
        ],
        together=barrier is not None,
        all_hold=all(rounds.arrived.get(Barrier.STATE, {}).values()),
        source=rounds.source if barrier is Barrier.STATE else None,
        values_are_here=state.values_are_here,
        send=wanted and worker == min(rounds.holders, default=None),
        settings=state.settings.to_json(),
        stopped=state.stopped,
    )


def _traffic(request: pb.FinishRequest) -> dict[str, Any]:
    """Keep the bytes that a worker has sent and received since it joined; see `Member.traffic`."""
    told = request.traffic.ListFields()
    traffic = {field.name: value for field, value in told if isinstance(value, str) or math.isfinite(value)}
    if traffic.get("codec", "") not in CANDIDATES:
        traffic.pop("codec", None)
    if (overlap := traffic.pop("overlap", "")) in Overlap.__members__:
        traffic["overlap"] = str(Overlap[overlap])
    return traffic
