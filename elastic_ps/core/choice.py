"""Chooses one of several codecs for a worker: the one whose steps take the shortest time.

Each candidate is tried for some steps. A candidate that loses more than the job allows is dropped. Then the
fastest is used. If the time of its steps changes, the network or the machine has changed, and all candidates
are tried again. The second fastest is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

TRIES = 3
"""The number of steps to try a candidate. The fastest one counts, since the first warms up."""

MARGIN = 0.15
"""A candidate replaces the present one if its steps are faster by this fraction."""

CHANGED = 1.5
"""If the mean time of a step grows or falls by this factor, all candidates are tried again."""

SETTLED = 8
"""The number of steps after which the mean time of a codec is known."""

AGAIN = 300
"""The number of steps after which the second fastest is tried again."""

SMOOTHING = 0.2
"""The weight of the newest step in the mean."""


class Tried(NamedTuple):
    """The measurements of a candidate.

    Attributes:
        seconds: the time to encode and push a step.
        error: the norm of the loss of a step's gradients, divided by their norm.
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
    """Tries candidates, and chooses one. Not thread-safe.

    Attributes:
        present: the chosen candidate; at first, the first one.
        reason: why it was chosen, in words.
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
        """The candidate for the next step."""
        return self._to_try[0] if self._to_try else self.present

    def note(self, seconds: float, error: float) -> None:
        """Note a step that was sent with `now`."""
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
