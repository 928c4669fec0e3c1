"""A fixed schedule of records: each worker index has its own share, so that runs agree to the bit.

Every epoch's positions are cut into as many contiguous shares as there are workers, and share `k` is handed
only to worker `k`, in order. So the records of a step depend only on the step, not on who asks first, nor on
whether a process was replaced in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ps.core.ledger import Ledger, LedgerError, Range


class FixedSchedule:
    """A `Ledger` for each worker index. Workers with an index beyond the shares get no records.

    Args:
        records, epochs, shard_records: see `Ledger`.
        shares: the number of shares; at most the number of records.
    """

    def __init__(self, records: int, epochs: int, shard_records: int, shares: int) -> None:
        self.records, self.epochs = records, epochs
        count = min(shares, records)
        self._bounds = [records * share // count for share in range(count + 1)]
        sizes = [stop - start for start, stop in zip(self._bounds[:-1], self._bounds[1:], strict=True)]
        self._shares = [Ledger(size, epochs, shard_records) for size in sizes]
        self._share_of: dict[int, int] = {}

    @property
    def applied(self) -> int:
        """Records whose gradients are in the model."""
        return sum(share.applied for share in self._shares)

    @property
    def skipped(self) -> int:
        """Records that scripts have skipped."""
        return sum(share.skipped for share in self._shares)

    @property
    def total(self) -> int:
        """Records of all epochs together."""
        return self.records * self.epochs

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch is in the model, or was skipped."""
        return self.applied + self.skipped == self.total

    @property
    def complete_epochs(self) -> int:
        """Epochs of which every record is in the model."""
        return min(share.complete_epochs for share in self._shares)

    @property
    def open_shares(self) -> frozenset[int]:
        """The worker indexes that still have records to train; no round is complete without them."""
        return frozenset(number for number, share in enumerate(self._shares) if not share.finished)

    def extend(self, epochs: int) -> None:
        """See `Ledger.extend`."""
        self.epochs = epochs
        for share in self._shares:
            share.extend(epochs)

    def take(self, holder: int, *, worker: int, batch: int) -> list[Range]:
        """Hand the next records of worker `worker`'s share to `holder`."""
        if worker >= len(self._shares):
            return []
        if holder not in self._share_of:  # others that hold nothing may be gone
            holding = {each: own for each, own in self._share_of.items() if self._shares[own].held(each)}
            self._share_of = {**holding, holder: worker}
        return self._outside(worker, self._shares[worker].take(holder, batch=batch, workers=1))

    def held(self, holder: int, *, besides: Iterable[Range] = ()) -> list[Range]:
        """See `Ledger.held`."""
        share = self._share(holder)
        return self._outside(share, self._shares[share].held(holder, besides=self._inside(share, besides)))

    def apply(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.apply`."""
        share = self._share(holder)
        self._shares[share].apply(holder, self._inside(share, ranges))

    def skip(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.skip`."""
        share = self._share(holder)
        self._shares[share].skip(holder, self._inside(share, ranges))

    def give_back(self, holder: int, *, keep: Iterable[Range] = ()) -> None:
        """See `Ledger.give_back`; the records stay in their share."""
        share = self._share(holder)
        self._shares[share].give_back(holder, keep=self._inside(share, keep))

    def give_back_some(self, holder: int, ranges: Iterable[Range]) -> None:
        """See `Ledger.give_back_some`; the records stay in their share."""
        share = self._share(holder)
        self._shares[share].give_back_some(holder, self._inside(share, ranges))

    def _share(self, holder: int) -> int:
        """The share of a holder. If it has never taken a record, any share will do."""
        return self._share_of.get(holder, 0)

    def _outside(self, share: int, ranges: Iterable[Range]) -> list[Range]:
        start = self._bounds[share]
        return [r._replace(start=r.start + start, stop=r.stop + start) for r in ranges]

    def _inside(self, share: int, ranges: Iterable[Range]) -> list[Range]:
        start = self._bounds[share]
        return [r._replace(start=r.start - start, stop=r.stop - start) for r in ranges]

    def copy(self) -> FixedSchedule:
        """See `Ledger.copy`."""
        made = FixedSchedule(self.records, self.epochs, 1, len(self._shares))  # mutant: equal
        made._shares = [share.copy() for share in self._shares]
        made._share_of = dict(self._share_of)
        return made

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        shares = [share.state() for share in self._shares]
        return {"records": self.records, "epochs": self.epochs, "shares": shares}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, shard_records: int) -> FixedSchedule:
        """The shares that `state()` described. Raises like `Ledger.from_state`."""
        made = cls(state["records"], state["epochs"], shard_records, len(state["shares"]))
        shares = [Ledger.from_state(share, shard_records=shard_records) for share in state["shares"]]
        if [(m.records, m.epochs) for m in shares] != [(m.records, m.epochs) for m in made._shares]:
            raise LedgerError("the shares do not match the number of records")
        made._shares = shares
        return made
