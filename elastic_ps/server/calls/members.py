"""Shard 0's handlers of the calls of members and of their scripts.

`core` decides, `state.JobState` is the state, and `CommitCoordinator` sends orders to the shards.
messages.proto describes the calls.
"""

from __future__ import annotations

import logging
import math

from elastic_ps.codec.plan import Plan
from elastic_ps.core import script_state
from elastic_ps.core.all_reduce import Peer
from elastic_ps.core.membership import Member
from elastic_ps.core.metrics import keep
from elastic_ps.core.partition import TensorSpec, difference
from elastic_ps.core.sizing import LARGEST, Link, Turn
from elastic_ps.core.stages import Stage, StageEvent
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.server.calls.service import Callers, refuse_to_end, require_permitted
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.job.state import JobState
from elastic_ps.server.orders import Model
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.calls import Sender, answers
from elastic_ps.transport.convert import settings_from_message, tensors_from_message

logger = logging.getLogger(__name__)

PROBE = 4 * 1024 * 1024
"""Bytes of the body of a Probe, at most."""


class MemberCalls:
    """Answers for a `Service`. All methods may be called from any thread and may block."""

    def __init__(self, callers: Callers, shard_zero: ShardZero) -> None:
        self._callers, self._job, self._commit = callers, shard_zero.job, shard_zero.commit
        self._checkpoints, self._history = shard_zero.checkpoints, shard_zero.history
        self._turn, self._join_header = Turn(), 0
        self._joining: dict[int, str] = {}  # the process that was the last to ask, by worker
        self._waste = bytearray()  # all Probes write their bodies here, also at the same time

    # --- members

    @answers(calls.JOIN)
    def join(self, request: pb.JoinRequest, incoming: Incoming) -> pb.JoinReply:
        """Admit a worker. It waits while another worker measures its network, or initialises the model.

        Raises:
            Refused: MODEL_MISMATCH; SUPERSEDED; STALE_CALL; MODEL_LOST; INVALID: the worker cannot reach the
                others, for example.
        """
        link, tensors = _link(request), tensors_from_message(request.tensors)
        optimizer, settings = request.optimizer.name, settings_from_message(request.optimizer.groups)
        job, worker, call = self._job, request.caller.worker, request.caller.call
        self._joining[worker] = request.instance
        has_to_measure = request.measures and link is None
        with job.settled() as state:
            if known := state.members.known(worker, request.instance, call):
                return self._joined(state, known, incoming)
            if state.model is not None and state.initialised:
                _require_same(state.model, tensors, optimizer)  # before it replaces another process
            others = {member.worker: member.incarnation for member in state.members.live.values()}
            holders, peer = state.state_holders, Peer(request.address, request.torch)
            if holders is not None and (problem := holders.refuse(worker, peer, others)):
                raise Refused(RefusalCode.INVALID, problem)  # it cannot form a group with the others
            job.drop(worker, "lost")
            may_join = job.changed.wait_for(
                lambda: job.closing or self._may_join(worker, has_to_measure=has_to_measure),
                timeout=job.limits.answer.total_seconds(),
            )
            if not may_join or job.closing:
                return pb.JoinReply(pending=True)
            state = job.state
            lost = request.again and not state.initialised
            if not lost and has_to_measure and self._size_is_open:
                self._turn.take(worker, job.clock())
                return pb.JoinReply(pending=True, measure=True)
            self._turn.end(worker)
            if configure := not lost and state.stage is Stage.EMPTY:
                state.note(StageEvent.CONFIGURE)
        if lost and not self._checkpoints.leads():  # then the one that leads may have the model
            raise Refused(RefusalCode.NOT_READY, "another parameter server may have taken over; join again")
        if lost:
            text = "the parameter server has lost the model and has no checkpoint to continue from"
            raise Refused(RefusalCode.MODEL_LOST, text)
        if configure:
            self._commit.configure(state, tensors, optimizer, settings, link)
        with job.settled() as state:
            if known := state.members.known(worker, request.instance, call):
                return self._joined(state, known, incoming)
            if self._joining[worker] != request.instance:
                raise Refused(RefusalCode.SUPERSEDED, f"another process joins as worker {worker}")
            job.drop(worker, "lost")
            if not self._may_join(worker):  # another worker has begun to initialise the model
                return pb.JoinReply(pending=True)
            _require_same(state.model, tensors, optimizer)
            reply = self._joined(state, self._admit(state, request, incoming), incoming)
        said = {"incarnation": reply.incarnation, "version": reply.version, "term": reply.term}
        self._history.record("join", worker=worker, **said)
        text = "worker %d (pid %d on %s) joined at version %d; its calls come over %s"
        logger.info(text, worker, request.pid, request.host, reply.version, incoming.transport)
        self._commit.drive()
        return reply

    def _admit(self, state: JobState, request: pb.JoinRequest, incoming: Incoming) -> Member:
        """Make the worker a member, which brings the model if there is none. The lock is held."""
        member = state.members.join(
            request.caller.worker,
            pid=request.pid,
            host=request.host,
            version=state.version,
            now=self._job.clock(),
            instance=request.instance,
            transport=incoming.transport,
            call=request.caller.call,
            follows=request.caller.incarnation,
        )
        if state.state_holders is not None:
            live = [each.incarnation for each in state.members.live.values()]
            state.state_holders.introduce(member.incarnation, Peer(request.address, request.torch), live)
        if not state.initialised:
            state.note(StageEvent.BRING, initialiser=member.worker)
            self._job.note_change()
        return member

    @property
    def _size_is_open(self) -> bool:
        """Whether the next worker brings the model, and its network decides the bucket size."""
        return self._job.spec.chooses_buckets and self._job.state.model is None

    def _may_join(self, worker: int, *, has_to_measure: bool = False) -> bool:
        waits = has_to_measure and self._size_is_open and self._turn.is_anothers(worker, self._job.clock())
        return not waits and self._job.state.may_join

    def _joined(self, state: JobState, member: Member, incoming: Incoming) -> pb.JoinReply:
        """The answer to a member that joins. The lock is held."""
        assert state.model is not None
        initialise = state.initialiser == member.worker
        self._join_header = max(self._join_header, len(incoming.header))
        if not initialise or self._callers.model_header is not None:
            self._callers.model_header = self._join_header
        return pb.JoinReply(
            term=state.term,
            incarnation=member.incarnation,
            version=state.version,
            layout=state.model.message,
            initialise=initialise,
            lease_ms=round(self._job.spec.worker.lease_duration.total_seconds() * 1000),
            tuning=self._job.mutable.to_json(),
            codecs=Plan(self._job.spec.compression).names,
            crowded=state.bucket_bytes > LARGEST,
        )

    @answers(calls.PROBE)
    def probe(self, _: pb.ProbeRequest, incoming: Incoming) -> None:
        """Receive the body and drop it."""
        if incoming.size > PROBE:
            raise Malformed(f"Probe: a body of {incoming.size} bytes; the limit is {PROBE}")
        if incoming.size:
            self._waste = self._waste or bytearray(PROBE)
            incoming.read_into(memoryview(self._waste)[: incoming.size])

    @answers(calls.INIT_DONE)
    def init_done(self, request: pb.InitDoneRequest, _: Incoming) -> None:
        """Note that a worker has sent the first values, or, with a version, those of that version.

        After the first values the model can be trained. If the worker cannot repeat them, this blocks for a
        while, until version 0 is on disk, so the job can go back to it. If the worker ends meanwhile, its
        values stay: they may be on disk already. Later values are written to disk if a checkpoint waits for
        them.

        Raises:
            Refused: NOT_READY; version 0 is not on disk yet. STALE_TERM; a shard has lost the values.
                WRONG_VERSION; another version was made meanwhile.
        """
        if request.HasField("version"):
            self._callers.node.shard.require_values(request.version)
            self._take_version(request)
        else:
            self._take_first(request.caller, repeatable=request.repeatable)
        self._callers.model_header = self._join_header

    def _take_version(self, request: pb.InitDoneRequest) -> None:
        with self._job.member(request.caller) as (state, _):
            _, state_holders = state.all_reduce
            if request.version != state.version:
                text = f"values of version {request.version} were sent, but the job is at {state.version}"
                raise Refused(RefusalCode.WRONG_VERSION, text)
            state_holders.version = request.version
            wanted = state_holders.wanted == request.version
            self._job.changed.notify_all()
        if wanted:
            self._checkpoints.order()

    def _take_first(self, caller: pb.Caller, *, repeatable: bool) -> None:
        with self._job.member(caller) as (state, _):
            if state.initialiser == caller.worker:
                state.note(StageEvent.ARRIVE)
                if repeatable:
                    state.note(StageEvent.BEGIN)
                    self._job.ticking.notify_all()
                self._job.note_change()
            elif state.stage not in (Stage.ARRIVED, Stage.BEGUN, Stage.TRAINING):
                text = f"worker {caller.worker} with incarnation {caller.incarnation} is not the one that"
                raise Refused(RefusalCode.STALE_INCARNATION, f"{text} brings the model")
        self._commit.drive()
        if not repeatable:
            self._checkpoints.keep_what_must_be(patience=self._job.limits.answer)
        with self._job.settled() as now:
            if now is not state:
                raise Refused(RefusalCode.STALE_TERM, f"term {state.term} is over")
            if not state.initialised:
                text = f"version 0 is not on disk yet. {self._checkpoints.failure}"
                raise Refused(RefusalCode.NOT_READY, text)

    @answers(calls.HEARTBEAT)
    def heartbeat(self, request: pb.HeartbeatRequest, _: Incoming) -> None:
        """Renew a lease; with a version, see `SyncRounds.computes_on`."""
        self._callers.require_member(request.caller)
        if request.HasField("version"):
            with self._job.member(request.caller) as (state, member):
                if state.rounds.computes_on(member.worker, request.version):
                    self._job.note_change()
            self._commit.drive()

    @answers(calls.LEAVE)
    def leave(self, request: pb.LeaveRequest, _: Incoming) -> None:
        """Remove a worker that leaves between two steps. Its records go to others."""
        with self._job.member(request.caller) as (state, member):
            state.calls.begin(member.incarnation, request.caller.call)
            state.stop_computing(member, abandoned=False)
            self._job.drop(member.worker, "left")
        self._commit.drive()

    @answers(calls.GONE)
    def gone(self, request: pb.GoneRequest, incoming: Incoming) -> None:
        """Remove a worker whose process has ended, unless a newer process has replaced it."""
        require_permitted(refuse_to_end(incoming.peer, request.worker))
        with self._job.settled() as state:
            member = state.members.live.get(request.worker)
            if member is not None and member.instance == request.instance:
                self._job.drop(member.worker, "lost")
            state.members.note_end(request.worker, request.instance)
        self._commit.drive()

    # --- calls of scripts

    @answers(calls.CHIEF)
    def chief(self, request: pb.ChiefRequest, _: Incoming) -> pb.ChiefReply:
        """Whether the worker evaluates and saves in this epoch; see `Chiefs`."""
        with self._job.member(request.caller) as (state, member):
            chiefs, epoch = state.chiefs, request.epoch
            if not request.passes or chiefs.now == member.worker:
                state.choose_chief(member, epoch)
            elif chiefs.of.get(epoch) != member.worker:
                chiefs.loops[member.worker] = epoch + 1
            return pb.ChiefReply(chief=chiefs.tell(member, epoch))

    @answers(calls.READ_STATE)
    def read_state(self, _: pb.ReadStateRequest, __: Incoming) -> pb.ReadStateReply:
        """The scripts' state; see `JobState.script_state`."""
        with self._job.settled() as state:
            return pb.ReadStateReply(text=state.script_state)

    @answers(calls.WRITE_STATE)
    def write_state(self, request: pb.WriteStateRequest, _: Incoming) -> None:
        """Change the scripts' state. Raises Refused (INVALID) if the worker is not the chief."""
        try:
            script_state.from_text(request.text)
        except ValueError as error:
            raise Malformed(f"WriteState: {error}") from error
        with self._job.member(request.caller) as (state, member):
            if state.calls.begin(member.incarnation, request.caller.call):
                state.chiefs.require(member, again=request.again)
                state.script_state = request.text

    @answers(calls.STOP)
    def stop(self, request: pb.StopRequest, _: Incoming) -> None:
        """Stop the training for a script; see `JobState.stopped`. The first reason counts."""
        if not request.reason:
            raise Refused(RefusalCode.MALFORMED, "the reason for stopping the job must not be empty")
        with self._job.member(request.caller) as (state, member):
            if not (state.stopped or state.finished):
                state.stopped = request.reason
                text = "worker %d stops the training at version %d: %s"
                logger.info(text, member.worker, state.version, request.reason)
                self._job.note_change()
        self._commit.drive()

    @answers(calls.REPORT)
    def report(self, request: pb.ReportRequest, incoming: Incoming) -> None:
        """Keep values that a script reports outside a step.

        A worker reports a loss that is not finite if the gradient of its step was refused for that. A worker
        that has not joined reports with incarnation 0: its script uses only `session.server`.
        """
        if request.caller.incarnation:
            self._callers.check(Sender.MEMBER, request, incoming)
            self._callers.require_member(request.caller)
        with self._job.lock:
            keep(self._job.state.results.metrics, request.metrics)
            if not math.isfinite(request.metrics.get("loss", 0.0)):
                self._job.state.results.judge(math.nan, self._job.state.ledger)


def _link(request: pb.JoinRequest) -> Link | None:
    """The worker's measurement of its network, if it has made one. Raises Malformed."""
    if not request.HasField("link"):
        return None
    link = Link(request.link.rate, request.link.seconds)
    if not all(math.isfinite(each) and each >= 0 for each in link):
        raise Malformed(f"Join: these measurements of a network are impossible: {link}")
    return link


def _require_same(model: Model | None, tensors: tuple[TensorSpec, ...], optimizer: str) -> None:
    """Raise Refused: MODEL_MISMATCH if a worker has another model than the job; NOT_READY if that is lost."""
    if model is None:
        raise Refused(RefusalCode.NOT_READY, "the worker that brought the model is gone; join again")
    different = difference(tensors, model.layout.every)
    if optimizer != model.optimizer:
        text = f"optimizer: this worker has {optimizer}, the parameter server has {model.optimizer}"
        different = f"{text}; {different}" if different else text
    if different:
        raise Refused(RefusalCode.MODEL_MISMATCH, different)
