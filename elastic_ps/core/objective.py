"""Keeps an objective for the staleness of steps, by choosing how a job makes versions.

The ways are ordered by the staleness that they allow: `sync`, `bounded` by the objective, and the user's own
mode, or `async`. The first two meet the objective by construction. If steps are too stale, the next tighter
way is chosen. To loosen is a guess, because a bound hides how stale steps would become without it: when steps
have been at most half as stale as allowed for a while, the next looser way is tried. After each wrong guess
the next one takes twice as long, as in TCP's retransmission timer, so that a job with uneven workers does not
oscillate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.mutable import without_options_of_other_modes

CALM = 3
"""The number of calm windows in a row before a looser way is first tried."""

LONGEST = 96
"""The largest number of calm windows before a looser way is tried."""


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
    """The consistency in another mode, without the options that this mode lacks."""
    if desired.mode == mode and not options:
        return desired
    said = desired.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return Consistency.model_validate(without_options_of_other_modes({**said, "mode": mode, **options}))


@dataclass
class Objective:
    """The decisions for one job.

    Attributes:
        calm: the number of windows in a row in which steps were at most half as stale as allowed.
        needed: the number of calm windows before a looser way is tried.
        trying: whether a looser way is on trial.
    """

    calm: int = 0
    needed: int = CALM
    trying: bool = False

    def decide(self, p99: int, most: int) -> Literal[-1, 0, 1]:
        """Judge the last window: -1 for the next tighter way, 1 for the next looser one, 0 for no change.

        Args:
            p99: the 99th percentile of the staleness of the window's steps.
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
        if self.trying:  # the trial has lasted for as long as it took to begin it
            self.needed, self.trying = CALM, False
        self.calm = 0
        return 1 if most else 0

    def tried(self) -> None:
        """Note that the looser way is taken."""
        self.trying = True
