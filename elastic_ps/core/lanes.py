"""A fixed schedule of records: each worker index has its own share, so that runs agree to the bit.

Every epoch's positions are cut into as many contiguous lanes as there are workers, and lane `k` is handed
to worker `k` only, in order. Which records a step is computed on then depends on nothing but the step;
not on who asks first, nor on whether a process was replaced in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ps.core.ledger import Ledger, LedgerError, Range


class Lanes:
    """A `Ledger` for each worker index. Workers with an index beyond the lanes are handed nothing.

    Args:
        records, epochs, shard_records: as of `Ledger`.
        lanes: number of lanes; not more than there are records.
    """

    def __init__(self, records: int, epochs: int, shard_records: int, lanes: int) -> None:
        self.records, self.epochs = records, epochs
        count = min(lanes, records)
        self._bounds = [records * lane // count for lane in range(count + 1)]
        sizes = [stop - start for start, stop in zip(self._bounds[:-1], self._bounds[1:], strict=True)]
        self._lanes = [Ledger(size, epochs, shard_records) for size in sizes]
        self._lane_of: dict[int, int] = {}

    @property
    def applied(self) -> int:
        """Records whose gradients are in the model."""
        return sum(lane.applied for lane in self._lanes)

    @property
    def skipped(self) -> int:
        """Records that scripts have skipped."""
        return sum(lane.skipped for lane in self._lanes)

    @property
    def expected(self) -> int:
        """Records of all epochs together."""
        return self.records * self.epochs

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch is in the model, or was skipped."""
        return self.applied + self.skipped == self.expected

    @property
    def complete_epochs(self) -> int:
        """Epochs of which every record is in the model."""
        return min(lane.complete_epochs for lane in self._lanes)

    @property
    def open_lanes(self) -> frozenset[int]:
        """The worker indexes that still have records to train; no round is complete without them."""
        return frozenset(number for number, lane in enumerate(self._lanes) if not lane.finished)

    def extend(self, epochs: int) -> None:
        """See `Ledger.extend`."""
        self.epochs = epochs
        for lane in self._lanes:
            lane.extend(epochs)

    def take(self, holder: int, *, worker: int, batch: int) -> list[Range]:
        """Hand the next records of worker `worker`'s lane to `holder`."""
        if worker >= len(self._lanes):
            return []
        self._lane_of[holder] = worker
        return self._outside(worker, self._lanes[worker].take(holder, batch=batch, workers=1))

    def held(self, holder: int, *, besides: Iterable[Range] = ()) -> list[Range]:
        """See `Ledger.held`."""
        lane = self._lane(holder)
        return self._outside(lane, self._lanes[lane].held(holder, besides=self._inside(lane, besides)))

    def apply(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.apply`."""
        lane = self._lane(holder)
        self._lanes[lane].apply(holder, self._inside(lane, ranges))

    def skip(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.skip`."""
        lane = self._lane(holder)
        self._lanes[lane].skip(holder, self._inside(lane, ranges))

    def check(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.check`."""
        lane = self._lane(holder)
        self._lanes[lane].check(holder, self._inside(lane, ranges))

    def give_back(self, holder: int, *, keep: Iterable[Range] = ()) -> None:
        """See `Ledger.give_back`; the records stay in their lane."""
        lane = self._lane(holder)
        self._lanes[lane].give_back(holder, keep=self._inside(lane, keep))

    def give_back_some(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.give_back_some`; the records stay in their lane."""
        lane = self._lane(holder)
        self._lanes[lane].give_back_some(holder, self._inside(lane, ranges))

    def _lane(self, holder: int) -> int:
        """The lane of a holder; any if it has never taken a record, because it holds none in each of them."""
        return self._lane_of.get(holder, 0)

    def _outside(self, lane: int, ranges: Iterable[Range]) -> list[Range]:
        start = self._bounds[lane]
        return [r._replace(start=r.start + start, stop=r.stop + start) for r in ranges]

    def _inside(self, lane: int, ranges: Iterable[Range]) -> list[Range]:
        start = self._bounds[lane]
        return [r._replace(start=r.start - start, stop=r.stop - start) for r in ranges]

    def copy(self) -> Lanes:
        """See `Ledger.copy`."""
        made = Lanes(self.records, self.epochs, 1, len(self._lanes))  # mutant: equal
        made._lanes = [lane.copy() for lane in self._lanes]
        made._lane_of = dict(self._lane_of)
        return made

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        lanes = [lane.state() for lane in self._lanes]
        return {"records": self.records, "epochs": self.epochs, "lanes": lanes}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, shard_records: int) -> Lanes:
        """The lanes that `state()` described. Raises as `Ledger.from_state`."""
        made = cls(state["records"], state["epochs"], shard_records, len(state["lanes"]))
        lanes = [Ledger.from_state(lane, shard_records=shard_records) for lane in state["lanes"]]
        if [(m.records, m.epochs) for m in lanes] != [(m.records, m.epochs) for m in made._lanes]:
            raise LedgerError("the lanes do not match the number of records")
        made._lanes = lanes
        return made
