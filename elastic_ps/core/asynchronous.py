"""Rounds of one step each: a push is applied when it arrives, however old its base is.

This is the asynchronous parallel stochastic gradient descent of Lian et al. 2015, "Asynchronous Parallel
Stochastic Gradient for Nonconvex Optimization", with one gradient for each update. Reads are of two kinds.
With consistent reads (AsySG-con) a worker reads a single version. With inconsistent ones (AsySG-incon) the
parts may be of different versions, since other workers make versions meanwhile.

As in `bounded`, a worker asks when its step is complete, and others that ask wait until the step is sent. So
a shard needs one sum for each bucket, and a step is applied wholly or not at all, also if its worker dies.

For consistent reads, no version is made while a worker reads the previous one. That needs no copy and little
time, because others push meanwhile. A worker delays others at most once for each version that it reads, and
not at all after it has vanished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Contribution, Entry


@dataclass
class AsyncRounds(BoundedRounds):
    """Rounds of one step, without a bound on its staleness.

    Attributes:
        consistent: whether a worker reads a single version.
        reading: with `consistent`, the workers that read the version that they were told. No version is made
            meanwhile.
    """

    consistent: bool = True
    reading: set[int] = field(default_factory=set)

    def withdraw(self, worker: int) -> None:
        self.reading.discard(worker)
        super().withdraw(worker)

    def lose(self, worker: int) -> list[Contribution]:
        self.reading.discard(worker)
        return super().lose(worker)

    def tell_version(self, worker: int) -> None:
        super().tell_version(worker)
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
        self.reading.discard(worker)  # it has the version, even if its report was lost
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
