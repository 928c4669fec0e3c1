"""How long ids have not occurred, in time that a job was training, for tables with `expire_after="7d"`.

A row has the last version of its id, so a few versions with their times say which rows are too old. Who makes
the versions decides their times, once for all: whoever makes the same versions later comes to the same rows.
"""

from __future__ import annotations

import re
from datetime import timedelta

import torch

PARTS = 32
"""Into how many parts a time is divided. A row expires at most two of them late."""

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def lasting(text: str) -> timedelta | None:
    """The time that a text such as "7d" says, in whole units; None if it says none."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text, re.ASCII)
    return None if found is None else timedelta(**{_UNITS[found[2]]: int(found[1])})


class Ages:
    """Says of each version which rows have expired. Not thread-safe.

    A pause between two versions counts as a part of the time at most, so a job that was stopped keeps its
    rows. All times are in milliseconds.

    Args:
        after: for how long the id of a row has not occurred when it expires.

    Attributes:
        oldest: rows with an earlier last version have expired.
    """

    def __init__(self, after: timedelta) -> None:
        self._after = after // timedelta(milliseconds=1)
        self._part = self._after // PARTS
        self.oldest = 0
        self._clock, self._last = 0, -1  # time that has passed; when the last version was made
        self._marks: list[tuple[int, int]] = []  # versions, and when the clock was there

    @property
    def begun(self) -> bool:
        """Whether it knows of a version."""
        return self._last >= 0

    def advance(self, version: int, now: float) -> None:
        """A version is made, at a time in seconds of any clock. Where it goes back, no time has passed."""
        at = int(now * 1000)
        if self._last >= 0:
            self._clock += min(max(at - self._last, 0), self._part)
        self._last = at
        if not self._marks or self._clock - self._marks[-1][1] >= self._part:
            self._marks.append((version, self._clock))
        while self._marks and self._marks[0][1] <= self._clock - self._after:
            self.oldest, _ = self._marks.pop(0)

    def to_tensor(self) -> torch.Tensor:
        """All that it knows, as a flat tensor of int64."""
        pairs = [(self.oldest, self._clock), (self._last, 0), *self._marks]
        return torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1)

    def learn(self, known: torch.Tensor) -> None:
        """Take over what another one has given (`to_tensor`), unless this one knows of more time.

        Raises:
            ValueError, RuntimeError: it is something else.
        """
        (oldest, clock), (last, _), *marks = known.to(torch.int64).view(-1, 2).tolist()
        if (clock, len(marks)) >= (self._clock, len(self._marks)):
            self.oldest, self._clock, self._last = oldest, clock, last
            self._marks = [(version, at) for version, at in marks]
