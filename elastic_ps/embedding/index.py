"""From ids to row numbers: a hash table with open addressing, of which each step handles a whole batch.

The table holds row numbers only; the ids lie beside the rows. Its size need not be a power of two. The places
of an id are a hash, then that plus a distance, which is another hash and grows each time, scaled to the size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastic_ps.embedding.init import Ids, mixed

_EMPTY, _REMOVED = -1, -2
_FULLEST = 0.75
_PLACES = 2  # for each row, in a new table
_SMALLEST = 1 << 10
_AT_ONCE = 1 << 18
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_STRIDE = np.uint64(0x3FFFFFFF)
_TURN = np.uint64(0x9E3779B8)


class Index:
    """Which row each id has. Not thread-safe.

    It takes 5.3 to 8 bytes for a row. `ids` in the calls is the column of the ids of all rows.
    """

    def __init__(self) -> None:
        self._places = np.full(_SMALLEST, _EMPTY, dtype=np.int32)
        self._used = 0  # places that are not empty
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""
        return self._places.nbytes

    def find(self, wanted: Ids, ids: Ids) -> Ids:
        """The row of each id, or -1. Ids may be repeated."""
        hashes, strides = _hashes(wanted)
        found = np.take(self._places, self._at(hashes), mode="clip").astype(np.int64)
        there = np.take(ids, found, mode="clip") == wanted
        there &= found >= 0
        # Most are found at once, or are not there; few are looked for again.
        left = np.flatnonzero(~there & (found != _EMPTY))
        wanted, hashes, strides = wanted[left], hashes[left], strides[left]
        while len(left):
            hashes, strides = _next(hashes, strides)
            rows = np.take(self._places, self._at(hashes), mode="clip").astype(np.int64)
            there = (np.take(ids, rows, mode="clip") == wanted) & (rows >= 0)
            done = there | (rows == _EMPTY)
            found[left[done]] = rows[done]
            go_on = np.flatnonzero(~done)
            left, wanted, hashes, strides = left[go_on], wanted[go_on], hashes[go_on], strides[go_on]
        return found

    def add(self, new: Ids, rows: Ids, ids: Ids, last: int) -> None:
        """Add ids that are not there, each once. Grows if it becomes too full.

        Args:
            rows: their row numbers, which `ids` has already.
            last: the number of rows that were ever used, these included.
        """
        self._rows += len(new)
        if self._used + len(new) > _FULLEST * len(self._places):
            # Removed places go, too. The rows that are in use are those that are found under their own id.
            self._rebuild(rows, ids, last)
        else:
            self._put(new, rows)

    def remove(self, gone: Ids, ids: Ids) -> None:
        """Remove ids that are there."""
        hashes, strides = _hashes(gone)
        wanted = self.find(gone, ids)
        left = np.arange(len(gone))
        while len(left):
            places = self._at(hashes)
            hit = self._places[places] == wanted[left]
            self._places[places[hit]] = _REMOVED
            left = left[~hit]
            hashes, strides = _next(hashes[~hit], strides[~hit])
        self._rows -= len(gone)

    def _at(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return ((hashes * np.uint64(len(self._places))) >> _HALF).view(np.int64)

    def _put(self, new: Ids, rows: Ids) -> None:
        hashes, strides = _hashes(new)
        rows = rows.astype(np.int32)
        while len(rows):
            places = self._at(hashes)
            before = self._places[places]
            free = before < 0
            self._places[places[free]] = rows[free]  # of several ids at one place, one wins
            won = free & (self._places[places] == rows)
            self._used += int(np.count_nonzero(won & (before == _EMPTY)))
            rows = rows[~won]
            hashes, strides = _next(hashes[~won], strides[~won])

    def _rebuild(self, new: Ids, ids: Ids, last: int) -> None:
        used = np.zeros(last, dtype=np.bool_)
        used[self._places[self._places >= 0]] = True
        used[new] = True
        self._places = np.empty(0, dtype=np.int32)  # freed before the next is made
        self._places = np.full(max(_SMALLEST, _PLACES * self._rows), _EMPTY, dtype=np.int32)
        self._used = 0
        for start in range(0, last, _AT_ONCE):
            rows = start + np.flatnonzero(used[start : start + _AT_ONCE])
            self._put(ids[rows], rows)


def _hashes(ids: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The first place of each id, and the distance to its next one, of 2**32.

    The distance is odd, so that each place is reached, and more than a quarter, so that the step leads away.
    """
    hashes = mixed(ids.view(np.uint64))
    return hashes >> _HALF, (hashes & _STRIDE) | np.uint64(0x40000001)


def _next(
    hashes: npt.NDArray[np.uint64], strides: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The next place of each id, and the distance to the one after it.

    The distance changes, because one of about a quarter or a third would lead back to the same few places. It
    grows by a multiple of 4, with which each place is still reached: a * n**2 + b * n takes all values modulo
    2**32 if a is even and b is odd (Rivest 2001, Permutation polynomials modulo 2**w).
    """
    return (hashes + strides) & _LOW, (strides + _TURN) & _LOW
