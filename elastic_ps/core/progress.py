"""Rates, curves and distributions from counters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

STALL = 10
"""A pause longer than the window, and than so many usual ones, is a stall. After one, the next pause is a
stall only if the counter has grown for so many times its length: else such pauses are usual."""


@dataclass
class Rate:
    """A counter's growth per second over the last `window` seconds, but for a stall that has ended."""

    window: float = 5.0
    _points: deque[tuple[float, int]] = field(default_factory=deque)
    _resumed: float = -math.inf
    """When the last stall ended. The times of older points are moved towards it."""

    def add(self, count: int, now: float) -> None:
        """Note the counter's value. Points closer than a hundredth of the window are merged."""
        pause = now - self._points[-1][0] if self._points else math.inf
        if pause < self.window / 100:
            return
        if len(self._points) > 1:
            usual = (self._points[-1][0] - self._points[0][0]) / (len(self._points) - 1)
            if pause > max(self.window, STALL * usual):
                if self._points[-1][0] - self._resumed > STALL * pause:  # as if no time had passed meanwhile
                    self._points = deque((at + pause - usual, before) for at, before in self._points)
                    self._resumed = now
                else:
                    self._points = deque(point for point in self._points if point[0] >= self._resumed)
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] <= now - self.window:
            self._points.popleft()

    def per_second(self, count: int, now: float) -> float | None:
        """The rate; None before it is known."""
        if not self._points or now - self._points[0][0] < 1e-3:
            return None
        started, first = self._points[0]
        return (count - first) / (now - started)


@dataclass
class Curve:
    """Points (version, value) with bounded memory: when full, every second one is dropped."""

    limit: int = 1024
    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    _skipped: int = 0

    def add(self, version: int, value: float) -> None:
        self._skipped += 1
        if self._skipped < self.stride:
            return
        self._skipped = 0
        self.points.append((version, value))
        if len(self.points) > self.limit:
            self.points = self.points[::2]
            self.stride *= 2


@dataclass
class Distribution:
    """A histogram of numbers that are not negative. Its memory grows with the logarithm of the largest one.

    Numbers from 100 on are rounded down to two significant digits; `largest` is exact.
    """

    counts: dict[int, int] = field(default_factory=dict)
    largest: int = 0

    def add(self, numbers: Iterable[int]) -> None:
        """Add numbers."""
        for number in numbers:
            unit = 1 if number < 100 else 10 ** (len(str(number)) - 2)
            rounded = number // unit * unit
            self.counts[rounded] = self.counts.get(rounded, 0) + 1
            self.largest = max(self.largest, number)

    @property
    def count(self) -> int:
        """The number of numbers that were added."""
        return sum(self.counts.values())

    def percentile(self, percent: float) -> int:
        """The percentile, by nearest rank; 0 if no numbers were added."""
        left = percent / 100 * self.count
        for number in sorted(self.counts):
            left -= self.counts[number]
            if left <= 0:
                return number
        return self.largest
