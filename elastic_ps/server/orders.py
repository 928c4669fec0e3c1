"""The orders of shard 0 to the shards, and their messages.

Shard 0's coordinator calls its own shard directly and the others over the network. Both are a `ShardControl`.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.codec.state import Part
from elastic_ps.core.partition import Layout
from elastic_ps.core.settings import Settings, read_settings
from elastic_ps.core.stages import StandbyState
from elastic_ps.errors import ConnectionLost, DeadlineExceeded, InvalidJob, Malformed
from elastic_ps.process.retrying import retry
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.transport.calls import Call, Q
from elastic_ps.transport.convert import from_message, layout_from_message, layout_to_message, to_message


@dataclass(frozen=True)
class Application:
    """The contributions that become the next version, and the settings of its step.

    `assigns`: the sums are the version's values, and the optimizer makes no step.
    `elsewhere`: the workers make the step, and the shard, which is the only one, counts it.
    `norm`: the norm of the mean gradient on all shards, if it is clipped; None if there is one shard.
    """

    attempt: int
    contributors: Collection[tuple[int, int, int]]
    samples: int
    settings: Settings
    assigns: bool = False
    elsewhere: bool = False
    norm: float | None = None

    @property
    def clips(self) -> float | None:
        """The limit of the gradient's norm, if it has one."""
        return None if self.assigns else self.settings.max_grad_norm


@dataclass(frozen=True)
class Configuration:
    """The model and the settings with which a shard begins.

    Attributes:
        follows: the receiver is a standby, which gets its state from its shard.
        mutable: the mutable fields of the term; None: those with which the process was started.
    """

    layout: Layout
    optimizer: str
    settings: Settings
    term: int
    load_version: int | None
    follows: bool = False
    mutable: MutableFields | None = None


@dataclass(frozen=True)
class Advance:
    """The state of the round, and how to reach it. See messages.proto.

    Attributes:
        checkpoint: the number of the checkpoint to write of `version`; 0: write none.
        prepare: only check that the order can be carried out.
        last: shard 0 is about to end, and sends no other order.
        rescue: the shard's model is of an earlier term than the order.
    """

    version: int
    attempt: int
    expected: Mapping[int, int]
    apply: Application | None = None
    checkpoint: int = 0
    term: int = 0
    prepare: bool = False
    state: str = ""
    next: Advance | None = None
    last: bool = False
    rescue: bool = False


@dataclass(frozen=True)
class Written:
    """The outcome of writing a shard's part of a checkpoint: `file`, or the cause in `error`.

    Attributes:
        term, number: of the order. Together they identify the checkpoint.
        version: the model's version.
        pause: how long steps waited for copies of what was not written yet.
    """

    term: int
    number: int
    version: int
    file: ShardFile | None
    error: str
    pause: timedelta


_STANDBYS: Sequence[StandbyState | None] = (None, *StandbyState)
"""Indexed by their numbers in messages. None: the shard has no standby."""


@dataclass(frozen=True)
class Report:
    """A shard's answer to an order: its part of the last checkpoint, if written, and its standby's state.

    Attributes:
        norm: the norm of its part of the mean gradient, if the order prepares a version that is clipped.
        queued: see `Shard.queued`.
    """

    written: Written | None = None
    standby: StandbyState | None = None
    norm: float = 0.0
    queued: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OrderId:
    """Identifies an order: the `number`-th, from 1, of the sender with the random name `source`."""

    source: str
    number: int


class OrderLog:
    """Remembers the last order of each source, to recognise orders that arrive late or twice. Thread-safe.

    The network may deliver a message long after its sender has repeated it and gone on. An order of the
    process itself is None.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._lock = threading.Lock()

    def is_old(self, order: OrderId | None) -> bool:
        """Whether this order, or a later one of its source, has come before. If not, remember it."""
        with self._lock:
            if order is None:
                return False
            last = self._last.get(order.source, 0)
            self._last[order.source] = max(last, order.number)
            return order.number <= last

    def is_last(self, order: OrderId | None) -> bool:
        """Whether no later order of the same source has come, and no new term."""
        with self._lock:
            return order is None or self._last.get(order.source) == order.number

    def clear(self) -> None:
        """Forget all orders: a new term has begun, and orders of older terms are refused."""
        with self._lock:
            self._last.clear()


class ShardControl(Protocol):
    """The coordinator's interface to a shard. Both methods block and may be repeated."""

    def configure(self, configuration: Configuration) -> None:
        """Drop the present model, and take this one, empty or from a checkpoint."""

    def advance(self, advance: Advance) -> Report:
        """Bring the round to this state."""


def configuration_to_message(job: str, configuration: Configuration, order: OrderId) -> pb.ConfigureRequest:
    return to_message(
        pb.ConfigureRequest,
        configuration,
        job=job,
        layout=layout_to_message(configuration.layout),
        optimizer=pb.Optimizer(name=configuration.optimizer, groups=configuration.settings.to_json()),
        tuning=configuration.mutable.to_json() if configuration.mutable is not None else "",
        **vars(order),
    )


def configuration_from_message(message: pb.ConfigureRequest) -> Configuration:
    """Raises Malformed if the layout, the settings or the tuning are not valid."""
    return from_message(
        Configuration,
        message,
        layout=layout_from_message(message.layout),
        optimizer=message.optimizer.name,
        settings=settings_from_message(message.optimizer.groups),
        mutable=_mutable(message.tuning) if message.tuning else None,
    )


def advance_to_message(job: str, advance: Advance, order: OrderId | None = None) -> pb.AdvanceRequest:
    apply = advance.apply
    return to_message(
        pb.AdvanceRequest,
        advance,
        job=job,
        expected=[pb.Participant(worker=w, incarnation=i) for w, i in sorted(advance.expected.items())],
        apply=apply
        and to_message(
            pb.Apply,
            apply,
            contributors=[pb.Contributor(worker=w, incarnation=i, step=s) for w, i, s in apply.contributors],
            settings=apply.settings.to_json(),
        ),
        next=advance.next and advance_to_message(job, advance.next),
        **vars(order or OrderId("", 0)),
    )


def advance_from_message(message: pb.AdvanceRequest) -> Advance:
    """Raises Malformed if the settings are not valid."""
    apply = message.apply
    return from_message(
        Advance,
        message,
        expected={who.worker: who.incarnation for who in message.expected},
        apply=from_message(
            Application,
            apply,
            contributors=[(c.worker, c.incarnation, c.step) for c in apply.contributors],
            settings=settings_from_message(apply.settings),
        )
        if message.HasField("apply")
        else None,
        next=advance_from_message(message.next) if message.HasField("next") else None,
    )


def report_to_message(report: Report) -> pb.AdvanceReply:
    part = report.written
    file = part.file if part else None
    written = part and to_message(
        pb.Written,
        part,
        pause_us=round(part.pause.total_seconds() * 1e6),
        **vars(file) if file else {"file": ""},
    )
    standby = _STANDBYS.index(report.standby)
    return to_message(pb.AdvanceReply, report, written=written, standby=standby, queued=sorted(report.queued))


def report_from_message(message: pb.AdvanceReply) -> Report:
    """Raises Malformed if the standby's state is not a known one."""
    if message.standby >= len(_STANDBYS):
        raise Malformed(f"{message.standby} is not a state of a standby")
    part, written = message.written, None
    if message.HasField("written"):
        file = None if part.error else from_message(ShardFile, part)
        written = from_message(Written, part, file=file, pause=timedelta(microseconds=part.pause_us))
    return Report(written, _STANDBYS[message.standby], message.norm, frozenset(message.queued))


def _mutable(text: str) -> MutableFields:
    try:
        return read_mutable(text, source="tuning")
    except InvalidJob as error:
        raise Malformed(str(error)) from error


def settings_from_message(text: str) -> Settings:
    """Raises Malformed if `text` is not what `Settings.to_json` writes."""
    try:
        return read_settings(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed(f"not the settings of an optimizer: {error}") from error


START_TIMEOUT = timedelta(seconds=120)
"""How long shard 0 waits for another shard to start."""

CALL_TIMEOUT = timedelta(seconds=60)
"""The timeout of an order, for which a shard may have to make a step."""

LOOK_TIMEOUT = timedelta(seconds=10)
"""The timeout of a call for which a standby computes nothing."""


class RemoteShard:
    """A `ShardControl` for a shard in another process. Thread-safe.

    Args:
        start: how long `configure` waits for the process to start.
        timeout: the timeout of each order.
    """

    def __init__(
        self,
        job: str,
        connection: Connection,
        *,
        start: timedelta = START_TIMEOUT,
        timeout: timedelta = CALL_TIMEOUT,
    ) -> None:
        self._job = job
        self._connection = connection
        self._start, self._timeout = start, timeout
        self._source, self._numbers = uuid.uuid4().hex, itertools.count(1)

    def _order(self) -> OrderId:
        return OrderId(self._source, next(self._numbers))

    def configure(self, configuration: Configuration) -> None:
        """See ShardControl. Waits until the shard has started; raises ConnectionLost if it does not."""

        def ask() -> None:
            request = configuration_to_message(self._job, configuration, self._order())
            calls.ask(self._connection, calls.CONFIGURE, request, timeout=CALL_TIMEOUT)

        retry(ask, (ConnectionLost, DeadlineExceeded), patience=self._start)

    def advance(self, advance: Advance) -> Report:
        """See ShardControl."""
        request = advance_to_message(self._job, advance, self._order())
        reply = calls.ask(self._connection, calls.ADVANCE, request, timeout=self._timeout)
        return report_from_message(reply)

    def state(self, part: Part, data: memoryview, *, term: int) -> None:
        """Send a standby one tensor of a bucket, as it is before the open round's step. Blocks."""
        request = to_message(pb.StateRequest, part, job=self._job, term=term, **vars(self._order()))
        self._send(calls.STATE, request, data)

    def sum(
        self,
        bucket: int,
        data: memoryview,
        present: Sequence[bool],
        *,
        term: int,
        version: int,
        attempt: int,
    ) -> None:
        """Send a standby the sum of a bucket in the open round. Blocks."""
        request = pb.SumRequest(
            job=self._job, term=term, bucket=bucket, version=version, attempt=attempt, present=present
        )
        self._send(calls.SUM, request, data)

    def _send(self, call: Call[Q, pb.Done], request: Q, data: memoryview) -> None:
        frame = Frame(request.SerializeToString(), data)
        for _ in self._connection.call(call.name, frame, timeout=self._timeout):
            pass

    def held(self, term: int) -> list[Advance]:
        """The orders that a standby can carry out, oldest first. It refuses older terms from now on.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked.
            TransportError: it does not answer.
        """
        request = pb.HeldRequest(job=self._job, term=term)
        reply = calls.ask(self._connection, calls.HELD, request, timeout=LOOK_TIMEOUT)
        return [advance_from_message(order) for order in reply.orders]

    def close(self) -> None:
        self._connection.close()
