"""The calls that a worker makes, and what it does when the other side does not answer.

A call that failed on the way is made again for a while (`limits`), with growing pauses: all of them may be
repeated. `Refused` is an answer and is passed on.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from google.protobuf.message import Message

from elastic_ps.api.tuning import read_tuning
from elastic_ps.codec.optimizers import Entry
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import TensorSpec
from elastic_ps.core.reduced import Place
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
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Connection, Frame, Incoming
from elastic_ps.transport.convert import (
    layout_from_message,
    ranges_from_message,
    ranges_to_message,
    tensors_to_message,
)
from elastic_ps.worker.dialogue import Answers, Ending, Granted, Membership, Stay, Step, Wanted
from elastic_ps.worker.encoder import Payload
from elastic_ps.worker.limits import USUAL, WorkerLimits
from elastic_ps.worker.probe import measure
from elastic_ps.worker.traffic import Traffic

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.02
"""Seconds between the first two attempts of a call; later pauses are longer."""

LONGEST_PAUSE_CALLING = 0.2
"""Seconds, while there is no answer. Short, so that a server that comes back is found soon."""

LONGEST_PAUSE = 1.0
"""Seconds, while the answer is "not yet": hundreds of workers may ask."""

TIMEOUT = timedelta(seconds=60)
"""Deadline of one attempt. Servers answer blocked calls sooner, so only a lost answer takes this long."""

NO_ANSWER = "the parameter server ended the call without an answer"

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def expelled(error: BaseException) -> bool:
    """Whether the parameter server does not know this worker (any more), so that it has to join again."""
    codes = (RefusalCode.STALE_TERM, RefusalCode.STALE_INCARNATION)
    return isinstance(error, Refused) and error.code in codes


class Client:
    """A worker's connections to all shards. `join`, `take`, `release` and `leave` belong to one thread.

    Args:
        job, worker: the job's name and the worker's index.
        connections: one for each shard, in order.
        limits: for how long calls are repeated.
        instance: names this process for all time; a random text if it is not given.
        pid: of the process that its starter knows, if that is another one.
        hostname: what this host is called, to its starter; by default what it calls itself.

    Attributes:
        instance, limits: see above.
        address: where the other workers find this one, if they speak to each other; else "".
        stay: the present one, since the last `join`.
        traffic: of that stay; what each step ends with tells it.
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
    ) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._hostname = hostname or socket.gethostname()
        self.worker, self.address = worker, ""
        self.stay = Stay(job, worker)
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
        """Of the parameter server that was joined."""
        return self.stay.term

    @property
    def incarnation(self) -> int:
        """The number of this stay in the job."""
        return self.stay.incarnation

    def is_near(self, shard: int) -> bool:
        """Whether the shard is known to be on this host."""
        return self._connections[shard].near

    @property
    def closed(self) -> bool:
        """Whether nothing is to be tried again."""
        return self._closed.is_set()

    def close(self) -> None:
        """Cancel what is under way, also what waits to be repeated, and free the connections."""
        self._closed.set()
        for connection in self._connections:
            connection.close()

    # --- members

    def join(
        self, tensors: Sequence[TensorSpec], optimizer: str, settings: Settings, *, again: bool = False
    ) -> Membership:
        """Become a member. Blocks while another worker initialises the model.

        Args:
            again: this process was a member before, and the model is not as it was at first any more.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job.
        """
        request = pb.JoinRequest(
            caller=self.stay.caller(time.monotonic_ns()),  # a process may have several sessions
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
                reply = self._ask(0, "Join", request, pb.JoinReply)
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
        self.stay = Stay(self.stay.job, self.worker, reply.term, reply.incarnation)
        self._calls, self._pending = itertools.count(1), 0
        self.traffic.reset()
        return Membership(
            stay=self.stay,
            layout=layout_from_message(reply.layout),
            version=reply.version,
            initialise=reply.initialise,
            lease=timedelta(milliseconds=reply.lease_ms),
            settings=Settings.from_json(reply.settings),
            tuning=read_tuning(reply.tuning, source="the parameter server") if reply.tuning else None,
            codecs=tuple(reply.codecs),
        )

    def _probe(self, nbytes: int) -> float:
        """Send shard 0 so many bytes; returns how many seconds that took. Blocks."""
        header = pb.ProbeRequest(caller=self.stay.caller()).SerializeToString()
        frame = Frame(header, memoryview(os.urandom(nbytes)))  # a tunnel may compress what is alike

        def attempt() -> float:
            started = time.monotonic()
            _only(self._call(0, "Probe", frame))
            return time.monotonic() - started

        return self._retry(attempt)

    def initialise(self, bucket: int, shard: int, values: memoryview, *, version: int | None = None) -> None:
        """Send a bucket's first values.

        Args:
            version: they are those of this version, which the workers have made.

        Raises:
            Refused: STALE_TERM, STALE_INCARNATION; also if only shard 0 knows, and this shard has just begun.
        """
        request = pb.InitRequest(caller=self.stay.caller(), bucket=bucket, version=version)
        self._send_first(shard, "Init", Frame(request.SerializeToString(), values))

    def initialise_state(
        self,
        bucket: int,
        shard: int,
        piece: int,
        entries: Sequence[Entry],
        body: memoryview,
        *,
        version: int | None = None,
    ) -> None:
        """Send the optimizer's state of a piece, after the bucket's values. Raises as `initialise`."""
        request = pb.InitStateRequest(
            caller=self.stay.caller(),
            bucket=bucket,
            piece=piece,
            entries=[pb.InitStateRequest.Entry(key=e.key, dtype=e.dtype, scalar=e.scalar) for e in entries],
            version=version,
        )
        self._send_first(shard, "InitState", Frame(request.SerializeToString(), body))

    def _send_first(self, shard: int, method: str, frame: Frame) -> None:
        def send() -> None:
            try:
                _only(self._call(shard, method, frame))
            except Refused as refusal:
                if refusal.code is RefusalCode.NOT_READY:
                    self.heartbeat()
                raise

        self._retry(send)

    def initialised(self) -> None:
        """All first values were sent."""
        self._ask(0, "InitDone", pb.InitDoneRequest(caller=self.stay.caller()), pb.Done)

    def sent(self, version: int) -> None:
        """All values of this version were sent."""
        self._ask(0, "InitDone", pb.InitDoneRequest(caller=self.stay.caller(), version=version), pb.Done)

    def heartbeat(self, *, computes_on: int | None = None) -> None:
        """Raises Refused (STALE_INCARNATION) if this worker was declared gone.

        Args:
            computes_on: the version that this worker has pulled; see `Exchange.computes_on`.
        """
        request = pb.HeartbeatRequest(caller=self.stay.caller(), version=computes_on)
        self._ask(0, "Heartbeat", request, pb.Done)

    def expect_to_leave(self) -> None:
        """This worker was asked to leave: one that does not answer is waited for during `leaving` only.

        May be called from a signal handler, and while calls are under way.
        """
        self._asked_to_leave = self._asked_to_leave or time.monotonic()

    def is_lost(self, since: float) -> bool:
        """Whether a parameter server that has not answered since then (monotonic) is waited for no longer."""
        now = time.monotonic()
        asked = self._asked_to_leave
        if asked is not None and now > max(since, asked) + self.limits.leaving.total_seconds():
            return True
        return self._is_late(since, now)

    def _is_late(self, since: float, now: float) -> bool:
        return now > since + self._patience.total_seconds()

    def hasten(self) -> None:
        """This worker is about to end: from now on calls that fail are repeated for `goodbye` only."""
        self._patience = self.limits.goodbye

    def leave(self) -> None:
        """Say goodbye; what this worker holds goes to others. Tried for `goodbye` only."""
        self.hasten()
        self._ask(0, "Leave", pb.LeaveRequest(caller=self.stay.caller(next(self._calls))), pb.Done)

    def gone(self) -> None:
        """End the stay in the middle of a step, which is void by that. Tried for `goodbye` only."""
        self.hasten()
        request = pb.GoneRequest(job=self.stay.job, worker=self.worker, instance=self.instance)
        self._ask(0, "Gone", request, pb.Done)

    def release(
        self, *, abandoned: bool = False, skipped: Sequence[Range] = (), leaves: bool = False
    ) -> None:
        """Give back the records, without leaving the job.

        Args:
            abandoned: a step has begun and will not be finished.
            skipped: records among these that nobody is to train.
            leaves: the script has left its loop over the loader.
        """
        request = pb.ReleaseRequest(
            caller=self.stay.caller(next(self._calls)),
            abandoned=abandoned,
            skipped=ranges_to_message(skipped),
            leaves=leaves,
        )
        self._pending = 0  # that call for records is over, whether it was answered or not
        self._ask(0, "Release", request, pb.Done)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Values outside a step."""
        self._ask(0, "Report", pb.ReportRequest(caller=self.stay.caller(), metrics=metrics), pb.Done)

    def take(
        self,
        *,
        records: int,
        epochs: int,
        batch: int,
        wait: bool,
        abandoned: bool = False,
        skipped: Sequence[Range] = (),
        early: bool = False,
        data: str = "",
        epoch: int | None = None,
    ) -> Granted:
        """Ask for records; with `wait` it blocks for some seconds at most, then the answer is `pending`.

        Args:
            abandoned: a step has begun and will not be finished.
            skipped: with `wait`, records in hand that are not to be trained.
            early: with `wait`, the script is in an epoch before the last one, or before all of them.
            data: the data set's fingerprint; "" if the parameter server has it from this stay.
            epoch: that the script is in; None if there is none.

        Raises:
            InvalidModel: the data set is not the one that the job trains.
        """
        number = self._pending or next(self._calls)
        request = pb.TakeRequest(
            caller=self.stay.caller(number),
            records=records,
            epochs=epochs,
            batch=batch,
            wait=wait,
            abandoned=abandoned,
            skipped=ranges_to_message(skipped),
            early=early,
            data=data,
            epoch=epoch,
        )
        try:
            reply = self._ask(0, "Take", request, pb.TakeReply)
        except Refused as refusal:
            if refusal.code is RefusalCode.INVALID:
                raise InvalidModel(str(refusal)) from refusal
            raise
        self._pending = number if reply.pending else 0
        return Granted(
            ranges_from_message(reply.ranges),
            reply.version,
            reply.finished,
            reply.chief,
            reply.pending,
            reply.stopped,
        )

    def is_chief(self, epoch: int, *, passes: bool = False) -> bool:
        """Whether this worker is the one to evaluate and save in this epoch."""
        request = pb.ChiefRequest(caller=self.stay.caller(), epoch=epoch, passes=passes)
        return self._ask(0, "Chief", request, pb.ChiefReply).chief

    def read_state(self) -> str:
        """What scripts keep with the job, as JSON."""
        request = pb.ReadStateRequest(caller=self.stay.caller())
        return self._ask(0, "ReadState", request, pb.ReadStateReply).text

    def write_state(self, text: str, *, again: bool) -> None:
        """What they keep from now on. Raises Refused (INVALID): this worker is not the chief.

        Args:
            again: it was written before this worker has joined again.
        """
        request = pb.WriteStateRequest(caller=self.stay.caller(next(self._calls)), text=text, again=again)
        self._pending = 0  # as in `release`
        self._ask(0, "WriteState", request, pb.Done)

    def stop(self, reason: str) -> None:
        """End the training before all records are in the model."""
        self._ask(0, "Stop", pb.StopRequest(caller=self.stay.caller(), reason=reason), pb.Done)

    # --- steps

    def begin(self, step: Step) -> tuple[int, int]:
        """Where rounds are not made of everybody's steps, before the first push of one. Blocks.

        Returns version and attempt of the round that the step is to be pushed for. Raises Refused (LATE).
        """
        request = pb.BeginRequest(caller=step.stay.caller(), version=step.base, step=step.number)
        while (reply := self._ask(0, "Begin", request, pb.BeginReply)).pending:
            pass
        return reply.version, reply.attempt

    def await_version(self, step: Step, attempt: int) -> pb.AwaitReply:
        """In mode `accumulate`: all of the step has been pushed for this attempt; what is next?

        Blocks for some seconds at most; then the answer is `pending`. Raises Refused (LATE): it is void.
        """
        request = pb.AwaitRequest(caller=step.stay.caller(), step=step.number, attempt=attempt)
        return self._ask(0, "Await", request, pb.AwaitReply)

    def push(
        self,
        bucket: int,
        shard: int,
        step: Step,
        attempt: int,
        payload: Payload,
        ending: Ending | None,
    ) -> None:
        """Send a gradient; with `ending`, end the step as well. Blocks until it is in the round's sum."""
        header = self._push(bucket, step, attempt, payload, ending).SerializeToString()
        self._retry(lambda: _only(self._call(shard, "Push", Frame(header, payload.body))))

    def push_and_pull(
        self,
        bucket: int,
        step: Step,
        attempt: int,
        payload: Payload,
        ending: Ending,
        wanted: Wanted,
    ) -> Answers:
        """One try of the step's last push to a shard that is alone, and of the pull after it, in one call."""
        request = self._push(bucket, step, attempt, payload, ending)
        request.pull.CopyFrom(wanted.request())
        return self._pulled(0, "Push", Frame(request.SerializeToString(), payload.body))

    def _push(
        self,
        bucket: int,
        step: Step,
        attempt: int,
        payload: Payload,
        ending: Ending | None,
    ) -> pb.PushRequest:
        request = pb.PushRequest(
            caller=step.stay.caller(),
            step=step.number,
            bucket=bucket,
            version=step.version,
            attempt=attempt,
            samples=step.samples,
            present=payload.present,
            codec=payload.codec,
            runs=payload.runs,
            plain=payload.plain,
        )
        if ending is not None:
            request.finish.CopyFrom(self._finish(step, attempt, ending))
        return request

    def finish(self, step: Step, attempt: int, ending: Ending) -> None:
        """All buckets of the step are in the sums of their shards."""
        self._ask(0, "Finish", self._finish(step, attempt, ending), pb.Done)

    def _finish(self, step: Step, attempt: int, ending: Ending) -> pb.FinishRequest:
        return pb.FinishRequest(
            caller=step.stay.caller(),
            step=step.number,
            version=step.version,
            attempt=attempt,
            samples=step.samples,
            ranges=ranges_to_message(ending.ranges),
            settings=ending.settings,
            metrics=ending.metrics,
            reductions=ending.reductions,
            skipped=ranges_to_message(ending.skipped),
            assigns=ending.assigns,
            traffic=self.traffic.counts(),
        )

    def meet(
        self,
        stay: Stay,
        version: int,
        attempt: int | None,
        *,
        place: Place | None = None,
        holds: bool = False,
        broken: bool = False,
        ended: tuple[Step, Ending] | None = None,
    ) -> pb.MeetReply:
        """Come to a place of the round, and wait for the others; see `MeetRequest`. Blocks.

        Args:
            ended: at the end of a step: which, and what is said of it.
        """
        request = pb.MeetRequest(
            caller=stay.caller(), version=version, attempt=attempt, place=place, holds=holds, broken=broken
        )
        if ended is not None:
            step, ending = ended
            request.finish.CopyFrom(self._finish(step, attempt or 0, ending))
        while (reply := self._ask(0, "Meet", request, pb.MeetReply)).pending:
            pass
        return reply

    def parts(self, stay: Stay, version: int) -> bool:
        """This worker stops making rounds: is it to send its values, which are of `version`, before?"""
        request = pb.MeetRequest(caller=stay.caller(), version=version, parts=True)
        return self._ask(0, "Meet", request, pb.MeetReply).send

    def assign(self, version: int) -> pb.AssignReply:
        """Values that the script changed at `version` are to become the next one. Blocks.

        Returns what to do: push them for the open round and ask again, or nothing more (`done`).
        """
        request = pb.AssignRequest(caller=self.stay.caller(), version=version)
        while (reply := self._ask(0, "Assign", request, pb.AssignReply)).pending:
            pass
        return reply

    def pull(self, stay: Stay, shard: int, wanted: Wanted) -> Answers:
        """One try of a pull: (answer, body). Blocks. Raises TransportError: ask again for what is missing."""
        request = wanted.request()
        request.caller.CopyFrom(stay.caller())
        return self._pulled(shard, "Pull", Frame(request.SerializeToString()))

    def _pulled(self, shard: int, method: str, frame: Frame) -> Answers:
        for incoming in self._call(shard, method, frame):
            yield pb.PullReply.FromString(incoming.header), incoming

    def optimizer_state(self, shard: int) -> list[tuple[pb.OptimizerStateReply, bytes]]:
        """The entries of the optimizer's state on a shard, with their bytes. Blocks."""

        def read(incoming: Incoming) -> tuple[pb.OptimizerStateReply, bytes]:
            body = bytearray(incoming.size)
            incoming.read_into(memoryview(body))
            return pb.OptimizerStateReply.FromString(incoming.header), bytes(body)

        request = pb.OptimizerStateRequest(caller=self.stay.caller())
        found = self.call(shard, "OptimizerState", request, read=read)
        return [(reply, body) for reply, body in found if not reply.done]

    # --- how

    def call(
        self,
        shard: int,
        method: str,
        request: Message,
        *,
        read: Callable[[Incoming], T],
        body: memoryview = EMPTY,
    ) -> list[T]:
        """Make a call that may be repeated; returns what `read` makes of each answer, at least one. Blocks.

        Raises Refused, ConnectionLost.
        """
        frame = Frame(request.SerializeToString(), body)

        def attempt() -> list[T]:
            answers = [read(incoming) for incoming in self._call(shard, method, frame)]
            if not answers:
                raise ConnectionLost(NO_ANSWER)
            return answers

        return self._retry(attempt)

    def notice(self, since: float, problem: Exception) -> None:
        """Now and then, say that a call has failed since `since` (monotonic) and is made again."""
        now = time.monotonic()
        if now - max(since, self._noticed) >= self.limits.notice.total_seconds():
            self._noticed = now
            logger.warning(
                "the parameter server has not answered for %.0f s, trying again: %s", now - since, problem
            )

    def _call(self, shard: int, method: str, frame: Frame) -> Iterator[Incoming]:
        return self._connections[shard].call(method, frame, timeout=TIMEOUT)

    def _ask(self, shard: int, method: str, request: Message, answer: type[M]) -> M:
        header = request.SerializeToString()
        return answer.FromString(self._retry(lambda: _only(self._call(shard, method, Frame(header)))))

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Repeat what fails on the way, or is answered with "not yet", with growing pauses and jitter."""
        since = time.monotonic()
        pause, most = FIRST_PAUSE, LONGEST_PAUSE_CALLING
        while True:
            try:
                return attempt()
            except (ConnectionLost, DeadlineExceeded) as error:
                if self.closed:
                    raise
                if self.is_lost(since):
                    seconds = time.monotonic() - since
                    text = f"the parameter server has not answered for {seconds:.0f} s: {error}"
                    raise ConnectionLost(text) from error
                self.notice(since, error)
            except Refused as refusal:
                if refusal.code is RefusalCode.NOT_YOUR_TURN and not self.closed:
                    since = time.monotonic()  # it waits for a worker
                elif (
                    refusal.code is not RefusalCode.NOT_READY
                    or self.closed
                    or self._is_late(since, time.monotonic())
                ):
                    raise
                if most < LONGEST_PAUSE:  # somebody is there now
                    pause, most = FIRST_PAUSE, LONGEST_PAUSE
            self._closed.wait(pause * (0.5 + random.random()))
            pause = min(most, pause * 2)


def _only(answers: Iterator[Incoming]) -> bytes:
    """The header of the one answer of a call."""
    headers = [incoming.header for incoming in answers]
    if headers:
        return headers[0]
    raise ConnectionLost(NO_ANSWER)
