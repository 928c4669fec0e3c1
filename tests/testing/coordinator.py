"""Shard 0's lead with shards that only take notes, and what workers ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import Times, TrainingJobSpec
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.ledger import Range
from elastic_ps.core.membership import Stay
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.sizing import Link
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.checkpointer import Checkpointer
from elastic_ps.server.lead import Lead
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.members import MemberCalls
from elastic_ps.server.node import Node
from elastic_ps.server.orders import Advance, Configuration, Report
from elastic_ps.server.service import Callers
from elastic_ps.server.steps import StepCalls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.calls import A, Q
from elastic_ps.transport.convert import ranges_from_message, ranges_to_message, tensors_to_message
from tests.testing.shard import Body

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
SETTINGS = Settings(({"lr": 0.1},))

SOON = ServerLimits(answer=timedelta(milliseconds=50))
"""A call that is to be asked again says so soon."""


class Notes:
    """A `ShardControl` that does what it is told by noting it down, unless `refuse` raises."""

    def __init__(self) -> None:
        self.orders: list[Advance] = []
        self.refuse: Callable[[Advance], None] = lambda _: None

    def configure(self, configuration: Configuration) -> None:
        pass

    def advance(self, advance: Advance) -> Report:
        self.orders.append(advance)
        self.refuse(advance)
        return Report()

    @property
    def applied(self) -> list[int]:
        return [order.version for order in self.orders if order.apply is not None and not order.prepare]


def unwritten(term: int = 1) -> Checkpointer:
    """Of a job that writes no checkpoints."""
    return Checkpointer(None, job="job", term=term, shards=1, times=Times())


class Asked:
    """What workers ask of shard 0, with the fields of their requests as keywords.

    Args:
        node: of the lead's process. It has none of the model unless the caller sees to that.
    """

    def __init__(self, lead: Lead, node: Node) -> None:
        self.job = lead.job
        callers = Callers("job", node, lead.job)
        self._members = MemberCalls(callers, lead, lambda: node.shard)
        self._steps = StepCalls(callers, lead)

    def _told(self, kind: type[A], handler: Callable[[Q, Incoming], object], request: Q) -> A:
        answer = self._asked(kind, handler, request)
        assert answer is not None
        return answer

    def _asked(self, kind: type[A], handler: Callable[[Q, Incoming], object], request: Q) -> A | None:
        answer = handler(request, NOTHING)
        assert answer is None or isinstance(answer, kind)
        return answer

    def _caller(self, worker: int, incarnation: int, call: int = 0) -> pb.Caller:
        return pb.Caller(job="job", term=self.job.term, worker=worker, incarnation=incarnation, call=call)

    def join(
        self,
        worker: int,
        *,
        tensors: Sequence[TensorSpec],
        optimizer: str,
        settings: Settings,
        call: int = 0,
        follows: int = 0,
        link: Link | None = None,
        **fields: Any,
    ) -> pb.JoinReply:
        request = pb.JoinRequest(
            caller=self._caller(worker, follows, call),
            tensors=tensors_to_message(tensors),
            optimizer=pb.Optimizer(name=optimizer, groups=settings.to_json()),
            link=pb.Link(rate=link.rate, seconds=link.seconds) if link is not None else None,
            **fields,
        )
        return self._told(pb.JoinReply, self._members.join, request)

    def initialised(self, worker: int, incarnation: int) -> None:
        self._members.init_done(pb.InitDoneRequest(caller=self._caller(worker, incarnation)), NOTHING)

    def heartbeat(self, worker: int, incarnation: int) -> None:
        self._members.heartbeat(pb.HeartbeatRequest(caller=self._caller(worker, incarnation)), NOTHING)

    def computes_on(self, worker: int, incarnation: int, *, version: int) -> None:
        request = pb.HeartbeatRequest(caller=self._caller(worker, incarnation), version=version)
        self._members.heartbeat(request, NOTHING)

    def leave(self, worker: int, incarnation: int, *, call: int) -> None:
        self._members.leave(pb.LeaveRequest(caller=self._caller(worker, incarnation, call)), NOTHING)

    def gone(self, worker: int, instance: str) -> None:
        self._members.gone(pb.GoneRequest(job="job", worker=worker, instance=instance), NOTHING)

    def is_chief(self, worker: int, incarnation: int, **fields: Any) -> bool:
        request = pb.ChiefRequest(caller=self._caller(worker, incarnation), **fields)
        return self._told(pb.ChiefReply, self._members.chief, request).chief

    def read_state(self) -> str:
        return self._told(pb.ReadStateReply, self._members.read_state, pb.ReadStateRequest()).text

    def write_state(
        self, worker: int, incarnation: int, text: str, *, call: int, again: bool = False
    ) -> None:
        caller = self._caller(worker, incarnation, call)
        self._members.write_state(pb.WriteStateRequest(caller=caller, text=text, again=again), NOTHING)

    def stop(self, worker: int, incarnation: int, reason: str) -> None:
        self._members.stop(pb.StopRequest(caller=self._caller(worker, incarnation), reason=reason), NOTHING)

    def take(
        self, worker: int, incarnation: int, *, call: int, skipped: Sequence[Range] = (), **fields: Any
    ) -> pb.TakeReply:
        caller, ranges = self._caller(worker, incarnation, call), ranges_to_message(skipped)
        request = pb.TakeRequest(caller=caller, skipped=ranges, **fields)
        return self._told(pb.TakeReply, self._steps.take, request)

    def release(
        self, worker: int, incarnation: int, *, call: int, skipped: Sequence[Range] = (), **fields: Any
    ) -> None:
        caller, ranges = self._caller(worker, incarnation, call), ranges_to_message(skipped)
        self._steps.release(pb.ReleaseRequest(caller=caller, skipped=ranges, **fields), NOTHING)

    def begin(self, worker: int, incarnation: int, **fields: Any) -> pb.BeginReply | None:
        request = pb.BeginRequest(caller=self._caller(worker, incarnation), **fields)
        return self._asked(pb.BeginReply, self._steps.begin, request)

    def await_version(self, worker: int, incarnation: int, **fields: Any) -> pb.AwaitReply | None:
        request = pb.AwaitRequest(caller=self._caller(worker, incarnation), **fields)
        return self._asked(pb.AwaitReply, self._steps.await_version, request)

    def assign(self, worker: int, incarnation: int, *, version: int) -> pb.AssignReply | None:
        request = pb.AssignRequest(caller=self._caller(worker, incarnation), version=version)
        return self._asked(pb.AssignReply, self._steps.assign, request)

    def finish(self, step: Contribution, *, version: int, attempt: int) -> bool:
        request = pb.FinishRequest(
            caller=self._caller(step.worker, step.incarnation),
            version=version,
            attempt=attempt,
            ranges=ranges_to_message(step.records),
            skipped=ranges_to_message(step.skipped),
            metrics=step.metrics,
            reductions=step.reductions,
            step=step.step,
            samples=step.samples,
            settings=step.settings,
            assigns=step.assigns,
        )
        return not self._told(pb.Done, self._steps.finish, request).duplicate

    def is_applied(self, worker: int, incarnation: int, step: int) -> bool:
        return self._steps.is_applied(pb.PushRequest(caller=self._caller(worker, incarnation), step=step))


NOTHING = Body(torch.empty(0))
"""The body of a call that has none."""


class AskedLead(Lead):
    """A lead whose shards need not be of this process, and what is asked of it."""

    @cached_property
    def coordinator(self) -> Asked:
        return Asked(self, self._node)

    @cached_property
    def _node(self) -> Node:
        return Node(0, 1, store=None, consistency=Consistency(), trace=Trace(None, ""))

    def close(self, *, keep: bool) -> None:
        super().close(keep=keep)
        self._node.close()


@contextmanager
def running(shards: Sequence[Notes], *, limits: ServerLimits = USUAL, **fields: Any) -> Iterator[Asked]:
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", **fields})
    nothing = History(None, "")
    lead = AskedLead("job", spec, 1, shards, checkpoints=unwritten(), history=nothing, limits=limits)
    lead.start(None)
    try:
        yield lead.coordinator
    finally:
        for shard in shards:
            shard.refuse = lambda _: None
        lead.close(keep=False)


def join(
    coordinator: Asked,
    worker: int,
    *,
    settings: Settings = SETTINGS,
    **more: Any,
) -> pb.JoinReply:
    fields: dict[str, Any] = {"pid": worker, "host": "here", "tensors": TENSORS, "optimizer": "SGD"}
    return coordinator.join(worker, settings=settings, **fields, **more)


def start(coordinator: Asked, worker: int = 0, **more: Any) -> Stay:
    """A worker joins, and brings the model if there is none."""
    joined = join(coordinator, worker, **more)
    assert not joined.pending
    if joined.initialise:
        coordinator.initialised(worker, joined.incarnation)
    return coordinator.job.state.members.live[worker]


def take(coordinator: Asked, stay: Stay, *, call: int, wait: bool = True, **more: Any) -> pb.TakeReply:
    fields = {"records": 100, "epochs": 1, "batch": 10, **more}
    return coordinator.take(stay.worker, stay.incarnation, call=call, wait=wait, **fields)


def finish(
    coordinator: Asked, stay: Stay, taken: pb.TakeReply, *, step: int = 0, settings: Settings = SETTINGS
) -> bool:
    contribution = Contribution(
        worker=stay.worker,
        incarnation=stay.incarnation,
        step=step,
        samples=10,
        records=ranges_from_message(taken.ranges),
        settings=settings.to_json(),
    )
    attempt = coordinator.job.state.rounds.attempt
    return coordinator.finish(contribution, version=taken.version, attempt=attempt)


def at_version(taken: pb.TakeReply, version: int) -> pb.TakeReply:
    """The same records, to compute on at another version."""
    changed = pb.TakeReply()
    changed.CopyFrom(taken)
    changed.version = version
    return changed


def waits(joined: pb.JoinReply) -> bool:
    """Whether the worker has nothing to do but to ask again."""
    return joined.pending and not joined.measure
