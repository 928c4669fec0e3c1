"""The orders of shard 0 to the shards. `transport.convert` makes messages of them, field by field.

Shard 0's coordinator calls its own shard directly and the others over the network. Both are a `ShardControl`.
"""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.tables import TableStatus
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.codec.state import CopiedTensor
from elastic_ps.core.partition import Layout
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import Application, Settings
from elastic_ps.core.stages import StandbyState
from elastic_ps.errors import ConnectionLost, DeadlineExceeded
from elastic_ps.process.retrying import retry
from elastic_ps.server.limits import SLOWEST
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.transport.calls import Call, Q
from elastic_ps.transport.convert import from_message, layout_to_message, to_message


@dataclass(frozen=True)
class Configuration:
    """The model and the settings with which a shard begins.

    Attributes:
        follows: the receiver is a standby, which gets its state from its shard.
        mutable: the mutable fields of the term.
        load_bytes: the bytes of the files of `load_version`, of all shards. Only the sender knows them.
    """

    layout: Layout
    optimizer: str
    settings: Settings
    term: int
    load_version: int | None
    follows: bool = False
    mutable: MutableFields = field(default_factory=MutableFields)
    load_bytes: int = 0


@dataclass(frozen=True)
class Advance:
    """The state of the round, and how to reach it. See messages.proto.

    Attributes:
        checkpoint: the number of the checkpoint to write of `version`; 0: write none.
        prepare: only check that the order can be carried out.
        state: for a standby, the `JobRecord` of the version as JSON; see `Model.complete`.
        last: shard 0 is about to end, and sends no other order.
        rescued_term: the term of the round that the order saves, if it is not that of the order; else 0.
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
    rescued_term: int = 0


@dataclass(frozen=True)
class Model:
    """The model of the job: the layout of its tensors and the class of its optimizer."""

    layout: Layout
    optimizer: str

    @cached_property
    def description(self) -> dict[str, Any]:
        """The tensors and the optimizer, as plain data for a checkpoint."""
        return {"tensors": [asdict(t) for t in self.layout.every], "optimizer": self.optimizer}

    @cached_property
    def message(self) -> pb.Layout:
        """The layout for workers."""
        return layout_to_message(self.layout)

    def complete(self, order: Advance) -> Advance:
        """The order with the whole state for a checkpoint of its version."""
        return replace(order, state=json.dumps(self.description | json.loads(order.state or "{}")))


@dataclass(frozen=True)
class Written:
    """The outcome of writing a shard's part of a checkpoint: `file` and its `base`, or the cause in `error`.

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
    base: ShardFile | None = None


@dataclass(frozen=True)
class Report:
    """A shard's answer to an order: its part of the last checkpoint, if written, and its standby's state.

    Attributes:
        norm: the norm of its part of the mean gradient, if the order prepares a version that is clipped.
        queued: see `Shard.queued`.
        tables: see `ShardTables.counts`.
    """

    written: Written | None = None
    standby: StandbyState | None = None
    norm: float = 0.0
    queued: frozenset[int] = frozenset()
    tables: tuple[TableStatus, ...] = ()


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


START_TIMEOUT = timedelta(seconds=120)
"""How long shard 0 waits for another shard to start."""

CALL_TIMEOUT = timedelta(seconds=60)
"""The timeout of an order, for which a shard may have to make a step."""

LOOK_TIMEOUT = timedelta(seconds=10)
"""The timeout of a shard's calls to its standby: training goes on without one that does not answer."""


class RemoteShard:
    """A `ShardControl` for a shard in another process. Thread-safe.

    Args:
        start: how long `configure` waits for the process to start.
        timeout: the timeout of each order, without its body.
    """

    def __init__(
        self,
        job: str,
        connection: Connection,
        *,
        start: timedelta = START_TIMEOUT,
        timeout: timedelta = CALL_TIMEOUT,
    ) -> None:
        self._job, self._connection = job, connection
        self._start, self._timeout = start, timeout
        self._source, self._numbers = uuid.uuid4().hex, itertools.count(1)

    def _order(self) -> OrderId:
        return OrderId(self._source, next(self._numbers))

    def configure(self, configuration: Configuration) -> None:
        """See ShardControl. Waits until the shard has started; raises ConnectionLost if it does not."""
        # Ordered once more, a shard would read the checkpoint once more, beside the first time.
        timeout = CALL_TIMEOUT
        if configuration.load_version is not None:
            timeout = calls.allowing(10 * CALL_TIMEOUT, configuration.load_bytes, SLOWEST)

        def ask() -> None:
            request = to_message(pb.ConfigureRequest, configuration, job=self._job, **vars(self._order()))
            calls.ask(self._connection, calls.CONFIGURE, request, timeout=timeout)

        retry(ask, (ConnectionLost, DeadlineExceeded), patience=self._start)

    def advance(self, advance: Advance) -> Report:
        """See ShardControl."""
        request = to_message(pb.AdvanceRequest, advance, job=self._job, **vars(self._order()))
        reply = calls.ask(self._connection, calls.ADVANCE, request, timeout=self._timeout)
        return from_message(Report, reply)

    def state(self, part: CopiedTensor, data: memoryview, *, term: int) -> None:
        """Send a standby one tensor of a bucket, as it is before the open round's step. Blocks."""
        request = to_message(pb.StateRequest, part, job=self._job, term=term, **vars(self._order()))
        self._send(calls.STATE, request, data)

    def sum(self, key: PushKey, data: memoryview, present: Sequence[bool]) -> None:
        """Send a standby the sum of a bucket in the open round. Blocks."""
        self._send(calls.SUM, to_message(pb.SumRequest, key, job=self._job, present=present), data)

    def rows(self, request: pb.RowsRequest, data: memoryview, *, term: int) -> None:
        """Send a standby rows of tables that grow; see `embedding.followed`. Blocks."""
        request.MergeFrom(pb.RowsRequest(job=self._job, term=term, **vars(self._order())))
        self._send(calls.ROWS, request, data)

    def _send(self, call: Call[Q, pb.Done], request: Q, data: memoryview) -> None:
        frame = Frame(request.SerializeToString(), data)
        timeout = calls.allowing(self._timeout, data.nbytes, SLOWEST)
        for _ in self._connection.call(call.name, frame, timeout=timeout):
            pass

    def held(self, term: int) -> list[Advance]:
        """The orders that a standby can carry out, oldest first. It refuses older terms from now on.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked.
            TransportError: it does not answer.
        """
        request = pb.HeldRequest(job=self._job, term=term)
        reply = calls.ask(self._connection, calls.HELD, request, timeout=LOOK_TIMEOUT)
        return [from_message(Advance, order) for order in reply.orders]

    def close(self) -> None:
        self._connection.close()
