"""The tables of a shard at one version, which a thread writes in blocks while others make the next versions.

Each block of rows is a part of its own in the file, with the table's description; see `stored`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from elastic_ps.codec.state import Stored
from elastic_ps.embedding.columns import NEVER
from elastic_ps.embedding.copies import RowsAt
from elastic_ps.embedding.stored import StoredRows, columns_to_part
from elastic_ps.embedding.table import State, Table


class _Part(NamedTuple):
    """A block of a table: `columns` has those that are known, `rows` those that are read later."""

    number: int
    block: int
    columns: Mapping[str, torch.Tensor]
    rows: Sequence[RowsAt]


class TablesAt:
    """Tables as they are now, or their rows that have changed. One thread reads them. See `Snapshot`.

    Args:
        read: is notified when a block was read. Its lock guards the tables, and is held.
        since: only what has changed after this version, which is known; `NEVER`: all.
        patience: for how long steps wait for the reader altogether.

    Attributes:
        described: all columns, in the order in which they are read. Only dtypes and shapes are true.
        pause: for how long steps have waited.
    """

    BLOCK = 1 << 25
    """The bytes of a block, about."""
    SHARE = 1 / 16
    """Copies of rows that change take no more than this share of the tables, as long as steps may wait."""
    ROOM = 1 << 24
    """The bytes that the copies may take in any case."""

    def __init__(
        self, tables: Sequence[Table], read: threading.Condition, *, since: int, patience: timedelta
    ) -> None:
        self._read, self._patience = read, patience
        self._parts: list[_Part] = []
        self.pause = timedelta(0)
        self._room = max(self.ROOM, self.SHARE * sum(table.nbytes for table in tables))
        for table in tables:
            rows = table.rows_now(since, size=max(1, self.BLOCK // table.spec.row_bytes))
            removed = {} if since == NEVER else table.removed_since(since)
            assert removed is not None, "it is not known what was removed"
            for block in range(max(1, *(len(each.counts) for each in rows))):
                state: State = {**table.header(), **removed}
                there = [each for each in rows if block < len(each.counts)]
                known = columns_to_part(table.spec, state)
                self._parts.append(_Part(len(self._parts), block, known, there))
                removed = {}
        self.described = [each for part in self._parts for each in _described(part)]

    @property
    def nbytes(self) -> int:
        """The memory of the copies, in bytes. The lock is held."""
        return sum(rows.nbytes for part in self._parts if part.block == 0 for rows in part.rows)

    def wait(self) -> None:
        """Wait until there is room for copies of rows that are about to change. The lock is held."""
        if self.nbytes > self._room:
            began, left = time.monotonic(), self._patience - self.pause
            self._read.wait_for(lambda: self.nbytes <= self._room, timeout=max(0.0, left.total_seconds()))
            self.pause += timedelta(seconds=time.monotonic() - began)

    def read(self) -> Iterator[Stored]:
        """Yield each column once. Blocks for copies."""
        for part in self._parts:
            with self._read:
                found = dict(part.columns)
                for rows in part.rows:
                    found |= {
                        name: torch.from_numpy(each).view(-1) for name, each in rows.read(part.block).items()
                    }
                self._read.notify_all()
            for name, value in found.items():
                if value.numel():
                    yield StoredRows(part.number, 0, name, value)


def _described(part: _Part) -> Iterator[Stored]:
    columns = dict(part.columns)
    for rows in part.rows:
        for name, (dtype, elements) in rows.shapes(part.block).items():
            columns[name] = torch.empty(elements, dtype=getattr(torch, dtype.name), device="meta")
    for name, value in columns.items():
        if value.numel():
            yield StoredRows(part.number, 0, name, value)
