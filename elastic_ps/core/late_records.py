"""Records whose steps have come too late: after some times, a step on them has a place in its round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ps.core.ledger import Range

PATIENCE = 2
"""A step on the same records may come too late so often. The next one has a place in its round."""


@dataclass
class LateRecords:
    """Where records begin whose steps came too late, by epoch and position, and how often."""

    times: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, first: Range) -> None:
        """A step came too late on records that begin with these."""
        self.times[first.epoch, first.start] += 1

    def owed(self, held: Callable[[], Mapping[int, Sequence[Range]]]) -> set[int]:
        """The workers that hold records whose steps were turned away `PATIENCE` times: now they count."""
        overdue = [place for place, times in self.times.items() if times >= PATIENCE]
        if not overdue:
            return set()
        return {w for w, ranges in held().items() if any(_is_in(place, ranges) for place in overdue)}

    def trained(self, ranges: Sequence[Range]) -> None:
        """These records are in the model."""
        for place in [place for place in self.times if _is_in(place, ranges)]:
            del self.times[place]


def _is_in(place: tuple[int, int], ranges: Iterable[Range]) -> bool:
    """Whether the record of this epoch and position is one of `ranges`."""
    epoch, position = place
    return any(each.epoch == epoch and each.start <= position < each.stop for each in ranges)
