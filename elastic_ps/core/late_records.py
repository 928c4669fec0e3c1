"""Remembers records whose steps were late. After some times, a step on them gets a place in its round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ps.core.ledger import Range

PATIENCE = 2
"""The number of late steps on the same records after which the next one gets a place in its round."""


@dataclass
class LateRecords:
    """The first positions of records whose steps were late, by epoch, and how often they were."""

    times: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, first: Range) -> None:
        """Note a late step on records that begin with these."""
        self.times[first.epoch, first.start] += 1

    def owed(self, held: Callable[[], Mapping[int, Sequence[Range]]]) -> set[int]:
        """The workers that hold records whose steps were late `PATIENCE` times."""
        overdue = [place for place, times in self.times.items() if times >= PATIENCE]
        if not overdue:
            return set()
        return {w for w, ranges in held().items() if any(_is_in(place, ranges) for place in overdue)}

    def trained(self, ranges: Sequence[Range]) -> None:
        """Forget records that are in the model, or were skipped."""
        for place in [place for place in self.times if _is_in(place, ranges)]:
            del self.times[place]


def _is_in(place: tuple[int, int], ranges: Iterable[Range]) -> bool:
    """Whether the record of this epoch and position is one of `ranges`."""
    epoch, position = place
    return any(each.epoch == epoch and each.start <= position < each.stop for each in ranges)
