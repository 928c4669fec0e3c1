"""Rows in columns of memory: what is known of each id, and the numbers that belong to it."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic_ps.codec.rows import put
from elastic_ps.embedding.index import Index
from elastic_ps.embedding.init import Ids

_SMALLEST = 1 << 12
_GROWTH = 1.25
_LARGE_PAGE = 1 << 21  # the kernel aligns memory of such a size, so large pages stay whole when it moves
_REMEMBERED = 1 << 16
NEVER = -1
"""The last version of a row that is free."""


class Column:
    """`width` numbers for each row, in memory that grows without a copy: the kernel moves the pages.

    Pages that no row has used take no memory. A view must not outlive the call that made it, because memory
    that is in use cannot grow.

    Attributes:
        dtype, width: of a row.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int = 1, *, rows: int = _SMALLEST) -> None:
        self.dtype, self.width = np.dtype(dtype), width
        size = rows * self.row_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        self._advise()

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * self.width

    def _advise(self) -> None:
        if len(self._memory) >= 1 << 24:  # rows that are used come together, so large pages do not stay empty
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def reserve(self, rows: int) -> None:
        """Have room for so many rows. New ones are 0."""
        if rows * self.row_bytes > len(self._memory):
            size = int(rows * _GROWTH) * self.row_bytes
            self._memory.resize(-(-size // _LARGE_PAGE) * _LARGE_PAGE)
            self._advise()

    @property
    def array(self) -> npt.NDArray[Any]:
        """All rows, of shape (rows,) if the width is 1, else (rows, width)."""
        rows = len(self._memory) // self.row_bytes
        flat = np.frombuffer(self._memory, dtype=self.dtype, count=rows * self.width)
        return flat if self.width == 1 else flat.reshape(rows, self.width)

    @property
    def tensor(self) -> torch.Tensor:
        """All rows, of shape (rows, width)."""
        return torch.from_numpy(self.array).view(-1, self.width)

    def put(self, rows: Ids, values: torch.Tensor) -> None:
        """Replace these rows, each once, by values of shape (rows, width)."""
        put(self.tensor, torch.from_numpy(rows), values)


class Watching(Protocol):
    """Copies rows before they change."""

    def keep(self, numbers: Ids) -> None:
        """Copy these rows."""


class Rows:
    """Rows by ids. Not thread-safe.

    For each row it has its id, how often the id has occurred (`counts`), and the last version in which it did
    (`seen`), beside the columns that are given. A row costs 21.3 to 24 bytes beside its columns.

    Attributes:
        now: the version that is being made.
        watching: who copies rows before they change. It does not keep them alive.
    """

    def __init__(self, columns: Sequence[Column] = ()) -> None:
        self.ids, self.counts, self.seen = Column(np.int64), Column(np.int32), Column(np.int32)
        self._columns = (self.ids, self.counts, self.seen, *columns)
        self._index = Index()
        self._free = np.empty(0, dtype=np.int64)
        self._last = 0  # rows that were ever used
        self.now = 0
        self.watching: weakref.WeakSet[Watching] = weakref.WeakSet()
        self._removed: list[tuple[int, Ids]] = []  # at which version, and the ids
        self._remembered, self._since = 0, NEVER

    def __len__(self) -> int:
        return self._last - len(self._free)

    @property
    def nbytes(self) -> int:
        """The memory of all rows that were ever used, in bytes."""
        return self._last * sum(each.row_bytes for each in self._columns) + self._index.nbytes

    def find(self, ids: Ids) -> Ids:
        """The row of each id, or -1. Ids may be repeated."""
        return self._index.find(ids, self.ids.array)

    def add(self, ids: Ids, counts: Ids, seen: int | Ids) -> Ids:
        """Make rows of ids that have none, each once; returns the rows. Free ones are used first."""
        reused = min(len(ids), len(self._free))
        fresh = np.arange(self._last, self._last + len(ids) - reused)
        rows = np.concatenate([self._free[len(self._free) - reused :][::-1], fresh])
        self._free = self._free[: len(self._free) - reused]
        self._last += len(fresh)
        for column in self._columns:
            column.reserve(self._last)
        self._before_change(rows)
        self.ids.array[rows] = ids
        self.counts.array[rows] = np.minimum(counts, np.iinfo(np.int32).max)
        self.seen.array[rows] = seen
        self._index.add(ids, rows, self.ids.array, self._last)
        return rows

    def touch(self, rows: Ids, counts: Ids, version: int) -> None:
        """Note that the ids of these rows have occurred so often in a version."""
        self._before_change(rows)
        total = self.counts.array[rows] + counts
        self.counts.array[rows] = np.minimum(total, np.iinfo(np.int32).max)
        self.seen.array[rows] = version

    def remove(self, rows: Ids) -> None:
        """Free these rows."""
        if len(rows):
            self._before_change(rows)
            ids = self.ids.array[rows]
            self._index.remove(ids, self.ids.array)
            self.seen.array[rows] = NEVER
            self._free = np.concatenate([self._free, rows[::-1]])
            self._removed.append((self.now, ids))
            self._remembered += len(ids)
            if self._remembered > max(_REMEMBERED, len(self) // 8):
                self._removed = [each for each in self._removed if each[0] == self.now]
                self._remembered, self._since = sum(len(ids) for _, ids in self._removed), self.now - 1

    def _before_change(self, rows: Ids) -> None:
        for each in self.watching:
            each.keep(rows)

    def forget_removed(self, since: int) -> None:
        """Begin to remember what is removed after version `since`."""
        self._removed, self._remembered, self._since = [], 0, since

    def removed_since(self, version: int) -> Ids | None:
        """The ids whose rows were removed after a version, though they may have rows again.

        None if so many were removed that they are not known any more. Those of the last version are.
        """
        if version < self._since:
            return None
        return np.unique(
            np.concatenate([np.empty(0, dtype=np.int64), *(ids for at, ids in self._removed if at > version)])
        )

    def seen_before(self, version: int, start: int = 0, stop: int | None = None) -> Ids:
        """The rows from `start` to `stop` whose last version is before this one."""
        stop = self._last if stop is None else min(stop, self._last)
        part = self.seen.array[start:stop]
        return start + np.flatnonzero((part < version) & (part != NEVER))

    def seen_since(self, version: int, start: int = 0, stop: int | None = None) -> Ids:
        """The rows from `start` to `stop` whose last version is this one or a later one."""
        stop = self._last if stop is None else min(stop, self._last)
        return start + np.flatnonzero(self.seen.array[start:stop] >= max(version, 0))

    @property
    def extent(self) -> int:
        """The number of rows that were ever used: row numbers are below it."""
        return self._last
