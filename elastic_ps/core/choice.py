"""Which of several codecs a worker uses: the one whose steps keep it busy for the shortest time.

Each candidate is tried for some steps. A candidate that loses more than the job allows is out. Then the
fastest is used. If its steps take another time than they did, the network (or the machine) has changed, and
all are tried again; now and then the second fastest is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

TRIES = 3
"""Steps with which a candidate is tried; the fastest counts, since the first one warms up."""

MARGIN = 0.15
"""A candidate replaces the present one if its steps take less by this share."""

CHANGED = 1.5
"""If the mean time of a step grows or falls by this factor, all candidates are tried again."""

SETTLED = 8
"""After this many steps with a codec its mean time is known."""

AGAIN = 300
"""After this many steps the second fastest is tried again."""

SMOOTHING = 0.2
"""Weight of the newest step in the mean."""


class Tried(NamedTuple):
    """What steps with a candidate are like.

    Attributes:
        seconds: for which a step is being encoded and pushed.
        error: the norm of what a step's gradients lose, divided by their norm.
    """

    seconds: float
    error: float


def choose(tried: Mapping[str, Tried], present: str, max_error: float) -> tuple[str, str]:
    """The candidate to use from now on, and why. At least one has an error of 0."""
    fit = {name: each for name, each in tried.items() if each.error <= max_error}
    best = min(fit, key=lambda name: fit[name].seconds)
    if best == present:
        return best, f"{best} is the fastest"
    if present not in fit:
        return best, f"{present} loses more than {max_error:g}; {best} is the fastest of the others"
    if fit[best].seconds > (1 - MARGIN) * fit[present].seconds:
        return present, f"{best} is hardly faster than {present}"
    return best, f"{best} takes {fit[best].seconds:.3g} s, {present} {fit[present].seconds:.3g} s"


class Choice:
    """Tries candidates, and chooses. Not thread-safe.

    Attributes:
        present: the one that is chosen; the first candidate, before any other has been tried.
        reason: why, in words.
    """

    def __init__(self, candidates: Sequence[str], max_error: float) -> None:
        self.present, self.reason = candidates[0], "nothing has been tried yet"
        self._candidates, self._max_error = tuple(candidates), max_error
        self._tried: dict[str, Tried] = {}
        self._to_try = list(candidates)
        self._tries = 0
        self._steps = 0
        self._mean = self._usual = 0.0

    @property
    def now(self) -> str:
        """The candidate that the next step is to be sent with."""
        return self._to_try[0] if self._to_try else self.present

    def note(self, seconds: float, error: float) -> None:
        """A step was sent with `now`."""
        if self._to_try:
            self._try(self._to_try[0], Tried(seconds, error))
            return
        self._steps += 1
        self._mean = seconds if self._steps == 1 else self._mean + SMOOTHING * (seconds - self._mean)
        if self._steps == SETTLED:
            self._usual = self._mean
        if error > self._max_error:
            self._tried[self.present] = Tried(self._mean, error)
            self._decide()
        elif self._steps > SETTLED and not self._usual / CHANGED < self._mean < self._usual * CHANGED:
            self._to_try = list(self._candidates)
        elif self._steps == AGAIN:
            self._tried[self.present] = Tried(self._mean, error)
            others = {
                n: t.seconds
                for n, t in self._tried.items()
                if n != self.present and t.error <= self._max_error
            }
            self._to_try = [min(others, key=others.__getitem__)] if others else []
            self._steps = SETTLED

    def _try(self, name: str, found: Tried) -> None:
        before = self._tried[name] if self._tries else found
        self._tried[name] = Tried(min(before.seconds, found.seconds), max(before.error, found.error))
        self._tries += 1
        if self._tries < TRIES and found.error <= self._max_error:
            return
        self._to_try.pop(0)
        self._tries = 0
        if not self._to_try:
            self._decide()

    def _decide(self) -> None:
        self.present, self.reason = choose(self._tried, self.present, self._max_error)
        self._steps = 0
