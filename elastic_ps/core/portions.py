"""Versions of a constant number of records, with a portion for each worker.

A version has the next records in the order of the epoch, whoever computes on them. So the records, and the
mean of their gradients up to round-off, are the same with any number of workers. No records of a later
version are handed out before all records of the open one are in the model. An epoch's last version has the
rest.

Records that a worker gives back, or has not fetched when it is lost, are divided again among the others. All
of this follows from the ledger and the present workers, so joins and losses need not be reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from elastic_ps.core.ledger import Ledger, Range, joined, without


def apportion(total: int, weights: Sequence[float], *, least: int = 1) -> list[int]:
    """Divide `total` into whole numbers in proportion to `weights`, which are positive.

    By largest remainders (Hamilton's method); among equals, the first. Each number is within one of its exact
    quota, except that nobody gets less than `least`: if that is not enough for all, those with the smallest
    weights get nothing. A total of less than `least` is not divided.
    """
    by_weight = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    getting = sorted(by_weight[: max(1, total // least)])
    whole, parts = sum(weights[i] for i in getting), [0] * len(weights)
    quotas = {i: total * weights[i] / whole for i in getting}
    for i in getting:
        parts[i] = int(quotas[i])
    by_remainder = sorted(getting, key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    for i in getting:
        while parts[i] < min(least, total):
            parts[max(getting, key=parts.__getitem__)] -= 1
            parts[i] += 1
    return parts


def cut(ranges: Iterable[Range], sizes: Iterable[int]) -> list[list[Range]]:
    """The first `sizes[0]` records of `ranges`, then the next `sizes[1]`, and so on; fewer at the end."""
    rest, parts = list(ranges), []
    for size in sizes:
        part: list[Range] = []
        while size > 0 and rest:
            first = rest[0]._replace(stop=min(rest[0].stop, rest[0].start + size))
            part.append(first)
            size -= first.records
            rest[0] = rest[0]._replace(start=first.stop)
            rest = rest if rest[0].records else rest[1:]
        parts.append(part)
    return parts


@dataclass
class PortionedLedger(Ledger):
    """A ledger that hands out the records of one version at a time.

    Attributes:
        size: the number of records in a version, at least 1; skipped ones count.
        kept: by worker index, the records that the worker has not fetched yet.
    """

    size: int = 1
    kept: dict[int, list[Range]] = field(default_factory=dict)

    @property
    def open_records(self) -> int:
        """The records of the open version that are not skipped; 0 if all records are in the model."""
        if self.finished:
            return 0
        position = (self.applied + self.skipped) % self.records
        return min(self.size - position % self.size, self.records - position)

    @property
    def held_by_all(self) -> int:
        """The number of records that workers hold, all of the open version."""
        return sum(_records(ranges) for ranges in self._held.values())

    @property
    def left(self) -> int:
        """The number of records of the open version that nobody holds."""
        return self.open_records - self.held_by_all

    def portion(self, worker: int, weights: Mapping[int, float], *, least: int = 1) -> list[Range]:
        """The records of the open version that are kept for `worker`.

        Args:
            weights: the weights of the workers that take part, by index. Portions are proportional to them.
            least: the smallest portion, if there are as many records; see `apportion`.
        """
        self._plan(weights, least)
        return list(self.kept.get(worker, ()))

    def take_portion(
        self, holder: int, *, worker: int, weights: Mapping[int, float], least: int = 1
    ) -> list[Range]:
        """Hand `holder`, which is `worker`, its portion; [] if there is none. See `portion`."""
        taken = self.portion(worker, weights, least=least)
        if taken:
            del self.kept[worker]
            self._returned = without(self._returned, taken)
            self._held[holder] = joined([*self._held.get(holder, ()), *taken])
        return taken

    def _plan(self, weights: Mapping[int, float], least: int) -> None:
        """Divide the records that are kept for no worker that takes part, in order of the workers."""
        self.kept = {worker: kept for worker, kept in self.kept.items() if worker in weights}
        kept = [r for ranges in self.kept.values() for r in ranges]
        missing = self.left - _records(kept)
        if not (weights and missing > 0):
            return
        while (lacking := self.left - _records(self._returned)) > 0:
            new = self._take_new(lacking)
            assert new is not None, "what nobody holds was given back, or nobody has had it"
            self._returned = joined([*self._returned, new])
        workers = sorted(weights)
        sizes = apportion(missing, [weights[worker] for worker in workers], least=least)
        parts = cut(without(self._returned, kept), sizes)
        for worker, more in zip(workers, parts, strict=True):
            if more:
                self.kept[worker] = joined([*self.kept.get(worker, ()), *more])

    def copy(self) -> Self:
        made = super().copy()
        made.kept = {worker: list(kept) for worker, kept in self.kept.items()}
        return made


def _records(ranges: Iterable[Range]) -> int:
    return sum(r.records for r in ranges)
