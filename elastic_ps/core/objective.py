"""Keeps an objective for the staleness of steps: chooses how a job makes versions, by what it measures.

The ways are ordered by how stale they let steps become: `sync`, `bounded` by the objective, and the one that
the person has named, or `async`. With the first two the objective holds by construction. So one decision is
easy: when steps are too stale, the next tighter way is due. The other one is a guess, because a bound hides
how stale steps would become without it: when steps have been half as stale as they may be for a while, the
bound does not matter, and the next looser way is tried. Each guess that turns out wrong makes the next one
take twice as long, as in TCP's retransmission timer. So a job whose workers have become uneven does not go
to and fro.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.mutable import without_options_of_other_modes

CALM = 3
"""Windows in a row after which a looser way is tried for the first time."""

LONGEST = 96
"""Windows that it takes at most."""


def ways(desired: Consistency) -> list[Consistency]:
    """The ways to make versions that a job with an objective may take, the tightest one first.

    One of them is `desired`, which has the objective. No step is ever more stale than `maxStaleness` allows,
    if that is set.
    """
    most = desired.max_staleness_p99 or 0
    found = [_in(desired, "sync")]
    if most and (desired.max_staleness is None or desired.max_staleness > most):
        found.append(_in(desired, "bounded", maxStaleness=most))
    return [*found, desired if desired.mode == "bounded" else _in(desired, "async")]


def _in(desired: Consistency, mode: str, **options: int) -> Consistency:
    """The same in another mode, without the options that this does not have."""
    if desired.mode == mode and not options:
        return desired
    said = desired.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return Consistency.model_validate(without_options_of_other_modes({**said, "mode": mode, **options}))


@dataclass
class Objective:
    """What was decided so far, for one job.

    Attributes:
        calm: windows in a row in which steps were at most half as stale as they may be.
        needed: after how many of them a looser way is tried.
        trying: a looser way was taken, and has not stood the test yet.
    """

    calm: int = 0
    needed: int = CALM
    trying: bool = False

    def decide(self, p99: int, most: int) -> Literal[-1, 0, 1]:
        """What follows from the last window: -1 for the next tighter way, 1 for the next looser one.

        Args:
            p99: the staleness that 99 of 100 steps of the window did not exceed.
            most: the objective.
        """
        if p99 > most:
            if self.trying:
                self.needed = min(2 * self.needed, LONGEST)
            self.calm, self.trying = 0, False
            return -1
        self.calm = self.calm + 1 if 2 * p99 <= most else 0
        if self.calm < self.needed:
            return 0
        if self.trying:  # it has stood the test for as long as it took to try it
            self.needed, self.trying = CALM, False
        self.calm = 0
        return 1 if most else 0

    def tried(self) -> None:
        """The looser way is taken."""
        self.trying = True
