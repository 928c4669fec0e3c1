"""The table of calls: the messages of each, and who may make it to whom. Both ends use it.

`messages.proto` says what is in the messages. `server.calls.service` enforces the table for all handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, Flag, auto
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from elastic_ps.errors import Malformed
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame, Incoming, unary

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
S = TypeVar("S")


class By(Flag):
    """The roles that may make a call, if certificates identify the caller."""

    WORKER = auto()
    EVALUATOR = auto()
    OPERATOR = auto()
    SHARD_ZERO = auto()
    LEADER = auto()
    """The shard whose standby is called."""


class At(Flag):
    """The processes that answer a call. A process answers only the calls that it needs to."""

    SHARD_ZERO = auto()
    OTHER = auto()
    """The other shards."""
    STANDBY = auto()
    """The standby of any shard."""


class Sender(Enum):
    """How a request names its sender, which is checked before the request is handled."""

    JOB = auto()
    """The name of the job, in `job`."""
    WORKER = auto()
    """A worker of the job, in `caller`. It need not be a member."""
    MEMBER = auto()
    """A worker of the job, in `caller`, which has joined in the present term."""


TIMEOUT = timedelta(seconds=60)
"""The usual time limit of an attempt, without the bodies."""

SLOWEST = 1 << 20
"""Bytes a second: the lowest rate that the time limits of workers assume for a body."""


def allowing(timeout: timedelta, nbytes: int, rate: int = SLOWEST) -> timedelta:
    """A time limit that allows for bodies of `nbytes` in all, at `rate` bytes a second."""
    return timeout + timedelta(seconds=nbytes / rate)


@dataclass(frozen=True)
class Call(Generic[Q, A]):
    """One call. Its name is the one of its request, without "Request".

    Attributes:
        reply: the message of each answer. With `pending` set, it asks for a repetition of the call.
        by, at, sender: see `By`, `At` and `Sender`.
        describes: whether the request describes a model or a job, whose size is unknown beforehand.
        numbered: whether the call changes what a worker holds, or the job's state. `Caller.call` counts such
            calls.
        timeout: the time limit of a worker's attempt, without the bodies; see `allowing`. Servers answer
            blocked calls sooner, so only a lost answer takes this long.
    """

    request: type[Q]
    reply: type[A]
    by: By
    at: At
    sender: Sender = Sender.MEMBER
    describes: bool = False
    numbered: bool = False
    timeout: timedelta = TIMEOUT

    @property
    def name(self) -> str:
        return self.request.__name__.removesuffix("Request")

    def parse(self, header: bytes) -> Q:
        """Read a request. Raises Malformed if `header` is not such a request."""
        try:
            return self.request.FromString(header)
        except DecodeError as error:
            raise Malformed(f"not a {self.request.__name__}: {error}") from error


WHOLE_SHARD_TIMEOUT = timedelta(minutes=30)
"""The time limit of a call that a shard answers with all it has. A lost host is noticed much sooner."""

_SHARDS = At.SHARD_ZERO | At.OTHER
_ORDERED = At.OTHER | At.STANDBY
_SHARD_OF = By.SHARD_ZERO | By.LEADER

CONFIGURE = Call(pb.ConfigureRequest, pb.Done, _SHARD_OF, _ORDERED, Sender.JOB, describes=True)
ADVANCE = Call(pb.AdvanceRequest, pb.AdvanceReply, _SHARD_OF, _ORDERED, Sender.JOB, describes=True)
STATE = Call(pb.StateRequest, pb.Done, By.LEADER, At.STANDBY, Sender.JOB)
SUM = Call(pb.SumRequest, pb.Done, By.LEADER, At.STANDBY, Sender.JOB)
ROWS = Call(pb.RowsRequest, pb.Done, By.LEADER, At.STANDBY, Sender.JOB)
HELD = Call(pb.HeldRequest, pb.HeldReply, By.SHARD_ZERO, At.STANDBY, Sender.JOB)

INIT = Call(pb.InitRequest, pb.Done, By.WORKER, _SHARDS)
INIT_STATE = Call(pb.InitStateRequest, pb.Done, By.WORKER, _SHARDS)
PUSH = Call(pb.PushRequest, pb.Done, By.WORKER, _SHARDS)
PULL = Call(pb.PullRequest, pb.PullReply, By.WORKER, _SHARDS)
OPTIMIZER_STATE = Call(
    pb.OptimizerStateRequest,
    pb.OptimizerStateReply,
    By.WORKER,
    _SHARDS,
    Sender.WORKER,
    timeout=WHOLE_SHARD_TIMEOUT,
)

JOIN = Call(pb.JoinRequest, pb.JoinReply, By.WORKER, At.SHARD_ZERO, Sender.WORKER, describes=True)
PROBE = Call(pb.ProbeRequest, pb.Done, By.WORKER, At.SHARD_ZERO, Sender.WORKER)
INIT_DONE = Call(pb.InitDoneRequest, pb.Done, By.WORKER, At.SHARD_ZERO)
TAKE = Call(pb.TakeRequest, pb.TakeReply, By.WORKER, At.SHARD_ZERO, numbered=True)
RELEASE = Call(pb.ReleaseRequest, pb.Done, By.WORKER, At.SHARD_ZERO, numbered=True)
STOP = Call(pb.StopRequest, pb.Done, By.WORKER, At.SHARD_ZERO)
CHIEF = Call(pb.ChiefRequest, pb.ChiefReply, By.WORKER, At.SHARD_ZERO)
READ_STATE = Call(pb.ReadStateRequest, pb.ReadStateReply, By.WORKER, At.SHARD_ZERO, Sender.WORKER)
WRITE_STATE = Call(pb.WriteStateRequest, pb.Done, By.WORKER, At.SHARD_ZERO, numbered=True)
BEGIN = Call(pb.BeginRequest, pb.BeginReply, By.WORKER, At.SHARD_ZERO)
AWAIT = Call(pb.AwaitRequest, pb.AwaitReply, By.WORKER, At.SHARD_ZERO)
ASSIGN = Call(pb.AssignRequest, pb.AssignReply, By.WORKER, At.SHARD_ZERO)
FINISH = Call(pb.FinishRequest, pb.Done, By.WORKER, At.SHARD_ZERO)
MEET = Call(pb.MeetRequest, pb.MeetReply, By.WORKER, At.SHARD_ZERO)
HEARTBEAT = Call(pb.HeartbeatRequest, pb.Done, By.WORKER, At.SHARD_ZERO)
LEAVE = Call(pb.LeaveRequest, pb.Done, By.WORKER, At.SHARD_ZERO, numbered=True)
REPORT = Call(pb.ReportRequest, pb.Done, By.WORKER, At.SHARD_ZERO, Sender.WORKER)
GONE = Call(pb.GoneRequest, pb.Done, By.WORKER | By.OPERATOR, At.SHARD_ZERO, Sender.JOB)

DECLARE_TENSOR = Call(pb.DeclareTensorRequest, pb.DeclareTensorReply, By.WORKER, _SHARDS, Sender.WORKER)
PUT_TENSOR = Call(pb.PutTensorRequest, pb.PutTensorReply, By.WORKER, _SHARDS, Sender.WORKER)
PUSH_TENSOR = Call(pb.PushTensorRequest, pb.Done, By.WORKER, _SHARDS, Sender.WORKER)
PULL_TENSOR = Call(
    pb.PullTensorRequest, pb.PullTensorReply, By.WORKER, _SHARDS, Sender.WORKER, timeout=WHOLE_SHARD_TIMEOUT
)
FREE_TENSOR = Call(pb.FreeTensorRequest, pb.Done, By.WORKER, _SHARDS, Sender.WORKER)

LOOKUP = Call(pb.LookupRequest, pb.LookupReply, By.WORKER, _SHARDS, Sender.WORKER)
PUSH_ROWS = Call(pb.PushRowsRequest, pb.Done, By.WORKER, _SHARDS)

EVALUATE = Call(pb.EvaluateRequest, pb.EvaluateReply, By.EVALUATOR, At.SHARD_ZERO, Sender.JOB)
READ_FILE = Call(pb.ReadFileRequest, pb.Done, By.EVALUATOR, At.SHARD_ZERO, Sender.JOB)

CALLS: Mapping[str, Call[Any, Any]] = {
    each.name: each for each in tuple(globals().values()) if isinstance(each, Call)
}
"""All calls, by name."""


def ask(connection: Connection, call: Call[Q, A], request: Q, *, timeout: timedelta) -> A:
    """Make a call without bodies that has one answer. Blocks. Raises like `Connection.call`."""
    return call.reply.FromString(unary(connection, call.name, request.SerializeToString(), timeout=timeout))


Answer: TypeAlias = A | Iterator[Frame] | None
"""A handler's result: the answer, several answers, None (done), or `pending` (nothing was done)."""


def answers(
    call: Call[Q, A],
) -> Callable[[Callable[[S, Q, Incoming], Answer[A]]], Callable[[S, Q, Incoming], Answer[A]]]:
    """Mark a method as the handler of a call. It may block."""

    def mark(handler: Callable[[S, Q, Incoming], Answer[A]]) -> Callable[[S, Q, Incoming], Answer[A]]:
        vars(handler)["answers"] = call
        return handler

    return mark
