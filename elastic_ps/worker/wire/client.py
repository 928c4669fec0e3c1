"""The calls that a worker makes, and how they are repeated when there is no answer.

Every call may be repeated. One that failed on the way is repeated for a while (`limits`), with growing
pauses. `Refused` is an answer and is raised.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from elastic_ps.codec import as_bytes, as_tensor, dtype_of
from elastic_ps.codec.base import Payload
from elastic_ps.codec.state import Stored
from elastic_ps.core.all_reduce import Barrier
from elastic_ps.core.partition import Bucket, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.sizing import NEAR
from elastic_ps.errors import (
    ConnectionLost,
    DeadlineExceeded,
    InvalidModel,
    ModelMismatch,
    RefusalCode,
    Refused,
)
from elastic_ps.process.retrying import Pauses
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Connection, Frame, Incoming
from elastic_ps.transport.calls import A, Call, Q, Sender
from elastic_ps.transport.convert import from_message, tensors_to_message, to_message
from elastic_ps.transport.measuring import measure
from elastic_ps.worker.wire.dialogue import USUAL, Answers, MemberId, Step, WorkerLimits
from elastic_ps.worker.wire.measuring import Traffic

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.02
"""Seconds between the first two attempts of a call; later pauses are longer."""

LONGEST_PAUSE_CALLING = 0.2
"""Seconds, while there is no answer. Short, so that a server that comes back is found soon."""

LONGEST_PAUSE = 1.0
"""Seconds, while the answer is "not yet": hundreds of workers may ask."""

PENDING = "pending"
"""A reply with this field set has waited in vain: the call is to be repeated."""

T = TypeVar("T")


def expelled(error: BaseException) -> bool:
    """Return True if this worker has to join again. A shard may also mean that it is not in the round."""
    codes = (RefusalCode.STALE_TERM, RefusalCode.STALE_INCARNATION)
    return isinstance(error, Refused) and error.code in codes


class Client:
    """A worker's connections to all shards. `join`, `take`, `release` and `leave` belong to one thread.

    Args:
        job, worker, connections, instance, trace, history: see `Session`.
        limits: for how long calls are repeated.
        pid: the process that the launcher has started, if that is another one.
        hostname: this host's name as the launcher knows it; by default its own.

    Attributes:
        address: where the other workers find this one with `strategy: all-reduce`; else "".
        member_id: the present incarnation, since the last `join`.
        traffic: the traffic of that incarnation, which the end of each step reports.
    """

    def __init__(
        self,
        job: str,
        worker: int,
        connections: Sequence[Connection],
        *,
        limits: WorkerLimits = USUAL,
        instance: str = "",
        pid: int | None = None,
        hostname: str = "",
        trace: Trace | None = None,
        history: History | None = None,
    ) -> None:
        self.trace, self.history = trace or Trace(None, ""), history or History(None, "")
        self._pid = os.getpid() if pid is None else pid
        self._hostname = hostname or socket.gethostname()
        self.worker, self.address = worker, ""
        self.member_id = MemberId(job, worker)
        self.traffic = Traffic()
        self.instance = instance or uuid.uuid4().hex
        self._calls = itertools.count(1)
        self._pending = 0  # the number of a Take that is to be asked again
        self.shards = len(connections)
        self._connections = connections
        self.limits, self._patience = limits, limits.patience
        self._asked_to_leave: float | None = None
        self._closed = threading.Event()
        self._noticed = 0.0
        self._link: pb.Link | None = None  # once it has been measured

    @property
    def term(self) -> int:
        """The parameter server's, when this worker joined."""
        return self.member_id.term

    def is_near(self, shard: int) -> bool:
        """Whether the shard is known to be on this host."""
        return self._connections[shard].near

    def close(self) -> None:
        """Cancel what is under way, also what waits to be repeated, and free the connections."""
        self._closed.set()
        for connection in self._connections:
            connection.close()

    # --- members

    def join(
        self, tensors: Sequence[TensorSpec], optimizer: str, settings: Settings, *, again: bool = False
    ) -> pb.JoinReply:
        """Become a member. Blocks while another worker initialises the model.

        Args:
            again: this process was a member before, and the model is not as it was at first any more.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job.
        """
        request = pb.JoinRequest(
            caller=self.member_id.caller(time.monotonic_ns()),  # a process may have several sessions
            pid=self._pid,
            host=self._hostname,
            tensors=tensors_to_message(tensors),
            optimizer=pb.Optimizer(name=optimizer, groups=settings.to_json()),
            again=again,
            instance=self.instance,
            address=self.address,
            torch=torch.__version__.partition("+")[0],
            measures=True,
            link=self._link,
        )
        while True:
            try:
                reply = self.ask(calls.JOIN, request)
            except Refused as refusal:
                if refusal.code is RefusalCode.MODEL_MISMATCH:
                    raise ModelMismatch(
                        f"this worker's model is not the one that the job trains: {refusal}. "
                        "Every worker must build the same model and optimizer"
                    ) from refusal
                if refusal.code is RefusalCode.INVALID:
                    raise InvalidModel(str(refusal)) from refusal
                raise
            if not reply.pending:
                break
            if reply.measure:
                self._link = pb.Link(**(NEAR if self.is_near(0) else measure(self._probe))._asdict())
                request.link.CopyFrom(self._link)
        self.member_id = MemberId(self.member_id.job, self.worker, reply.term, reply.incarnation)
        self._calls, self._pending = itertools.count(1), 0
        self.traffic.reset()
        return reply

    def _probe(self, body: memoryview) -> float:
        """Send shard 0 these bytes; returns how many seconds that took. Blocks."""
        frame = Frame(pb.ProbeRequest(caller=self.member_id.caller()).SerializeToString(), body)

        def attempt() -> float:
            started = time.monotonic()
            self._once(calls.PROBE, 0, frame, _reply)
            return time.monotonic() - started

        return self.retry(attempt)

    def initialise(self, bucket: Bucket, values: memoryview, *, version: int | None = None) -> None:
        """Send a bucket's first values, or those of `version`, which the workers have made.

        Raises Refused (STALE_TERM, STALE_INCARNATION).
        """
        request = pb.InitRequest(bucket=bucket.index, version=version)
        self.ask(calls.INIT, request, shard=bucket.shard, body=values)

    def initialise_state(
        self, bucket: Bucket, piece: int, state: Sequence[Stored], *, version: int | None = None
    ) -> None:
        """Send the optimizer's state of a piece, after the bucket's values. Raises as `initialise`."""
        request = pb.InitStateRequest(
            bucket=bucket.index,
            piece=piece,
            entries=[to_message(pb.InitStateRequest.Entry, each, dtype=each.dtype) for each in state],
            version=version,
        )
        body = b"".join(as_bytes(each.value.contiguous()) for each in state)
        self.ask(calls.INIT_STATE, request, shard=bucket.shard, body=memoryview(body))

    def initialised(self, version: int | None = None, *, repeatable: bool = False) -> None:
        """All first values were sent, or all of this version. `repeatable`: see `InitDoneRequest`."""
        self.ask(calls.INIT_DONE, pb.InitDoneRequest(version=version, repeatable=repeatable))

    def heartbeat(self, *, computes_on: int | None = None) -> None:
        """Raises Refused (STALE_INCARNATION) if this worker is gone. `computes_on`: see `PushPull`."""
        self.ask(calls.HEARTBEAT, pb.HeartbeatRequest(version=computes_on))

    def expect_to_leave(self) -> None:
        """This worker was asked to leave: from now on calls wait for an answer for `leaving` at most.

        May be called from a signal handler, and while calls are under way.
        """
        self._asked_to_leave = self._asked_to_leave or time.monotonic()

    def hasten(self) -> None:
        """This worker is about to end: from now on failing calls are repeated for `goodbye` only."""
        self._patience = self.limits.goodbye

    def leave(self, *, in_step: bool, failed: bool) -> None:
        """Say goodbye; what this worker holds goes to others. Tried for `goodbye` only.

        Args:
            in_step: a step has begun, which is void by that.
            failed: the script has failed: a chief has not done its work.
        """
        self.hasten()
        if failed and not in_step:
            self.ask(calls.RELEASE, pb.ReleaseRequest())  # so the round of the others goes on
        if failed or in_step:
            self.ask(
                calls.GONE, pb.GoneRequest(job=self.member_id.job, worker=self.worker, instance=self.instance)
            )
        else:
            self.ask(calls.LEAVE, pb.LeaveRequest())

    def take(self, request: pb.TakeRequest) -> pb.TakeReply:
        """Ask for records; with `wait` it blocks for some seconds at most, then the answer is `pending`.

        Raises InvalidModel: the data set is not the one that the job trains.
        """
        number = self._pending or next(self._calls)
        request.caller.CopyFrom(self.member_id.caller(number))
        try:
            reply = self.ask(calls.TAKE, request)
        except Refused as refusal:
            if refusal.code is RefusalCode.INVALID:
                raise InvalidModel(str(refusal)) from refusal
            raise
        self._pending = number if reply.pending else 0
        return reply

    # --- steps

    def begin(self, step: Step) -> tuple[int, int]:
        """Where rounds are not made of everybody's steps, before the first push of one. Blocks.

        Returns version and attempt of the round that the step is to be pushed for. Raises Refused (LATE).
        """
        request = pb.BeginRequest(caller=step.member_id.caller(), version=step.base, step=step.number)
        reply = self._until_answered(calls.BEGIN, request)
        return reply.version, reply.attempt

    def ask_after_step(self, step: Step, attempt: int) -> pb.AwaitReply:
        """In mode `accumulate`, ask what is next when all of the step has been pushed for this attempt.

        Blocks for some seconds at most; then the answer is `pending`. Raises Refused (LATE): it is void.
        """
        request = pb.AwaitRequest(caller=step.member_id.caller(), step=step.number, attempt=attempt)
        return self.ask(calls.AWAIT, request)

    def push(
        self, bucket: Bucket, step: Step, attempt: int, payload: Payload, ending: pb.FinishRequest | None
    ) -> None:
        """Send a gradient, and block until it is in the round's sum.

        `ending` ends the step as well. It lacks what the step's pushes say.
        """
        request = self._push(bucket, step, attempt, payload, ending)
        self.ask(calls.PUSH, request, shard=bucket.shard, body=payload.body)

    def push_and_pull(
        self,
        bucket: Bucket,
        step: Step,
        attempt: int,
        payload: Payload,
        ending: pb.FinishRequest,
        wanted: pb.PullRequest,
        answer: int,
    ) -> Answers:
        """One try of the step's last push to a shard that is alone, and of the pull after it; see `pull`."""
        request = self._push(bucket, step, attempt, payload, ending)
        request.pull.CopyFrom(wanted)
        return self._pulled(0, calls.PUSH.name, Frame(request.SerializeToString(), payload.body), answer)

    def _push(
        self, bucket: Bucket, step: Step, attempt: int, payload: Payload, ending: pb.FinishRequest | None
    ) -> pb.PushRequest:
        return to_message(
            pb.PushRequest,
            payload,
            caller=step.member_id.caller(),
            step=step.number,
            bucket=bucket.index,
            version=step.version,
            attempt=attempt,
            weight=step.weighs,
            finish=None if ending is None else self._finish(step, attempt, ending),
        )

    def finish(self, step: Step, attempt: int, ending: pb.FinishRequest) -> None:
        """All buckets of the step are in the sums of their shards."""
        self.ask(calls.FINISH, self._finish(step, attempt, ending))

    def _finish(self, step: Step, attempt: int, ending: pb.FinishRequest) -> pb.FinishRequest:
        request = pb.FinishRequest(
            caller=step.member_id.caller(),
            step=step.number,
            version=step.version,
            attempt=attempt,
            samples=step.samples,
            weight=step.weight,
            traffic=self.traffic.counts(),
        )
        request.MergeFrom(ending)
        return request

    def meet(
        self,
        member_id: MemberId,
        version: int,
        attempt: int | None,
        *,
        barrier: Barrier | None = None,
        holds: bool = False,
        broken: bool = False,
        ended: tuple[Step, pb.FinishRequest] | None = None,
    ) -> pb.MeetReply:
        """Come to a barrier of the round, and wait for the others; see `MeetRequest`. Blocks.

        `ended`, at the end of a step: the step, and the request that ends it.
        """
        request = pb.MeetRequest(
            caller=member_id.caller(),
            version=version,
            attempt=attempt,
            barrier=barrier,
            holds=holds,
            broken=broken,
        )
        if ended is not None:
            step, ending = ended
            request.finish.CopyFrom(self._finish(step, attempt or 0, ending))
        return self._until_answered(calls.MEET, request)

    def assign(self, version: int) -> pb.AssignReply:
        """Ask to make values that the script changed at `version` the next version. Blocks.

        The answer says to push them for the open round and ask again, or to do nothing more (`done`).
        """
        return self._until_answered(calls.ASSIGN, pb.AssignRequest(version=version))

    def pull(self, member_id: MemberId, shard: int, wanted: pb.PullRequest, answer: int = 0) -> Answers:
        """One try of a pull of `answer` bytes. Blocks. Raises TransportError: pull again what is missing."""
        wanted.caller.CopyFrom(member_id.caller())
        return self._pulled(shard, calls.PULL.name, Frame(wanted.SerializeToString()), answer)

    def _pulled(self, shard: int, method: str, frame: Frame, answer: int) -> Answers:
        for incoming in self._call(shard, method, frame, answer):
            yield pb.PullReply.FromString(incoming.header), incoming

    def optimizer_state(self, shard: int) -> list[Stored]:
        """The optimizer's state on a shard. Blocks."""

        def read(reply: pb.OptimizerStateReply, incoming: Incoming) -> list[Stored]:
            if reply.done:
                return []
            incoming.read_into(body := memoryview(bytearray(incoming.size)))
            return [from_message(Stored, reply, value=as_tensor(body, dtype_of(reply.dtype)))]

        found = self.ask_all(calls.OPTIMIZER_STATE, pb.OptimizerStateRequest(), read, shard=shard)
        return [each for some in found for each in some]

    # --- how

    def ask(self, call: Call[Q, A], request: Q, *, shard: int = 0, body: memoryview = EMPTY) -> A:
        """Make a call that may be repeated; returns its answer. Blocks. Raises Refused, ConnectionLost.

        Args:
            request: if it names no caller, it gets that of the present incarnation.
        """
        return self.ask_all(call, request, _reply, shard=shard, body=body)[0]

    def ask_all(
        self,
        call: Call[Q, A],
        request: Q,
        read: Callable[[A, Incoming], T],
        *,
        shard: int = 0,
        body: memoryview = EMPTY,
        answer: int = 0,
    ) -> list[T]:
        """Like `ask`; returns what `read` makes of each answer, at least one. `answer`: see `pull`."""
        named: Any = request
        if call.sender is not Sender.JOB and not named.HasField("caller"):
            named.caller.CopyFrom(self.member_id.caller(next(self._calls) if call.numbered else 0))
            if call.numbered:
                self._pending = 0  # a call for records is over, whether it was answered or not
        frame = Frame(request.SerializeToString(), body)
        return self.retry(lambda: self._once(call, shard, frame, read, answer))

    def _until_answered(self, call: Call[Q, A], request: Q) -> A:
        """Repeat a call until its answer is not `pending`. Blocks."""
        while getattr(reply := self.ask(call, request), PENDING):
            pass
        return reply

    def _once(
        self, call: Call[Q, A], shard: int, frame: Frame, read: Callable[[A, Incoming], T], answer: int = 0
    ) -> list[T]:
        try:
            found = [
                read(call.reply.FromString(incoming.header), incoming)
                for incoming in self._call(shard, call.name, frame, answer)
            ]
        except Refused as refusal:
            unchecked = shard or call in (calls.LOOKUP, calls.OPTIMIZER_STATE)
            if refusal.code is RefusalCode.NOT_READY and unchecked and self.member_id.incarnation:
                self.heartbeat()  # only shard 0 knows whether this worker is still a member, and not by these
            raise
        if not found:
            raise ConnectionLost("the parameter server ended the call without an answer")
        return found

    def lost(self, since: float, problem: Exception) -> ConnectionLost | None:
        """The error to end with, if calls have failed since `since` (monotonic, s) for too long; else None.

        The log says now and then that a call is repeated.
        """
        now, asked = time.monotonic(), self._asked_to_leave
        silent = f"the parameter server has not answered for {now - since:.0f} s"
        leaving = asked is not None and now > max(since, asked) + self.limits.leaving.total_seconds()
        if leaving or now > since + self._patience.total_seconds():
            return ConnectionLost(f"{silent}: {problem}")
        if now - max(since, self._noticed) >= self.limits.notice.total_seconds():
            self._noticed = now
            logger.warning("%s, trying again: %s", silent, problem)
        return None

    def _call(self, shard: int, method: str, frame: Frame, answer: int) -> Iterator[Incoming]:
        timeout = calls.allowing(calls.CALLS[method].timeout, frame.body.nbytes + answer)
        return self._connections[shard].call(method, frame, timeout=timeout)

    def retry(self, attempt: Callable[[], T]) -> T:
        """Repeat an attempt that fails on the way, or is answered with "not yet", with growing pauses.

        Blocks. Raises Refused, and ConnectionLost when attempts have failed for `WorkerLimits.patience`.
        """
        began, since = time.monotonic(), math.inf  # `since`: when attempts began to fail
        pauses, answered = Pauses(FIRST_PAUSE, LONGEST_PAUSE_CALLING), False
        while True:
            try:
                return attempt()
            except (ConnectionLost, DeadlineExceeded, Refused) as error:
                now = time.monotonic()
                # A large body may have been on its way for longer, or this process was stopped.
                since = min(since, max(began, now - calls.TIMEOUT.total_seconds()))
                if self._closed.is_set():
                    raise
                if not isinstance(error, Refused):
                    if lost := self.lost(since, error):
                        raise lost from error
                elif error.code is RefusalCode.NOT_YOUR_TURN:
                    began, since = now, math.inf  # it waits for a worker
                elif error.code is not RefusalCode.NOT_READY or now > since + self._patience.total_seconds():
                    raise
                if isinstance(error, Refused) and not answered:
                    pauses, answered = Pauses(FIRST_PAUSE, LONGEST_PAUSE), True
            self._closed.wait(pauses.next() * (0.5 + random.random()))


def _reply(reply: A, _: Incoming) -> A:
    return reply
