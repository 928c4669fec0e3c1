"""Rounds of one step each: a push is applied when it comes, however old its base is.

This is the asynchronous parallel stochastic gradient descent of Lian et al. 2015, "Asynchronous Parallel
Stochastic Gradient for Nonconvex Optimization", with one gradient for each update. There are two kinds of
reading. In the first (AsySG-con) a worker reads one version wholly. In the second (AsySG-incon) the parts
that it reads may be of different versions, since others make versions meanwhile.

A worker asks when its step is complete, as in `bounded`, and those who ask meanwhile wait until it is sent.
So a shard needs one sum for each bucket, and a step is all or nothing, also when its worker dies while it
pushes.

For consistent reads a version is not made while somebody reads the one before. That costs no copy, and little
time, because others push meanwhile. A worker can hold others up once for each version that it reads. If it
vanishes while it reads, nobody waits for it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Contribution, Entry


@dataclass
class AsyncRounds(BoundedRounds):
    """Rounds of one step, without a bound on its staleness.

    Attributes:
        consistent: a worker reads one version wholly.
        reading: with `consistent`, the workers that have been told a version and have not said yet that they
            have it. No version is made meanwhile.
    """

    consistent: bool = True
    reading: set[int] = field(default_factory=set)

    def withdraw(self, worker: int) -> None:
        self.reading.discard(worker)
        super().withdraw(worker)

    def lose(self, worker: int) -> list[Contribution]:
        self.reading.discard(worker)
        return super().lose(worker)

    def hand_out(self, worker: int) -> None:
        super().hand_out(worker)
        if self.consistent:
            self.reading.add(worker)

    def computes_on(self, worker: int, version: int) -> bool:
        news = super().computes_on(worker, version)
        if worker in self.reading and version >= self.bases.get(worker, 0):
            self.reading.discard(worker)
            return True
        return news

    def begin(self, worker: int, *, version: int) -> Entry:
        entry = super().begin(worker, version=version)
        self.reading.discard(worker)  # whatever became of its word that it has the version
        return entry

    @property
    def _at_the_bound(self) -> set[int]:
        return set()

    @property
    def _shut(self) -> bool:
        return self.decided or bool(self.begun)

    @property
    def awaited(self) -> set[int]:
        return super().awaited | (self.reading if self.done else set())

    def end_commit(self) -> None:
        contributors = self.done.keys() - self.gone
        super().end_commit()
        if self.consistent:
            self.reading |= contributors
