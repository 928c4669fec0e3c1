"""Measures how long each worker takes for a step, and how long others have waited for it.

Times are seconds of the caller's clock; workers are named by their incarnation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass
class Waiting:
    """Tracks the workers that an open round waits for, and since when.

    It is level-triggered, and may be asked at any time, as long as that is often enough. A time limit for
    collectives, after which absent ranks are named, is the idea of PyTorch's process groups.
    """

    _round: tuple[int, int] = (0, 0)
    _since: dict[int, float] = field(default_factory=dict)

    def overdue(
        self, round_: tuple[int, int], awaited: Iterable[int], now: float, limit: timedelta
    ) -> dict[int, float]:
        """The workers that have kept others waiting for longer than `limit`, with the seconds.

        Args:
            round_: version and attempt. A change restarts the waiting times; see also `begins`.
            awaited: the workers whose steps the round lacks, while somebody waits for them.
            limit: zero for none.
        """
        waited = self.waited(round_, awaited, now)
        most = limit.total_seconds()
        return {who: seconds for who, seconds in waited.items() if seconds > most} if limit else {}

    def waited(self, round_: tuple[int, int], awaited: Iterable[int], now: float) -> dict[int, float]:
        """The seconds for which each worker has kept others waiting; see `overdue`."""
        before = self._since if round_ == self._round else {}
        self._round = round_
        self._since = {who: before.get(who, now) for who in awaited}
        return {who: now - since for who, since in self._since.items()}

    def begins(self, who: int) -> None:
        """Note that a worker has just begun a step. It has not kept others waiting with that yet."""
        self._since.pop(who, None)


SMOOTHING = 0.2
"""The weight of the newest step in a worker's mean."""


@dataclass
class Pace:
    """Measures the time of each worker from a new version until its step is complete on all shards.

    This is its own computing and sending, without the time that it waits for others. A worker's first step,
    which warms up and may have begun within a round, and rounds that started again are left out.

    Attributes:
        seconds: the exponentially weighted mean of each worker that was measured.
        of_a_record: the same for a step's time divided by its records.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    of_a_record: dict[int, float] = field(default_factory=dict)
    _warm: set[int] = field(default_factory=set)
    _began: dict[int, float] = field(default_factory=dict)
    _came: dict[int, float] = field(
        default_factory=dict
    )  # workers that have begun a step that is not measured
    _roughly: dict[int, float] = field(default_factory=dict)  # the time of each worker's first step

    def opened(self, members: Iterable[int], now: float, *, beginning: Iterable[int]) -> None:
        """Note that a round opens. Workers that are not in `members` are forgotten.

        Args:
            beginning: the members that begin a step with it.
        """
        here = set(members)
        self._began = {who: at for who, at in self._began.items() if who in here}
        self._began |= dict.fromkeys(beginning, now)
        self._came = {who: at for who, at in self._came.items() if who in here}
        self._roughly = {who: took for who, took in self._roughly.items() if who in here}
        self._warm &= here
        self.seconds = {who: mean for who, mean in self.seconds.items() if who in here}
        self.of_a_record = {who: mean for who, mean in self.of_a_record.items() if who in here}

    def begins(self, who: int, now: float) -> None:
        """Note that a worker begins a step now, and not with the version."""
        self._began[who] = now

    def idled(self, who: int, now: float) -> None:
        """Note that a worker that had no records begins a step now, which is not measured."""
        self._began.pop(who, None)
        self._came[who] = now

    def finished(self, who: int, attempt: int, now: float, *, records: int = 0) -> None:
        """Note that a worker has finished its step in the open round, on so many records."""
        came = self._came.pop(who, now)
        if who not in self._warm and now > came:
            self._roughly[who] = now - came
        if who in self._warm and not attempt and who in self._began:
            took = now - self._began[who]
            _follow(self.seconds, who, took)
            if records and took > 0:
                _follow(self.of_a_record, who, took / records)
        self._warm.add(who)

    @property
    def median(self) -> float | None:
        """The median of all workers' means; None before there is one."""
        return statistics.median(self.seconds.values()) if self.seconds else None

    @property
    def about(self) -> float | None:
        """The median, or that of first steps, which may take longer; None before there is any."""
        known = self.seconds or self._roughly
        return statistics.median(known.values()) if known else None

    def slowness(self, who: int) -> float | None:
        """A worker's mean divided by the median of all; None before there is one."""
        median = self.median or 0.0
        return self.seconds[who] / median if who in self.seconds and median > 0 else None


def _follow(means: dict[int, float], who: int, value: float) -> None:
    mean = means.get(who, value)
    means[who] = mean + SMOOTHING * (value - mean)
