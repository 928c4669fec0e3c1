"""How the processes of one worker share a batch: each has a slice of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ps.core.ledger import Range
from elastic_ps.core.portions import apportion


def slice_sizes(records: int, processes: int, *, least: int = 1) -> list[int]:
    """How many of a batch's records each process has: the same number, or one more for the first ones.

    Where there is not that much for all, the first ones have `least` at least, and the others nothing.
    """
    return apportion(records, [1.0] * processes, least=least)


class Slices:
    """The slices of the batches that the script has in hand.

    Args:
        rank, processes: of this process, and of its worker.

    Attributes:
        least: records of a slice; see `slice_sizes`.
    """

    def __init__(self, rank: int, processes: int) -> None:
        self._rank, self.processes, self.least = rank, processes, 1
        self._batches: dict[Range, int] = {}  # the records of a batch, by its first range

    def own(self, batch: list[int]) -> list[int]:
        """This process's slice of a batch.

        Of a batch with fewer records than processes, those without one compute on the slice of process 0, for
        the script has to compute on something. It has no weight then: see `has_none`.
        """
        if self.processes == 1:
            return batch
        sizes = slice_sizes(len(batch), self.processes, least=self.least)
        rank = self._rank if sizes[self._rank] else 0
        start = sum(sizes[:rank])
        return batch[start : start + sizes[rank]]

    def forget(self) -> None:
        """The script has no batch in hand."""
        self._batches.clear()

    def note(self, batch: Sequence[Range]) -> None:
        """The script is handed its slice of a batch."""
        self._batches[batch[0]] = sum(ranges.records for ranges in batch)

    def has_none(self, first: Range) -> bool:
        """Whether this process has no record of the noted batch that begins with these."""
        if self.processes == 1 or first not in self._batches:
            return False
        return not slice_sizes(self._batches[first], self.processes, least=self.least)[self._rank]

    def weights(self, computed: Sequence[Range]) -> list[float]:
        """For each process, its share of the records that a step is computed on.

        `computed` are those of some of the noted batches, one batch after the other.
        """
        total = [0] * self.processes
        for first in computed:
            sizes = slice_sizes(self._batches.get(first, 0), self.processes, least=self.least)
            total = [sum(pair) for pair in zip(total, sizes, strict=True)]
        return [records / max(1, sum(total)) for records in total]
