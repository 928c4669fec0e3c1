"""The tables of a shard: look-ups, the rows of steps that are not in a version yet, and those that are.

A worker sends the rows of a step once, before it ends the step. They wait here until shard 0 decides which
steps make the next version. So a round that starts again needs nothing sent again, and a row counts as often
as its step, which is once. A worker names its steps that came too late, whose rows are freed. When a step of
a worker is in a version, its earlier steps, also those of earlier incarnations, are in that version, in one
before, or lost.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch

from elastic_ps.api.tables import TableStatus
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import as_bytes
from elastic_ps.core.settings import Application
from elastic_ps.core.weights import is_weight
from elastic_ps.embedding.columns import NEVER
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Gradient, coalesced, mean_of
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.snapshot import TablesAt
from elastic_ps.embedding.stored import parts_in, spec_from_text
from elastic_ps.embedding.table import State, Table, TableSpec
from elastic_ps.embedding.wire import gradient_bytes, gradient_from_bytes, ids_from_bytes
from elastic_ps.errors import Malformed, ModelMismatch, RefusalCode, Refused
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import answers

MOST_TABLES = 1000
_NONE = (-1, -1)

Contributor = tuple[int, int, int]
"""A worker, its incarnation, and the number of its step."""


class Mean(NamedTuple):
    """A table, and the mean of the gradients of its rows in a round."""

    spec: TableSpec
    gradient: Gradient


class StepRows(NamedTuple):
    """The rows of a step, by the names of their tables.

    Attributes:
        used: how many rows were used, and how many of them as they had been fetched ahead.
    """

    incarnation: int
    number: int
    weight: float
    gradients: Mapping[str, Gradient]
    used: Mapping[str, tuple[int, int]] = {}


class ShardTables:
    """The tables of one shard in one term. Thread-safe.

    Args:
        shard, shards: the index of this shard, and the number of shards.

    Attributes:
        life: a random number of these tables.
        whole: whether it has all its rows; see `FollowingTables`.
    """

    whole = True

    def __init__(self, shard: int, shards: int) -> None:
        self._shard, self._shards = shard, shards
        self.life = uuid.uuid4().int >> 65
        self._lock = threading.Lock()
        self._read = threading.Condition(self._lock)  # a block of a snapshot was read
        self._snapshots: weakref.WeakSet[TablesAt] = weakref.WeakSet()  # those that a thread may still read
        self._tables: dict[str, Table] = {}
        self._steps: dict[Contributor, StepRows] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # of each worker, the last step in a version
        self._pushed = False

    @property
    def used(self) -> bool:
        """True if there is a table. Does not block."""
        return bool(self._tables)

    @property
    def waiting_steps(self) -> int:
        """How many steps have rows here, and are in no version yet."""
        with self._lock:
            return len(self._steps)

    def counts(self) -> tuple[TableStatus, ...]:
        """The counts of each table since the term began."""
        with self._lock:
            return tuple(
                TableStatus(
                    name=name,
                    rows=len(table),
                    waiting=table.waiting,
                    size_bytes=table.nbytes,
                    **dataclasses.asdict(table.counts),
                )
                for name, table in self._tables.items()
            )

    def lookup_since(
        self, spec: TableSpec, ids: Ids, *, held: int, version: int
    ) -> tuple[int, Ids, torch.Tensor]:
        """The values of some rows for a worker that has those of the first `held` ids at a version.

        Returns the present version, and the places of the rows that it does not have, with their values.

        Raises:
            Refused: MODEL_MISMATCH.
        """
        with self._lock:
            table = self._table(spec)
            places = np.arange(held, len(ids))
            if held:
                places = np.concatenate([table.changed(ids[:held], version), places])
                ids = ids[places]
            return table.version, places, table.lookup(ids)

    def push(
        self, worker: int, step: StepRows, specs: Collection[TableSpec], lost: Iterable[int] = ()
    ) -> bool:
        """Keep the rows of a step. Returns False if it, or a later one, has come before.

        `lost`: steps of the same incarnation that will be in no version. Their rows are freed.

        Raises:
            Refused: MODEL_MISMATCH; NOT_FINITE.
        """
        for name, gradient in step.gradients.items():
            if not bool(torch.isfinite(gradient.values).all()):
                text = f"the gradient of the table {name!r} of worker {worker} holds NaN or Inf"
                raise Refused(RefusalCode.NOT_FINITE, text)
        with self._lock:
            for spec in specs:
                self._table(spec)
            for number in lost:
                self._steps.pop((worker, step.incarnation, number), None)
            there = (worker, *step[:2])
            if there in self._steps or there[1:] <= self._newest.get(worker, _NONE):
                return False
            self._steps[there], self._pushed = step, True
            for name, (used, ahead) in step.used.items():
                self._tables[name].counts.used += used
                self._tables[name].counts.used_ahead += ahead
            return True

    def _forget(self, worker: int, newest: tuple[int, int]) -> None:
        """Free the rows of a worker's steps up to this one, and refuse late copies of them."""
        self._newest[worker] = max(newest, self._newest.get(worker, _NONE))
        for there in [each for each in self._steps if each[0] == worker and each[1:] <= newest]:
            del self._steps[there]

    def require(self, version: int, order: Application) -> None:
        """Raise Refused (INVALID) unless the rows of all its steps are here, if workers train tables."""
        with self._lock:
            if not self._pushed:
                return
            steps = self._of(order)
        found = math.fsum(step.weight for step in steps)
        if len(steps) < len(order.contributors) or found != order.weight:
            raise Refused(
                RefusalCode.INVALID,
                f"shard {self._shard} has for version {version} the rows of {len(steps)} of "
                f"{len(order.contributors)} steps, with {found:g} of their weight of {order.weight:g}",
            )

    def means(self, order: Application) -> dict[str, Mean]:
        """The weighted mean of the gradients of a version's steps, of each table that has some."""
        with self._lock:
            return self._means_of(order)

    def _means_of(self, order: Application) -> dict[str, Mean]:
        steps, means = self._of(order), {}
        for name, table in self._tables.items():
            found = [(each, step.weight) for step in steps if (each := step.gradients.get(name))]
            if found:
                one = len(steps) == 1  # then the mean is the step's own, bit for bit
                means[name] = Mean(table.spec, mean_of(found, None if one else order.weight, table.spec))
        return means

    def apply(self, version: int, order: Application) -> None:
        """Make a version of the rows of its steps."""
        with self._lock:
            if not (self._pushed or self._tables):
                return
            self._make(version, self._means_of(order), order)
            for worker, incarnation, number in () if order.assigns else order.contributors:
                self._forget(worker, (incarnation, number))

    def _make(self, version: int, means: Mapping[str, Mean], order: Application) -> None:
        """Make a version of the mean gradients of tables."""
        settings = order.settings
        for snapshot in list(self._snapshots):
            snapshot.wait()
        for name, table in self._tables.items():
            there = name in means
            ids, values, counts = means[name].gradient if there else coalesced([], table.spec)
            rate = table.spec.optimizer.rate_of(settings.groups, settings.first, order.divisors)
            table.update(ids, values, counts, version, stepped=there, rate=rate, now=order.time)

    def _of(self, order: Application) -> list[StepRows]:
        contributors = () if order.assigns else sorted(order.contributors)
        return [step for each in contributors if (step := self._steps.get(each)) is not None]

    def _table(self, spec: TableSpec) -> Table:
        table = self._tables.get(spec.name)
        if table is None:
            if len(self._tables) >= MOST_TABLES:
                raise Refused(RefusalCode.INVALID, f"there are {MOST_TABLES} tables already")
            table = self._tables[spec.name] = Table(spec)
        try:
            here = "the job, or in the checkpoint that it began with,"
            table.spec.require_same(spec, here=here, there="this worker")
        except ModelMismatch as error:
            raise Refused(RefusalCode.MODEL_MISMATCH, str(error)) from error
        return table

    # --- standbys

    def parts(self, name: str, since: int, start: int, stop: int) -> State | None:
        """See `Table.changes`."""
        with self._lock:
            return self._tables[name].changes(since, start, stop)

    def extents(self) -> dict[str, tuple[TableSpec, int]]:
        """Each table, and its `Table.extent`."""
        with self._lock:
            return {name: (table.spec, table.extent) for name, table in self._tables.items()}

    def follow(self, request: pb.RowsRequest, incoming: Incoming) -> None:
        """Serve a standby; see `FollowingTables`. Raises Refused (NOT_READY): this is none."""
        del request, incoming
        raise Refused(RefusalCode.NOT_READY, f"shard {self._shard} is not a standby")

    # --- checkpoints

    def few_changed(self, since: int | None) -> bool:
        """Whether at most half of the rows have changed after a version, and it is known which."""
        with self._lock:
            tables = list(self._tables.values())
            if since is None or not all(table.removed_since(since) for table in tables):
                return False
            rows = sum(len(table) + table.waiting for table in tables)
            return rows > 0 and 2 * sum(table.changed_since(since) for table in tables) <= rows

    def snapshot(
        self, version: int, *, since: int | None = None, patience: timedelta = timedelta(0)
    ) -> TablesAt:
        """All rows, which are of this version, for the shard's part of a checkpoint; see `TablesAt`."""
        del version
        with self._lock:
            tables = [table for _, table in sorted(self._tables.items())]
            snapshot = TablesAt(
                tables, self._read, since=NEVER if since is None else since, patience=patience
            )
            self._snapshots.add(snapshot)
            return snapshot

    def load(self, reader: Reader) -> None:
        """Take over the rows of a checkpoint that belong to this shard. Blocks for reading.

        Raises:
            CheckpointCorrupt: the checkpoint's rows are not those of tables.
            InvalidModel: see `Table.shrink`.
        """
        for spec, part in parts_in(reader.rows(), lambda ids: shard_of(ids, self._shards) == self._shard):
            with self._lock:
                self._table(spec).merge(part)
        with self._lock:
            for table in self._tables.values():
                table.shrink()


class TableCalls:
    """Answers workers about tables, for a `Service`.

    Args:
        tables: those of the present term. Raises Refused (NOT_READY) before there is a model.
    """

    def __init__(self, tables: Callable[[], ShardTables]) -> None:
        self._tables = tables

    @answers(calls.LOOKUP)
    def _lookup(self, request: pb.LookupRequest, incoming: Incoming) -> Iterator[Frame]:
        spec, tables = spec_from_text(request.table), self._tables()
        if incoming.size % 8:
            raise Malformed(f"{incoming.size} bytes do not make whole ids")
        ids = ids_from_bytes(read_body(incoming))
        if request.held > len(ids):
            raise Malformed(f"{request.held} ids are held; expected {len(ids)} at most")
        held = request.held if request.life == tables.life else 0
        version, places, values = tables.lookup_since(spec, ids, held=held, version=request.version)
        reply, body = pb.LookupReply(life=tables.life, version=version), as_bytes(values)
        if held:
            reply.places = len(places)
            body = memoryview(b"".join([places.astype("<i8").tobytes(), body]))
        yield Frame(reply.SerializeToString(), body, last=True)

    @answers(calls.PUSH_ROWS)
    def _push(self, request: pb.PushRowsRequest, incoming: Incoming) -> pb.Done:
        if not is_weight(request.weight):
            raise Malformed(f"a step with the weight {request.weight}")
        read = read_gradients(request.tables, incoming)
        gradients = {name: mean.gradient for name, mean in read.items()}
        used = {name: (each.used, each.used_ahead) for name, each in zip(read, request.tables, strict=True)}
        step = StepRows(request.caller.incarnation, request.step, request.weight, gradients, used)
        specs = [mean.spec for mean in read.values()]
        return pb.Done(duplicate=not self._tables().push(request.caller.worker, step, specs, request.lost))


def read_gradients(tables: Sequence[pb.PushRowsRequest.Rows], incoming: Incoming) -> dict[str, Mean]:
    """The gradients in a body, by the names of their tables. Blocks. Raises Malformed."""
    specs = [spec_from_text(each.table) for each in tables]
    sizes = [gradient_bytes(spec, each.rows) for spec, each in zip(specs, tables, strict=True)]
    if sum(sizes) != incoming.size or len({spec.name for spec in specs}) < len(specs):
        raise Malformed(f"{incoming.size} bytes of rows; expected {sum(sizes)}, each table once")
    body, start, found = read_body(incoming), 0, {}
    for spec, each, size in zip(specs, tables, sizes, strict=True):
        found[spec.name] = Mean(spec, gradient_from_bytes(body[start : start + size], spec, each.rows))
        start += size
    return found


def read_body(incoming: Incoming) -> memoryview:
    """The bytes of a call, in memory that is taken as they arrive. Blocks."""
    body = np.empty(incoming.size, np.uint8).data
    if incoming.size:
        incoming.read_into(body)
    return body
