"""The tables of a shard: look-ups, the rows of steps that are not in a version yet, and those that are.

A worker sends the rows of a step once, before it ends the step. They wait here until shard 0 decides which
steps make the next version. So a round that starts again needs nothing sent again, and a row counts as often
as its step, which is once. A worker that has sent a later step, or comes back as another incarnation, has
given up the earlier one, so each worker has one step here at most.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from elastic_ps.api.tables import TableStatus
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import as_bytes
from elastic_ps.codec.state import Stored
from elastic_ps.core.weights import is_weight
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Gradient, coalesced
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.stored import columns_of, spec_from_text, tables_in
from elastic_ps.embedding.table import Table, TableSpec
from elastic_ps.embedding.wire import gradient_bytes, gradient_from_bytes, ids_from_bytes
from elastic_ps.errors import Malformed, ModelMismatch, RefusalCode, Refused
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import answers

MOST_TABLES = 1000

Contributor = tuple[int, int, int]
"""A worker, its incarnation, and the number of its step."""


class Step(NamedTuple):
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
    """

    def __init__(self, shard: int, shards: int) -> None:
        self._shard, self._shards = shard, shards
        self.life = uuid.uuid4().int >> 65
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._steps: dict[int, Step] = {}

    @property
    def used(self) -> bool:
        """True if there is a table. Does not block."""
        return bool(self._tables)

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

    def lookup(self, spec: TableSpec, ids: Ids) -> torch.Tensor:
        """The values of some rows; see `Table.lookup`. Raises Refused (MODEL_MISMATCH)."""
        with self._lock:
            return self._table(spec).lookup(ids)

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

    def push(self, worker: int, step: Step, specs: Collection[TableSpec]) -> bool:
        """Keep the rows of a step. Returns False if it, or a later one, has come before.

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
            before = self._steps.get(worker)
            if before is not None and before[:2] >= step[:2]:
                return False
            self._steps[worker] = step
            for name, (used, ahead) in step.used.items():
                self._tables[name].counts.used += used
                self._tables[name].counts.used_ahead += ahead
            return True

    def require(self, contributors: Collection[Contributor], weight: float) -> None:
        """Raise Refused (INVALID) unless the rows of all these steps are here, if workers train tables."""
        with self._lock:
            if not self._steps:
                return
            steps = self._of(contributors)
        found = math.fsum(step.weight for step in steps)
        if len(steps) < len(contributors) or found != weight:
            raise Refused(
                RefusalCode.INVALID,
                f"shard {self._shard} has the rows of {len(steps)} of {len(contributors)} steps, with "
                f"{found:g} of their weight of {weight:g}",
            )

    def apply(self, version: int, contributors: Collection[Contributor], weight: float) -> None:
        """Make a version of the rows of these steps: their weighted mean, in the order of workers."""
        with self._lock:
            steps = self._of(contributors)
            for name, table in self._tables.items():
                found = [(each, step.weight) for step in steps if (each := step.gradients.get(name))]
                if len(steps) > 1:  # else the mean is the step's own, bit for bit
                    found = [(each._replace(values=each.values * own), own) for each, own in found]
                ids, values, counts = coalesced([each for each, _ in found], table.spec)
                mean = values / weight if len(steps) > 1 else values
                table.update(ids, mean, counts, version, stepped=bool(found))
            # Free the rows, and keep the step numbers, which identify late copies of a step.
            for worker, step in self._steps.items():
                if any(step is applied for applied in steps):
                    self._steps[worker] = step._replace(gradients={})

    def _of(self, contributors: Collection[Contributor]) -> list[Step]:
        found = [(self._steps.get(worker), place) for worker, *place in sorted(contributors)]
        return [step for step, place in found if step is not None and [*step[:2]] == place]

    def _table(self, spec: TableSpec) -> Table:
        table = self._tables.get(spec.name)
        if table is None:
            if len(self._tables) >= MOST_TABLES:
                raise Refused(RefusalCode.INVALID, f"there are {MOST_TABLES} tables already")
            table = self._tables[spec.name] = Table(spec)
        try:
            table.spec.require_same(spec)
        except ModelMismatch as error:
            raise Refused(RefusalCode.MODEL_MISMATCH, str(error)) from error
        return table

    # --- checkpoints

    def stored(self) -> list[Stored]:
        """Copies of all rows, for the shard's part of a checkpoint."""
        with self._lock:
            return columns_of(table for _, table in sorted(self._tables.items()))

    def load(self, reader: Reader) -> None:
        """Take over the rows of a checkpoint that belong to this shard. Blocks for reading.

        Raises:
            CheckpointCorrupt: the checkpoint's rows are not those of tables.
        """
        for name, (spec, state) in tables_in(
            reader.rows(), lambda ids: shard_of(ids, self._shards) == self._shard
        ).items():
            table = Table(spec)
            table.load_state(state)
            with self._lock:
                self._tables[name] = table


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
            raise Malformed(f"{incoming.size} bytes are no ids")
        ids = ids_from_bytes(_read(incoming))
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
        specs = [spec_from_text(each.table) for each in request.tables]
        sizes = [gradient_bytes(spec, each.rows) for spec, each in zip(specs, request.tables, strict=True)]
        twice = len({spec.name for spec in specs}) < len(specs)
        if sum(sizes) != incoming.size or twice or not is_weight(request.weight):
            raise Malformed(f"a step with {incoming.size} bytes of rows; expected {sum(sizes)}")
        tables, body, start = self._tables(), _read(incoming), 0
        gradients, used = {}, {}
        for spec, each, size in zip(specs, request.tables, sizes, strict=True):
            gradients[spec.name] = gradient_from_bytes(body[start : start + size], spec, each.rows)
            used[spec.name] = (each.used, each.used_ahead)
            start += size
        step = Step(request.caller.incarnation, request.step, request.weight, gradients, used)
        return pb.Done(duplicate=not tables.push(request.caller.worker, step, specs))


def _read(incoming: Incoming) -> memoryview:
    body = memoryview(bytearray(incoming.size))
    if incoming.size:
        incoming.read_into(body)
    return body
