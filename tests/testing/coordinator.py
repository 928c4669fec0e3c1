"""Shard 0 with shards that only take notes, and what workers ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.ledger import Range
from elastic_ps.core.membership import Member
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.sizing import Link
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.calls.steps import StepCalls
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.job.reconfiguration import DesiredConfiguration
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Report, ShardControl
from elastic_ps.server.process import service_of
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.calls import A, Call, Q
from elastic_ps.transport.convert import ranges_from_message, ranges_to_message, tensors_to_message
from tests.testing.polling import eventually
from tests.testing.shard import Body

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
SETTINGS = Settings(({"lr": 0.1},))

SOON = ServerLimits(answer=timedelta(milliseconds=50))
"""A call that is to be asked again says so soon."""


class Notes:
    """A `ShardControl` that does what it is told by noting it down, unless `refuse` or `lay_out` raises."""

    def __init__(self) -> None:
        self.orders: list[Advance] = []
        self.refuse: Callable[[Advance], None] = lambda _: None
        self.lay_out: Callable[[], None] = lambda: None

    def configure(self, configuration: Configuration) -> None:
        self.lay_out()

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
        node: of shard 0's process. It has none of the model unless the caller sees to that.
    """

    def __init__(self, zero: ShardZero, node: Node) -> None:
        self.job = zero.job
        self._methods = service_of("job", node, zero).methods
        self._steps = StepCalls(zero)

    def _ask(
        self, call: Call[Q, A], worker: int, incarnation: int = 0, number: int = 0, **fields: Any
    ) -> A | None:
        """The answer; None: there is nothing to say."""
        caller = pb.Caller(job="job", term=self.job.term, worker=worker, incarnation=incarnation, call=number)
        _, handler = self._methods[call.name]
        answer = handler(call.request(caller=caller, **fields), NOTHING)
        assert answer is None or isinstance(answer, call.reply)
        return answer

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
        if link is not None:
            fields["link"] = pb.Link(rate=link.rate, seconds=link.seconds)
        fields["optimizer"] = pb.Optimizer(name=optimizer, groups=settings.to_json())
        reply = self._ask(calls.JOIN, worker, follows, call, tensors=tensors_to_message(tensors), **fields)
        assert reply is not None
        return reply

    def initialised(self, worker: int, incarnation: int) -> None:
        self._ask(calls.INIT_DONE, worker, incarnation)

    def heartbeat(self, worker: int, incarnation: int) -> None:
        self._ask(calls.HEARTBEAT, worker, incarnation)

    def computes_on(self, worker: int, incarnation: int, *, version: int) -> None:
        self._ask(calls.HEARTBEAT, worker, incarnation, version=version)

    def leave(self, worker: int, incarnation: int, *, call: int) -> None:
        self._ask(calls.LEAVE, worker, incarnation, call)

    def gone(self, worker: int, instance: str) -> None:
        _, handler = self._methods[calls.GONE.name]
        handler(pb.GoneRequest(job="job", worker=worker, instance=instance), NOTHING)

    def is_chief(self, worker: int, incarnation: int, **fields: Any) -> bool:
        reply = self._ask(calls.CHIEF, worker, incarnation, **fields)
        return reply is not None and reply.chief

    def read_state(self) -> str:
        reply = self._ask(calls.READ_STATE, 0)
        assert reply is not None
        return reply.text

    def write_state(self, worker: int, incarnation: int, text: str, *, call: int, **fields: Any) -> None:
        self._ask(calls.WRITE_STATE, worker, incarnation, call, text=text, **fields)

    def stop(self, worker: int, incarnation: int, reason: str) -> None:
        self._ask(calls.STOP, worker, incarnation, reason=reason)

    def take(
        self, worker: int, incarnation: int, *, call: int, skipped: Sequence[Range] = (), **fields: Any
    ) -> pb.TakeReply:
        skips = ranges_to_message(skipped)
        reply = self._ask(calls.TAKE, worker, incarnation, call, skipped=skips, **fields)
        assert reply is not None
        return reply

    def release(self, worker: int, incarnation: int, *, call: int, **fields: Any) -> None:
        self._ask(calls.RELEASE, worker, incarnation, call, **fields)

    def begin(self, worker: int, incarnation: int, **fields: Any) -> pb.BeginReply | None:
        return self._ask(calls.BEGIN, worker, incarnation, **fields)

    def await_version(self, worker: int, incarnation: int, **fields: Any) -> pb.AwaitReply | None:
        return self._ask(calls.AWAIT, worker, incarnation, **fields)

    def assign(self, worker: int, incarnation: int, *, version: int) -> pb.AssignReply | None:
        return self._ask(calls.ASSIGN, worker, incarnation, version=version)

    def finish(self, step: Contribution, *, version: int, attempt: int) -> bool:
        said = ("step", "samples", "settings", "metrics", "reductions", "assigns")
        reply = self._ask(
            calls.FINISH,
            step.worker,
            step.incarnation,
            version=version,
            attempt=attempt,
            ranges=ranges_to_message(step.records),
            skipped=ranges_to_message(step.skipped),
            **{name: getattr(step, name) for name in said},
        )
        return reply is not None and not reply.duplicate

    def is_applied(self, worker: int, incarnation: int, step: int) -> bool:
        caller = pb.Caller(worker=worker, incarnation=incarnation)
        return self._steps.is_applied(pb.PushRequest(caller=caller, step=step))


NOTHING = Body(torch.empty(0))
"""The body of a call that has none."""


class AskedShardZero(ShardZero):
    """Shard 0 whose shards need not be of this process, and what is asked of it.

    Args:
        orders: the class of what gives the orders.
    """

    def __init__(
        self,
        name: str,
        spec: TrainingJobSpec,
        term: int,
        shards: Sequence[ShardControl],
        *,
        checkpoints: Checkpointer,
        crowded: bool = False,
        desired: DesiredConfiguration | None = None,
        orders: type[CommitCoordinator] = CommitCoordinator,
        **job: Any,
    ) -> None:
        guarded, nothing = Guarded(spec, term, **job), History(None, "")
        commit = orders(guarded, shards, checkpoints=checkpoints, history=nothing, crowded=crowded)
        super().__init__(name, commit, desired=desired)

    @cached_property
    def coordinator(self) -> Asked:
        return Asked(self, self._node)

    @cached_property
    def _node(self) -> Node:
        return Node(0, 1, store=None, trace=Trace(None, ""))

    def close(self, *, keep: bool) -> None:
        super().close(keep=keep)
        self._node.close()


@contextmanager
def running(
    shards: Sequence[Notes],
    *,
    limits: ServerLimits = USUAL,
    orders: type[CommitCoordinator] = CommitCoordinator,
    **fields: Any,
) -> Iterator[Asked]:
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", **fields})
    zero = AskedShardZero("job", spec, 1, shards, checkpoints=unwritten(), limits=limits, orders=orders)
    zero.start(None)
    try:
        yield zero.coordinator
    finally:
        for shard in shards:
            shard.refuse = lambda _: None
        zero.close(keep=False)


def join(
    coordinator: Asked,
    worker: int,
    *,
    settings: Settings = SETTINGS,
    **more: Any,
) -> pb.JoinReply:
    fields: dict[str, Any] = {"pid": worker, "host": "here", "tensors": TENSORS, "optimizer": "SGD"}
    return coordinator.join(worker, settings=settings, **fields, **more)


def start(coordinator: Asked, worker: int = 0, **more: Any) -> Member:
    """A worker joins, and brings the model if there is none."""
    joined = join(coordinator, worker, **more)
    assert not joined.pending
    if joined.initialise:

        def brought() -> bool:  # as a worker does it
            try:
                coordinator.initialised(worker, joined.incarnation)
            except Refused as refusal:
                if refusal.code is not RefusalCode.NOT_READY:
                    raise
                return False
            return True

        eventually(brought, "the model is there")
    return coordinator.job.state.members.live[worker]


def take(coordinator: Asked, member: Member, *, call: int, wait: bool = True, **more: Any) -> pb.TakeReply:
    fields = {"records": 100, "epochs": 1, "batch": 10, **more}
    return coordinator.take(member.worker, member.incarnation, call=call, wait=wait, **fields)


def finish(
    coordinator: Asked, member: Member, taken: pb.TakeReply, *, step: int = 0, settings: Settings = SETTINGS
) -> bool:
    contribution = Contribution(
        worker=member.worker,
        incarnation=member.incarnation,
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
