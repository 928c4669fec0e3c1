"""What shard 0 answers about the job: to `Coordinator` and `Meeting`, and back. Nothing is decided here."""

from __future__ import annotations

import math
from typing import Any

from elastic_ps.codec.auto import CANDIDATES
from elastic_ps.core import script_state
from elastic_ps.core.consistency import After, Contribution
from elastic_ps.core.reduced import Peer, Place
from elastic_ps.core.sizing import Link
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.server.coordinator import Coordinator, NotYet
from elastic_ps.server.dispatch import Callers, refuse_to_end, require_permitted
from elastic_ps.server.guarded import Guarded
from elastic_ps.server.meeting import Meeting
from elastic_ps.server.node import Node
from elastic_ps.server.orders import settings_from_message
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.calls import answers
from elastic_ps.transport.convert import (
    fields,
    layout_to_message,
    ranges_from_message,
    ranges_to_message,
    tensors_from_message,
    to_message,
)

PROBE = 4 * 1024 * 1024
"""Bytes of the body of a Probe, at most."""


def _who(request: Any) -> tuple[int, int]:
    """The worker that calls, and its incarnation."""
    return request.caller.worker, request.caller.incarnation


def _link(request: pb.JoinRequest) -> Link | None:
    """What the worker has found of its network, if it has. Raises Malformed."""
    if not request.HasField("link"):
        return None
    link = Link(request.link.rate, request.link.seconds)
    if not all(math.isfinite(each) and each >= 0 for each in link):
        raise Malformed(f"Join: no network is like {link}")
    return link


class LeadService:
    """Answers for a `Service`.

    Attributes:
        job: its state.
    """

    def __init__(
        self, callers: Callers, node: Node, coordinator: Coordinator, meeting: Meeting | None
    ) -> None:
        self._callers, self._node, self._members, self._meeting = callers, node, coordinator, meeting
        self._join_header, self._model_known = 0, False
        self._waste = bytearray()  # what a Probe brings goes here, also of several at the same time

    @property
    def job(self) -> Guarded:
        return self._members.job

    @property
    def model_header(self) -> int | None:
        """The longest header of a Join so far; None as long as any model may still come."""
        return self._join_header if self._model_known else None

    @property
    def _together(self) -> Meeting:
        if self._meeting is None:
            raise Refused(RefusalCode.INVALID, "workers meet only in a job with strategy all-reduce")
        return self._meeting

    # --- members

    @answers(calls.JOIN)
    def _join(self, request: pb.JoinRequest, incoming: Incoming) -> pb.JoinReply:
        caller, link = request.caller, _link(request)
        joined = self._members.join(
            caller.worker,
            **fields(request, "pid", "host", "again", "instance", "measures"),
            tensors=tensors_from_message(request.tensors),
            optimizer=request.optimizer.name,
            settings=settings_from_message(request.optimizer.groups),
            transport=incoming.transport,
            call=caller.call,
            follows=caller.incarnation,
            peer=Peer(request.address, request.torch),
            link=link,
        )
        if isinstance(joined, NotYet):
            return pb.JoinReply(pending=True, measure=joined is NotYet.MEASURE)
        self._join_header = max(self._join_header, len(incoming.header))
        self._model_known |= not joined.initialise
        return to_message(
            pb.JoinReply,
            joined,
            incarnation=joined.stay.incarnation,
            layout=layout_to_message(joined.layout),
            lease_ms=round(self.job.lease.total_seconds() * 1000),
            settings=joined.settings.to_json(),
            tuning=joined.tuning.to_json(),
        )

    @answers(calls.PROBE)
    def _probe(self, _: pb.ProbeRequest, incoming: Incoming) -> None:
        if incoming.size > PROBE:
            raise Malformed(f"Probe: a body of {incoming.size} bytes; the limit is {PROBE}")
        if incoming.size:
            self._waste = self._waste or bytearray(PROBE)
            incoming.read_into(memoryview(self._waste)[: incoming.size])

    @answers(calls.INIT_DONE)
    def _init_done(self, request: pb.InitDoneRequest, _: Incoming) -> None:
        if request.HasField("version"):
            self._node.shard.require_values(request.version)
            self._together.sent(*_who(request), version=request.version)
        else:
            self._members.initialised(*_who(request))
        self._model_known = True

    @answers(calls.HEARTBEAT)
    def _heartbeat(self, request: pb.HeartbeatRequest, _: Incoming) -> None:
        self._members.heartbeat(*_who(request))
        if request.HasField("version"):
            self._members.computes_on(*_who(request), version=request.version)

    @answers(calls.LEAVE)
    def _leave(self, request: pb.LeaveRequest, _: Incoming) -> None:
        self._members.leave(*_who(request), call=request.caller.call)

    @answers(calls.GONE)
    def _gone(self, request: pb.GoneRequest, incoming: Incoming) -> None:
        require_permitted(refuse_to_end(incoming.peer, request.worker))
        self._members.gone(request.worker, request.instance)

    # --- records, and what scripts say

    @answers(calls.TAKE)
    def _take(self, request: pb.TakeRequest, _: Incoming) -> pb.TakeReply:
        if not (request.records and request.epochs and request.batch):
            raise Refused(RefusalCode.MALFORMED, "records, epochs and batch must be at least 1")
        taken = self._members.take(
            *_who(request),
            call=request.caller.call,
            skipped=ranges_from_message(request.skipped),
            **fields(request, "records", "epochs", "batch", "wait", "abandoned", "early", "data", "epoch"),
        )
        ranges = ranges_to_message(taken.ranges)
        return to_message(pb.TakeReply, taken, ranges=ranges, stopped=self.job.stopped)

    @answers(calls.RELEASE)
    def _release(self, request: pb.ReleaseRequest, _: Incoming) -> None:
        self._members.release(
            *_who(request),
            call=request.caller.call,
            skipped=ranges_from_message(request.skipped),
            **fields(request, "abandoned", "leaves"),
        )

    @answers(calls.STOP)
    def _stop(self, request: pb.StopRequest, _: Incoming) -> None:
        if not request.reason:
            raise Refused(RefusalCode.MALFORMED, "the reason for stopping the job must not be empty")
        self._members.stop(*_who(request), request.reason)

    @answers(calls.CHIEF)
    def _chief(self, request: pb.ChiefRequest, _: Incoming) -> pb.ChiefReply:
        said = fields(request, "epoch", "passes")
        return pb.ChiefReply(chief=self._members.is_chief(*_who(request), **said))

    @answers(calls.READ_STATE)
    def _read_state(self, _: pb.ReadStateRequest, __: Incoming) -> pb.ReadStateReply:
        return pb.ReadStateReply(text=self._members.read_state())

    @answers(calls.WRITE_STATE)
    def _write_state(self, request: pb.WriteStateRequest, _: Incoming) -> None:
        try:
            script_state.from_text(request.text)
        except ValueError as error:
            raise Malformed(f"WriteState: {error}") from error
        self._members.write_state(*_who(request), request.text, call=request.caller.call, again=request.again)

    @answers(calls.REPORT)
    def _report(self, request: pb.ReportRequest, incoming: Incoming) -> None:
        if request.caller.incarnation:
            self._callers.require_present(request.caller, incoming)
        self._members.report(*_who(request), request.metrics)

    # --- steps

    @answers(calls.BEGIN)
    def _begin(self, request: pb.BeginRequest, _: Incoming) -> pb.BeginReply | None:
        begun = self._members.begin(*_who(request), **fields(request, "version", "step"))
        return None if begun is None else to_message(pb.BeginReply, begun)

    @answers(calls.AWAIT)
    def _await(self, request: pb.AwaitRequest, _: Incoming) -> pb.AwaitReply | None:
        answer = self._members.await_version(*_who(request), **fields(request, "attempt", "step"))
        if answer is None:
            return None
        after, attempt = answer
        if after is After.PULL:
            return pb.AwaitReply(made=True)
        if after is After.COMPUTE:
            return pb.AwaitReply(compute=True, stopped=self.job.stopped)
        return pb.AwaitReply(attempt=attempt)

    @answers(calls.ASSIGN)
    def _assign(self, request: pb.AssignRequest, _: Incoming) -> pb.AssignReply | None:
        answer = self._members.assign(*_who(request), version=request.version)
        return None if answer is None else to_message(pb.AssignReply, answer)

    @answers(calls.FINISH)
    def _finish(self, request: pb.FinishRequest, incoming: Incoming) -> pb.Done:
        return pb.Done(duplicate=not self.finished(request, incoming))

    def finished(self, request: pb.FinishRequest, incoming: Incoming) -> bool:
        """A step has ended, also if it is said in another call. Returns False if that was known."""
        self._callers.require_present(request.caller, incoming)
        if request.settings:
            settings_from_message(request.settings)
        contribution = Contribution(
            **fields(request.caller, "worker", "incarnation"),
            **fields(request, "step", "samples", "settings", "assigns"),
            records=ranges_from_message(request.ranges),
            metrics=dict(request.metrics),
            reductions=dict(request.reductions),
            skipped=ranges_from_message(request.skipped),
        )
        told = request.traffic.ListFields()
        traffic: dict[str, Any] = {
            field.name: value for field, value in told if isinstance(value, str) or math.isfinite(value)
        }
        if traffic.get("codec", "") not in CANDIDATES:
            traffic.pop("codec", None)
        return self._members.finish(
            contribution, version=request.version, attempt=request.attempt, traffic=traffic
        )

    def is_applied(self, request: pb.PushRequest) -> bool:
        """Whether the step of this push is in the model."""
        return self._members.is_applied(*_who(request), request.step)

    @answers(calls.MEET)
    def _meet(self, request: pb.MeetRequest, incoming: Incoming) -> pb.MeetReply | None:
        if request.parts:
            return pb.MeetReply(send=self._together.parts(*_who(request), version=request.version))
        if request.HasField("finish"):
            try:
                self.finished(request.finish, incoming)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:  # the answer says which is open
                    raise
        try:
            place = Place(request.place) if request.HasField("place") else None
        except ValueError as error:
            raise Malformed(str(error)) from error
        said = fields(request, "version", "attempt", "holds", "broken")
        met = self._together.meet(*_who(request), place=place, **said)
        return (
            None
            if met is None
            else to_message(
                pb.MeetReply,
                met,
                group=[
                    pb.Peer(worker=worker, incarnation=incarnation, address=peer.address)
                    for worker, incarnation, peer in met.group
                ],
                settings=self.job.settings,
                stopped=self.job.stopped,
            )
        )
