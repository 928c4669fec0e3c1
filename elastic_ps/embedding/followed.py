"""How a standby follows the tables of its shard.

A new standby gets some rows with each round, before the round is applied. Rows that it has, and that rounds
have changed since, are sent again. So at some round it has all rows of the version before. From then on it
gets the mean gradients of each round, and makes the same steps with them as its shard. So its rows are the
same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from elastic_ps.core.settings import Application
from elastic_ps.embedding.columns import NEVER
from elastic_ps.embedding.served import Mean, ShardTables, read_body, read_gradients
from elastic_ps.embedding.snapshot import TablesAt
from elastic_ps.embedding.stored import columns_to_part, part_of, spec_to_text
from elastic_ps.embedding.wire import columns_from_bytes, columns_to_bytes, gradient_to_bytes
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming

BLOCK = 1 << 22
"""The bytes of rows in a message, about."""

Kind = pb.RowsRequest


class StandbyRows:
    """What a standby has of the tables of its shard. Not thread-safe.

    Attributes:
        whole: it has all rows.
    """

    def __init__(self) -> None:
        self.whole = False
        self._reached: dict[str, int] = {}  # the standby has the rows with lower numbers
        self._since = NEVER  # as they were at this version

    def messages(
        self, tables: ShardTables, version: int, order: Application, slow: Callable[[], bool]
    ) -> Iterator[tuple[pb.RowsRequest, bytes]]:
        """What the standby needs before the order for `version`, with the bodies.

        Nothing may be applied meanwhile.

        Args:
            slow: whether enough rows were sent with this round.
        """
        if not self.whole:
            yield from self._rows(tables, version - 1, slow)
        if self.whole and tables.used and not order.assigns:
            request = Kind(what=Kind.MEAN, version=version, attempt=order.attempt)
            body: list[bytes] = []
            for mean in tables.means(order).values():
                request.tables.add(table=spec_to_text(mean.spec), rows=len(mean.gradient.ids))
                body += gradient_to_bytes(mean.gradient)
            yield request, b"".join(body)

    def _rows(
        self, tables: ShardTables, version: int, slow: Callable[[], bool]
    ) -> Iterator[tuple[pb.RowsRequest, bytes]]:
        extents = tables.extents()
        ranges = [(name, self._since, 0, reached) for name, reached in self._reached.items()]
        enough = False
        while ranges or not enough:
            if not ranges:
                name = next((name for name, (_, all_) in extents.items() if self._lacks(name, all_)), None)
                if name is None:
                    break
                start, enough = self._reached.get(name, 0), slow()
                spec, extent = extents[name]
                self._reached[name] = stop = min(extent, start + max(1, BLOCK // spec.row_bytes))
                ranges = [(name, NEVER, start, stop)]
            name, since, start, stop = ranges.pop()
            part = tables.parts(name, since, start, stop)
            if part is None:
                raise Refused(RefusalCode.INVALID, f"too many rows of the table {name!r} were dropped since")
            columns = columns_to_part(extents[name][0], part)
            yield Kind(what=Kind.PART, version=version), columns_to_bytes(columns)
        self._since = version
        if not any(self._lacks(name, extent) for name, (_, extent) in extents.items()):
            yield Kind(what=Kind.WHOLE, version=version), b""
            self.whole = True

    def _lacks(self, name: str, extent: int) -> bool:
        """Whether the standby does not have all of a table, of which it has to hear even without rows."""
        return self._reached.get(name, -1) < extent


class FollowingTables(ShardTables):
    """The tables of a standby. Thread-safe."""

    def __init__(self, shard: int, shards: int) -> None:
        super().__init__(shard, shards)
        self.whole = False
        self._version = 0
        self._first = 0  # no version before it has tables
        self._means: dict[tuple[int, int], dict[str, Mean]] = {}

    def follow(self, request: pb.RowsRequest, incoming: Incoming) -> None:
        """Take over what `StandbyRows.messages` has made. Blocks.

        Raises:
            Malformed, CheckpointCorrupt: it is something else.
            Refused: MODEL_MISMATCH.
        """
        if request.what == Kind.MEAN:
            means = read_gradients(request.tables, incoming)
            with self._lock:
                if not self._tables:
                    self._first = request.version
                for mean in means.values():
                    self._table(mean.spec)
                if request.version > self._version:
                    self._means[request.version, request.attempt] = means
        elif request.what == Kind.PART:
            spec, part = part_of(columns_from_bytes(read_body(incoming)))
            with self._lock:
                self._table(spec).merge(part)
        else:
            with self._lock:
                self.whole, self._version = True, request.version

    def require(self, version: int, order: Application) -> None:
        """Raise Refused (INVALID) unless the mean gradients of this round are here, if they are needed."""
        with self._lock:
            needed = self.whole and self._tables and version >= max(self._first, self._version + 1)
            if needed and (version, order.attempt) not in self._means:
                text = f"the standby of shard {self._shard} has no rows of version {version}"
                raise Refused(RefusalCode.INVALID, text)

    def apply(self, version: int, order: Application) -> None:
        """Make a version, unless its rows have arrived, or will."""
        with self._lock:
            if self.whole and version > self._version:
                self._make(version, self._means.get((version, order.attempt), {}), order)
                self._version = version
                self._means = {known: each for known, each in self._means.items() if known[0] > version}

    def snapshot(
        self, version: int, *, since: int | None = None, patience: timedelta = timedelta(0)
    ) -> TablesAt:
        """See `ShardTables`. Raises Refused (NOT_READY): the rows are of another version."""
        with self._lock:
            if self._tables and self._version != version:
                text = f"the rows on the standby of shard {self._shard} are of version {self._version}"
                raise Refused(RefusalCode.NOT_READY, f"{text}, not {version}")
        return super().snapshot(version, since=since, patience=patience)
