"""The handlers of a shard for calls of workers and of shard 0, and of its standby: they call `Node`."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ps import codec
from elastic_ps.codec.base import Payload
from elastic_ps.codec.state import CopiedTensor
from elastic_ps.core.sequence import PushKey
from elastic_ps.errors import CheckpointError, RefusalCode, Refused, UserError
from elastic_ps.server.calls.node import Node
from elastic_ps.server.calls.service import Callers
from elastic_ps.server.calls.steps import StepCalls
from elastic_ps.server.job.standby import sum_key
from elastic_ps.server.orders import Advance, Configuration, OrderId
from elastic_ps.server.shards.pulls import Pull, Pulled, RestartedAs
from elastic_ps.server.shards.shard import Shard
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Frame, Incoming
from elastic_ps.transport.calls import answers
from elastic_ps.transport.convert import fields, from_message, settings_from_message, to_message


class ShardService:
    """Answers for a `Service`.

    Args:
        steps: on shard 0, to end a step with its last push; None on other shards.
    """

    def __init__(self, callers: Callers, node: Node, steps: StepCalls | None) -> None:
        self._callers, self._node, self._steps = callers, node, steps

    # --- to workers

    @answers(calls.INIT)
    def _init(self, request: pb.InitRequest, incoming: Incoming) -> None:
        caller, version = request.caller, fields(request, "version")
        if request.HasField("version"):
            self._callers.require_member(caller)
        self._node.shard.initialise(request.bucket, caller.worker, caller.incarnation, incoming, **version)

    @answers(calls.INIT_STATE)
    def _init_state(self, request: pb.InitStateRequest, incoming: Incoming) -> None:
        self._node.shard.initialise_state(
            request.bucket,
            request.piece,
            [(entry.key, entry.dtype, entry.scalar) for entry in request.entries],
            request.caller.worker,
            request.caller.incarnation,
            incoming,
            **fields(request, "version"),
        )

    @answers(calls.PUSH)
    def _push(self, request: pb.PushRequest, incoming: Incoming) -> pb.Done | Iterator[Frame]:
        caller = request.caller
        who = caller.term, caller.worker, caller.incarnation
        key = PushKey(*who, request.step, request.bucket, request.version, request.attempt)
        steps = self._steps if request.HasField("finish") else None
        try:
            added = self._added(key, request, incoming)
        except Refused as refusal:
            if refusal.code is RefusalCode.WRONG_VERSION:
                self._callers.require_member(caller)
            stale = refusal.code is RefusalCode.STALE_ATTEMPT
            if not (stale and steps is not None and steps.is_applied(request)):
                raise
            added = False  # its answer was lost, and the version is made
        else:
            if steps is not None:
                added = steps.end_step(request.finish, caller) or added
        if request.HasField("pull"):
            return self._pulled(request.pull, caller)
        return pb.Done(duplicate=not added)

    def _added(self, key: PushKey, request: pb.PushRequest, incoming: Incoming) -> bool:
        """Add a gradient. Returns False if the round's sum has it already."""
        shard = self._node.shard
        if shard.term != key.term:  # a new term may have begun, with other encodings
            raise Refused(RefusalCode.STALE_TERM, f"the push is of term {key.term}, not {shard.term}")
        sent = from_message(Payload, request, body=EMPTY)
        return shard.push(key, request.weight, sent, incoming)

    @answers(calls.PULL)
    def _pull(self, request: pb.PullRequest, _: Incoming) -> Iterator[Frame]:
        return self._pulled(request, request.caller)

    def _pulled(self, request: pb.PullRequest, caller: pb.Caller) -> Iterator[Frame]:
        told_of_restart = request.contributor and self._steps is not None
        if told_of_restart:  # a dropped worker would wait in vain, and could not join again
            self._callers.require_member(caller)
        version, shard = request.version, self._node.shard
        drafts = request.draft_settings and request.contributor
        asked = Pull(
            **fields(request, "buckets", "version", "held"),
            term=caller.term,
            attempt=request.attempt if told_of_restart else None,
            contributor=(caller.worker, caller.incarnation) if request.contributor else None,
            drafts=request.drafts if drafts else {},
            groups=settings_from_message(request.draft_settings).groups if drafts else None,
        )
        for item in shard.pull(asked):
            if item is None:
                self._callers.require_member(caller)
                yield _frame(pb.PullReply(pending=True))
                return
            if isinstance(item, RestartedAs):
                yield _frame(pb.PullReply(attempt=item.attempt))
                return
            assert isinstance(item, Pulled)
            version = item.version
            reply, body = answer_of(shard, item)
            if item.last:
                reply.last = True
                self._end_pull(reply, request, caller)
            yield Frame(reply.SerializeToString(), body, last=item.last)
            if item.last:
                return
        end = pb.PullReply(done=True, version=version)
        self._end_pull(end, request, caller)
        yield _frame(end)

    def _end_pull(self, reply: pb.PullReply, request: pb.PullRequest, caller: pb.Caller) -> None:
        """Add the state of the job to the last answer of a pull, on shard 0.

        Raises:
            Refused: the caller was dropped while it waited, so the version may lack its step.
        """
        if self._steps is None:
            return
        if request.contributor:
            self._callers.require_member(caller)
        with self._steps.job.lock:
            state, worker = self._steps.job.state, caller.worker
            reply.settings, reply.stopped = state.settings.to_json(), state.stopped
            reply.steps = state.steps(worker)
            if not request.HasField("held"):  # otherwise its step is in the version
                reply.standing.version, reply.standing.steps = state.standing(worker, reply.version)

    @answers(calls.OPTIMIZER_STATE)
    def _optimizer_state(self, _: pb.OptimizerStateRequest, __: Incoming) -> Iterator[Frame]:
        for entry in self._node.shard.state():
            header = to_message(pb.OptimizerStateReply, entry, dtype=entry.dtype)
            yield Frame(header.SerializeToString(), codec.as_bytes(entry.value))
        yield _frame(pb.OptimizerStateReply(done=True))

    # --- to shard 0, and from a standby to its shard

    @answers(calls.CONFIGURE)
    def _configure(self, request: pb.ConfigureRequest, _: Incoming) -> None:
        try:
            self._node.configure(from_message(Configuration, request), from_message(OrderId, request))
        except UserError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        except CheckpointError as error:  # shard 0 has verified the checkpoint, so the problem may pass
            raise Refused(RefusalCode.NOT_READY, str(error)) from error

    @answers(calls.ADVANCE)
    def _advance(self, request: pb.AdvanceRequest, _: Incoming) -> pb.AdvanceReply:
        order = from_message(OrderId, request)
        return to_message(pb.AdvanceReply, self._node.advance(from_message(Advance, request), order))

    @answers(calls.STATE)
    def _state(self, request: pb.StateRequest, incoming: Incoming) -> None:
        part, order = from_message(CopiedTensor, request), from_message(OrderId, request)
        self._node.take_state(request.term, part, incoming, order)

    @answers(calls.SUM)
    def _sum(self, request: pb.SumRequest, incoming: Incoming) -> None:
        key = sum_key(**fields(request, "term", "bucket", "version", "attempt"))
        self._node.take_sum(key, request.present, incoming)

    @answers(calls.ROWS)
    def _rows(self, request: pb.RowsRequest, incoming: Incoming) -> None:
        self._node.take_rows(request, incoming, from_message(OrderId, request))

    @answers(calls.HELD)
    def _held(self, request: pb.HeldRequest, _: Incoming) -> pb.HeldReply:
        orders = self._node.held(request.term)
        return pb.HeldReply(orders=[to_message(pb.AdvanceRequest, order) for order in orders])


def answer_of(shard: Shard, pulled: Pulled) -> tuple[pb.PullReply, memoryview]:
    """The answer for a pulled bucket of `shard`, and its body."""
    packed = pulled.delta.packed if pulled.delta is not None else None
    if packed is not None:
        packed = packed._replace(codec=packed.codec or shard.codecs.deltas)
    if not (packed or pulled.unchanged or pulled.stands):
        version = pulled.version, pulled.draft
        bucket = shard.bucket(pulled.bucket)
        packed = shard.encoder.encode(bucket, pulled.data, version, copied=pulled.copied)
    run = None if packed is None else to_message(pb.Run, packed)
    delta = None if pulled.delta is None else pulled.delta.version
    reply = to_message(pb.PullReply, pulled, encoded=run, delta=delta)
    return reply, pulled.data if packed is None else packed.body[0]


def _frame(message: pb.PullReply | pb.OptimizerStateReply) -> Frame:
    return Frame(message.SerializeToString(), last=True)
