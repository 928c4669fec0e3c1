"""The order of the records of an epoch, if blocks of consecutive records stay together.

A random order of single records makes every batch read from everywhere. On object storage, and in files that
are read in parts, that costs a request for each record. Here the blocks of the data set are permuted, and the
records of the next `buffer` blocks are shuffled among each other. These blocks are a *run*. A worker that has
begun a run is given its other records, too, so it reads whole blocks. That is how `webdataset` and Hugging
Face's streams order records, except that no record moves out of its run, so that every position is computed
from the seed alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np
import numpy.typing as npt

from elastic_ps.data.shuffle import Shuffled

MOST_BLOCKS = 1 << 22
"""Each epoch's order of blocks is a list of 24 bytes for a block."""

MOST_TEXT = 2_000_000
"""The most bytes of an order's text, which goes with a worker's first request for records."""

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Order:
    """How the records of each epoch are ordered: the same in all workers.

    Args:
        records: in an epoch.
        blocks: how many records each block has, in the data set's order; one number: each but the last, which
            has the rest.
        buffer: how many blocks are shuffled together.
        shuffle: False: the records keep the data set's order, and only runs follow from the blocks.
        seed: of the random order.

    Raises:
        ValueError: the blocks do not have `records` records, or there are more than `MOST_BLOCKS`.
    """

    records: int
    blocks: int | Sequence[int]
    buffer: int = 1
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = [self.blocks] if isinstance(self.blocks, int) else self.blocks
        if min(numbers, default=0) < (1 if isinstance(self.blocks, int) else 0) or self.buffer < 1:
            raise ValueError(
                f"the smallest block has {min(numbers, default=0)} records, and data.order.buffer is "
                f"{self.buffer}; expected 1 or more for both"
            )
        if not isinstance(self.blocks, int) and sum(self.blocks) != self.records:
            raise ValueError(
                f"the blocks have {sum(self.blocks)} records together, but the data set has {self.records}"
            )
        count = -(-self.records // self.blocks) if isinstance(self.blocks, int) else len(self.blocks)
        if count > MOST_BLOCKS:
            raise ValueError(
                f"the data set has {count} blocks; at most {MOST_BLOCKS} are possible. Make blocks of "
                f"{-(-self.records // MOST_BLOCKS)} records or more"
            )

    @property
    def sizes(self) -> _Numbers:
        """How many records each block has."""
        if not isinstance(self.blocks, int):
            return np.asarray(self.blocks, dtype=np.int64)
        starts = np.arange(0, self.records, self.blocks, dtype=np.int64)
        return np.minimum(self.blocks, self.records - starts)

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The order of an epoch. The last few are kept."""
        return _of_epoch(self, epoch)

    def run_end(self, epoch: int, position: int) -> int:
        """The first position behind the run that has this position."""
        return self.of_epoch(epoch).run_end(position)

    def to_text(self) -> str:
        """JSON for `from_text`, without `records` and `seed`, which the parameter server knows."""
        blocks = self.blocks if isinstance(self.blocks, int) else list(self.blocks)
        return json.dumps([blocks, self.buffer, self.shuffle])

    @classmethod
    def from_text(cls, text: str, *, records: int, seed: int) -> Order:
        """Raises ValueError: it is not an order of `records` records."""
        try:
            blocks, buffer, shuffle = json.loads(text)
            numbers = [buffer, *([blocks] if isinstance(blocks, int) else blocks)]
            if not all(type(number) is int for number in numbers):
                raise TypeError("a number was expected")
            return cls(records, blocks, buffer, bool(shuffle), seed)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no order of records: {text[:100]}") from error


class EpochOrder(Sequence[int]):
    """The index of the record at each position of an epoch. A slice is a list. Not thread-safe."""

    def __init__(self, order: Order, epoch: int) -> None:
        sizes, shuffled = order.sizes, order.shuffle
        self._records, self._shuffle, self._seed, self._epoch = order.records, shuffled, order.seed, epoch
        starts = np.cumsum(sizes) - sizes
        if shuffled:
            blocks = np.array(
                Shuffled(len(sizes), seed=f"{order.seed}/blocks", epoch=epoch)[:], dtype=np.int64
            )
            starts, sizes = starts[blocks], sizes[blocks]
        self._ends = np.cumsum(sizes)
        self._shift = starts - (self._ends - sizes)  # of a block: index of a record less its position
        self._runs = self._ends[order.buffer - 1 :: order.buffer]
        if not len(self._runs) or self._runs[-1] != self._records:
            self._runs = np.append(self._runs, self._records)
        self._inner: tuple[int, Shuffled] | None = None  # of the run that was used last

    def __len__(self) -> int:
        return self._records

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if not isinstance(position, slice):
            position = range(self._records)[position]
            return self[position : position + 1][0]
        start, stop, step = position.indices(self._records)
        if step != 1:
            return [self[each] for each in range(start, stop, step)]
        result: list[int] = []
        while start < stop:
            end = min(stop, self.run_end(start))
            result += self._of_run(start, end)
            start = end
        return result

    def __iter__(self) -> Iterator[int]:
        start = 0
        while start < self._records:
            end = self.run_end(start)
            yield from self._of_run(start, end)
            start = end

    def run_end(self, position: int) -> int:
        """The first position behind the run that has this position."""
        return int(self._runs[np.searchsorted(self._runs, position, side="right")])

    def _of_run(self, start: int, stop: int) -> list[int]:
        """The indexes at some positions of one run."""
        places = np.arange(start, stop)
        if self._shuffle:
            run = int(np.searchsorted(self._runs, start, side="right"))
            first = int(self._runs[run - 1]) if run else 0
            if self._inner is None or self._inner[0] != run:
                seed = f"{self._seed}/run/{run}"
                self._inner = run, Shuffled(int(self._runs[run]) - first, seed=seed, epoch=self._epoch)
            places = first + np.array(self._inner[1][start - first : stop - first], dtype=np.int64)
        indexes: list[int] = (
            places + self._shift[np.searchsorted(self._ends, places, side="right")]
        ).tolist()
        return indexes


@lru_cache(maxsize=4)
def _of_epoch(order: Order, epoch: int) -> EpochOrder:
    return EpochOrder(order, epoch)
