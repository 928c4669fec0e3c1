"""Rows as they are at one moment, which are read in blocks while they change.

This is copy on write: before a row changes it is copied, once, unless its block was read. So the copies take
no more memory than the rows that change while others are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_ps.embedding.columns import Column, Rows
from elastic_ps.embedding.init import Ids

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]


class RowsAt:
    """Some rows of `rows`, as they are now. Not thread-safe.

    Args:
        columns: what is read of each row, by names; `seen` is the one of `Rows.seen`.
        since: only the rows whose last version is this one or a later one.
        size: the row numbers in a block.

    Attributes:
        counts: how many rows each block has.
        nbytes: the memory of the copies, in bytes.
    """

    def __init__(
        self, rows: Rows, columns: Mapping[str, Column], *, seen: str, since: int, size: int
    ) -> None:
        self._columns, self._seen, self._since, self._size = columns, seen, max(since, 0), size
        self._extent, self.nbytes = rows.extent, 0
        self._done = np.zeros(rows.extent, dtype=np.bool_)  # copied, or read
        self._copies: dict[int, list[tuple[Ids, Columns]]] = {}
        starts = range(0, rows.extent, size)
        self.counts = [len(rows.seen_since(since, start, start + size)) for start in starts]
        rows.watching.add(self)

    def keep(self, numbers: Ids) -> None:
        """Copy these rows, which are about to change."""
        numbers = numbers[numbers < self._extent]
        numbers = np.sort(numbers[~self._done[numbers]])
        if not len(numbers):
            return
        self._done[numbers] = True
        blocks, starts = np.unique(numbers // self._size, return_index=True)
        for block, part in zip(blocks.tolist(), np.split(numbers, starts[1:]), strict=True):
            copies = {name: column.array[part] for name, column in self._columns.items()}
            self._copies.setdefault(block, []).append((part, copies))
            self.nbytes += sum(each.nbytes for each in copies.values())

    def read(self, block: int) -> dict[str, npt.NDArray[Any]]:
        """The rows of a block, in memory of their own. Their copies are freed."""
        start, stop = block * self._size, min((block + 1) * self._size, self._extent)
        found = {name: column.array[start:stop].copy() for name, column in self._columns.items()}
        for part, copies in self._copies.pop(block, ()):
            for name, each in copies.items():
                found[name][part - start] = each
                self.nbytes -= each.nbytes
        self._done[start:stop] = True
        wanted = found[self._seen] >= self._since
        return {name: column[wanted] for name, column in found.items()}

    def shapes(self, block: int) -> dict[str, tuple[np.dtype[Any], int]]:
        """The dtypes, and the numbers of elements, of what `read` gives."""
        count = self.counts[block]
        return {name: (column.dtype, count * column.width) for name, column in self._columns.items()}
