"""How much each worker is given to compute, by its measured speed.

A worker of half the speed gets half the records, so that all are done at the same time. A measured speed
moves all the time. So the one that counts is kept until the measured one differs from it by more than
`TOLERANCE`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TOLERANCE = 0.15
"""By what share of it a speed may be off before it is replaced."""

LEAST = 1 / 16
"""The smallest weight, so that a worker that was slow once is measured again on more than a record."""


@dataclass
class Balance:
    """The speeds that count. Workers are named by their incarnation.

    Attributes:
        speeds: in records per second, of the workers that were measured.
    """

    speeds: dict[int, float] = field(default_factory=dict)

    def follow(self, seconds: Mapping[int, float], members: Iterable[int]) -> None:
        """Take over the speeds that are too far off. Call it between two versions.

        Args:
            seconds: what each worker takes for a record, as measured; positive.
            members: who is here; others are forgotten.
        """
        here = set(members)
        self.speeds = {who: speed for who, speed in self.speeds.items() if who in here}
        for who in here & seconds.keys():
            measured, counts = 1 / seconds[who], self.speeds.get(who)
            if counts is None or abs(measured - counts) > TOLERANCE * counts:
                self.speeds[who] = measured

    def weight(self, who: int) -> float:
        """A worker's speed over that of the fastest: above 0, and 1 at most.

        One that was not measured counts as the median of the others.
        """
        if not self.speeds:
            return 1.0
        speed = self.speeds.get(who, statistics.median(self.speeds.values()))
        return max(LEAST, speed / max(self.speeds.values()))

    def copy(self) -> Balance:
        """The same speeds; what is done to the one is not done to the other."""
        return Balance(dict(self.speeds))
