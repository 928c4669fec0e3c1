"""Divides the work among workers by their measured speeds.

A worker of half the speed gets half the records, so that all finish at the same time. Since measured speeds
fluctuate, the speed in use is kept until the measured one differs from it by more than `TOLERANCE`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TOLERANCE = 0.15
"""The relative error of a speed above which it is replaced."""

LEAST = 1 / 16
"""The smallest weight: a worker that was slow once is measured again on more than one record."""


@dataclass
class Balance:
    """The speeds in use, by incarnation.

    Attributes:
        speeds: records per second of the workers that were measured.
    """

    speeds: dict[int, float] = field(default_factory=dict)

    def follow(self, seconds: Mapping[int, float], members: Iterable[int]) -> None:
        """Replace the speeds that are too far off. Call it between two versions.

        Args:
            seconds: the measured time of each worker for a record; positive.
            members: the present workers; others are forgotten.
        """
        here = set(members)
        self.speeds = {who: speed for who, speed in self.speeds.items() if who in here}
        for who in here & seconds.keys():
            measured, counts = 1 / seconds[who], self.speeds.get(who)
            if counts is None or abs(measured - counts) > TOLERANCE * counts:
                self.speeds[who] = measured

    def weight(self, who: int) -> float:
        """A worker's speed divided by that of the fastest: above 0, at most 1.

        A worker that was not measured counts as the median of the others.
        """
        if not self.speeds:
            return 1.0
        speed = self.speeds.get(who, statistics.median(self.speeds.values()))
        return max(LEAST, speed / max(self.speeds.values()))
