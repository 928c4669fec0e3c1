"""How long each worker takes for its part of a round, and for whom the others have waited how long.

Times are seconds of the caller's clock; workers are named by their incarnation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass
class Waiting:
    """For whom an open round waits, and since when.

    Level-triggered: it does not matter when it is asked, as long as that is often enough. The idea of a time
    limit for collectives, after which who did not come is named, is that of PyTorch's process groups.
    """

    _round: tuple[int, int] = (0, 0)
    _since: dict[int, float] = field(default_factory=dict)

    def overdue(
        self, round_: tuple[int, int], awaited: Iterable[int], now: float, limit: timedelta
    ) -> dict[int, float]:
        """Those who have kept the others waiting for longer than `limit`, and for how many seconds.

        Args:
            round_: version and attempt; with another one, waiting begins anew.
            awaited: whose steps the round lacks, while somebody waits for them.
            limit: zero for none.
        """
        waited = self.waited(round_, awaited, now)
        most = limit.total_seconds()
        return {who: seconds for who, seconds in waited.items() if seconds > most} if limit else {}

    def waited(self, round_: tuple[int, int], awaited: Iterable[int], now: float) -> dict[int, float]:
        """For how many seconds each has kept the others waiting; see `overdue`."""
        before = self._since if round_ == self._round else {}
        self._round = round_
        self._since = {who: before.get(who, now) for who in awaited}
        return {who: now - since for who, since in self._since.items()}


SMOOTHING = 0.2
"""Weight of the newest step in a worker's mean."""


@dataclass
class Pace:
    """How long each worker takes from when it has a version until its step on it is complete on all shards.

    That is its own computing and sending, without the time that it then waits for the others. Left out are a
    worker's first step, which warms up and may have begun within a round, and rounds that started again.

    Attributes:
        seconds: an exponentially weighted mean, once there is one.
        of_a_record: the same of a step's time over its records.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    of_a_record: dict[int, float] = field(default_factory=dict)
    _warm: set[int] = field(default_factory=set)
    _began: dict[int, float] = field(default_factory=dict)
    _came: dict[int, float] = field(default_factory=dict)  # who has begun a step that is not measured
    _roughly: dict[int, float] = field(default_factory=dict)  # how long these took, of each worker's first

    def opened(self, members: Iterable[int], now: float, *, beginning: Iterable[int]) -> None:
        """A round opens. Workers that are not in `members` are forgotten.

        Args:
            beginning: those of `members` who begin a step with it.
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
        """A worker begins a step now, and not with the version."""
        self._began[who] = now

    def idled(self, who: int, now: float) -> None:
        """A worker that has had nothing to compute on begins a step now, which is not measured."""
        self._began.pop(who, None)
        self._came[who] = now

    def finished(self, who: int, attempt: int, now: float, *, records: int = 0) -> None:
        """A worker has finished its step in the open round, on so many records."""
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
        """Of all workers' means; None before there is one."""
        return statistics.median(self.seconds.values()) if self.seconds else None

    @property
    def about(self) -> float | None:
        """The median; before there is one, that of first steps, which may take longer; None before these."""
        known = self.seconds or self._roughly
        return statistics.median(known.values()) if known else None

    def slowness(self, who: int) -> float | None:
        """A worker's mean over the median of all; None before there is one."""
        median = self.median or 0.0
        return self.seconds[who] / median if who in self.seconds and median > 0 else None


def _follow(means: dict[int, float], who: int, value: float) -> None:
    mean = means.get(who, value)
    means[who] = mean + SMOOTHING * (value - mean)
