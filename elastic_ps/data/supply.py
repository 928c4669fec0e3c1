"""Cuts the ranges of records that a worker was given into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_ps.core.ledger import LEAST, Range
from elastic_ps.data.shuffle import permutation
from elastic_ps.data.source import Source


class Supply:
    """Cuts ranges into batches. Belongs to the training thread.

    Args:
        source: with `drop_last`, an epoch's records that do not fill a batch, or a version, are left out.
            With an `order` its blocks stay together.
        seed: of the order, where it is random: the same on all workers.
        version_records: how many records make a version, if that is fixed. A batch has records of one
            version only.

    Attributes:
        in_hand: the ranges that are in no batch yet, in order.
    """

    def __init__(self, source: Source, *, seed: int, version_records: int | None = None) -> None:
        self.in_hand: list[Range] = []
        self._source, self._seed, self._version_records = source, seed, version_records

    def cut(
        self, more: Callable[[], bool], *, only: int | None = None
    ) -> tuple[list[Range], list[int] | None]:
        """The next batch, which is of one epoch: its positions, and the data set's indexes of its records.

        There are no positions if there are no records at the moment. The indexes are None if the batch is the
        rest of an epoch, which `drop_last` leaves out.

        Args:
            more: adds to what is in hand, without waiting; returns whether it has.
            only: later epochs than this one stay in hand.
        """
        batch: list[Range] = []
        missing = self._source.batch_size
        while missing:
            if not self.in_hand and ((batch and self._version_records is not None) or not more()):
                break
            first = self.in_hand[0]
            if (only is not None and first.epoch > only) or (batch and first.epoch != batch[0].epoch):
                break
            taken = first._replace(stop=min(first.stop, first.start + missing))
            batch.append(taken)
            missing -= taken.records
            self.in_hand[:1] = [first._replace(start=taken.stop)] if taken.stop < first.stop else []
        if not missing and self._leaves_one(batch[0].epoch, more):
            last = batch.pop()
            batch += [last._replace(stop=last.stop - 1)] if last.records > 1 else []
            self.in_hand.insert(0, last._replace(start=last.stop - 1))
        return batch, None if self._source.drop_last and self._is_rest(batch) else self._indices(batch)

    def _leaves_one(self, epoch: int, more: Callable[[], bool]) -> bool:
        """Whether a whole batch leaves a single record of the version, or of the epoch's last run.

        Without either, only an epoch ends with a single record, as with torch's DataLoader.
        """
        source, one_version = self._source, self._version_records is not None
        if source.batch_size <= LEAST or not (one_version or (source.order and not source.drop_last)):
            return False

        def one() -> bool:
            return sum(each.records for each in self.in_hand if each.epoch == epoch) == 1

        return one() and (one_version or not more() or one())

    def _is_rest(self, batch: list[Range]) -> bool:
        """Whether the epoch has no more records for a whole batch, or for a whole version."""
        if batch and self._version_records is not None:
            return batch[0].start >= self._source.records // self._version_records * self._version_records
        return sum(each.records for each in batch) < self._source.batch_size

    def _indices(self, batch: list[Range]) -> list[int]:
        result: list[int] = []
        for each in batch:
            result.extend(self._order_of(each.epoch)[each.start : each.stop])
        return result

    def _order_of(self, epoch: int) -> Sequence[int]:
        source = self._source
        if source.order is not None:
            return source.order.of_epoch(epoch)
        return permutation(source.records, epoch, shuffle=source.shuffle, seed=self._seed)
