"""This worker's share of the records: ranges that the ledger hands out, cut into batches."""

from __future__ import annotations

from elastic_ps.core.ledger import Range
from elastic_ps.core.portions import LEAST
from elastic_ps.data.order import permutation
from elastic_ps.errors import UsageError
from elastic_ps.worker.engine import Engine

NO_EPOCH = -1


class Supply:
    """Asks for records when none are left in hand. Belongs to the training thread.

    Args:
        records: in the data set.
        epochs: that the job trains.
        batch_size: records in a batch of this worker.
        shuffle: the order of records is random, and the same on all workers.
        data: what identifies the records; see `core.fingerprint`.
        drop_last: skip the records of an epoch that do not fill a batch; with a global batch size, those that
            do not fill a version.

    Attributes:
        only: the epoch that is asked for; records of later ones are kept. None: any. `NO_EPOCH`: the script
            asks for epochs, and has not been given one yet.
        over: all records are in the model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        records: int,
        epochs: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        data: str,
    ) -> None:
        self.only: int | None = None
        self.over = False
        self._engine = engine
        self._records, self._epochs, self._batch_size = records, epochs, batch_size
        self._shuffle, self._drop_last, self._data = shuffle, drop_last, data
        self._version_records = engine.spec.consistency.global_batch_size
        self._kept: list[Range] = []
        self._generation = engine.generation
        engine.slices.least = LEAST if batch_size >= LEAST * engine.slices.processes else 1

    @property
    def outdated(self) -> bool:
        """Whether this worker had to join again, so that the records in hand are handed to others."""
        return self._engine.generation != self._generation

    @property
    def epoch(self) -> int:
        """Of the records in hand that come next."""
        return self._kept[0].epoch

    def await_some(self) -> bool:
        """Block until there are records in hand; False when all records are in the model.

        Raises:
            UsageError: the script has batches that it made no step with.
        """
        if self._engine.stopped:
            self._kept.clear()
            self._engine.exchange_steps()
            self._engine.forget()
        if self._forget():
            return True
        self._engine.settle()
        self._engine.exchange_steps()
        if not self._engine.skip_if_not_finite():
            raise UsageError(
                "the loop over the loader has ended, but no optimizer.step() was called for the last "
                "batches. When you accumulate gradients, call optimizer.step() for them after the loop; to "
                "make no step with them, call optimizer.skip()"
            )
        self.over = not self._take(wait=True)
        return not self.over

    def next_batch(self) -> list[Range]:
        """The positions of the next batch, all of one epoch; [] if there are none at the moment.

        With a global batch size there are none either when all that this worker has of the open version is
        handed to the script, and a batch has records of one version only.

        After joining again there are none until `await_some` has got some: only that takes part in rounds
        again.
        """
        while True:
            batch, missing = self._cut()
            if self.outdated:
                return []
            if not (batch and self._drop_last and self._is_rest(batch, missing)):
                return batch
            self._engine.batches.leave_out(batch)

    def _cut(self) -> tuple[list[Range], int]:
        """The next batch, with `drop_last` too, and how many records it lacks."""
        batch: list[Range] = []
        missing = 0 if self._engine.stopped else self._batch_size
        while missing and not self.outdated:
            one_version = self._version_records is not None
            if not self._kept and ((batch and one_version) or not self._take(wait=False)):
                break
            if one_version and not batch and self._leaves_one():
                missing -= 1
            first = self._kept[0]
            ahead = self.only is not None and first.epoch > self.only
            if ahead or (batch and first.epoch != batch[0].epoch):
                break
            taken = first._replace(stop=min(first.stop, first.start + missing))
            batch.append(taken)
            missing -= taken.records
            self._kept[0] = first._replace(start=taken.stop)
            if not self._kept[0].records:
                self._kept.pop(0)
        return batch, missing

    def _leaves_one(self) -> bool:
        """Whether a whole batch leaves a single record of what this worker has of the version."""
        left = sum(kept.records for kept in self._kept) - self._batch_size
        return left == 1 and self._batch_size > LEAST

    def _is_rest(self, batch: list[Range], missing: int) -> bool:
        """Whether the epoch has no more records for a whole batch, or for a whole version."""
        if self._version_records is None:
            return missing > 0
        return batch[0].start >= self._records // self._version_records * self._version_records

    def indices(self, ranges: list[Range]) -> list[int]:
        """The data set's indexes of the records at these positions."""
        seed = self._engine.spec.data.seed
        result: list[int] = []
        for r in ranges:
            order = permutation(self._records, r.epoch, shuffle=self._shuffle, seed=seed)
            result.extend(order[r.start : r.stop])
        return result

    def own(self, ranges: list[Range]) -> list[int]:
        """Those of them that this process computes on."""
        return self._engine.slices.own(self.indices(ranges))

    def leave_epoch(self) -> None:
        """The script is done with the epoch: what is left of it goes to others, or to this worker's next."""
        self._kept.clear()
        self._engine.records.stop_computing()

    def give_up(self) -> None:
        """Nobody iterates any more: what is in hand goes to others."""
        if not self.over:
            self._kept.clear()
            self._engine.records.stop_computing(leaves=True)

    def _take(self, *, wait: bool) -> bool:
        """Get more records; without `wait` only if there are any at the moment.

        Without `wait`, what is in hand stays outdated if this worker had to join again meanwhile: a batch
        that was begun and those that were fetched ahead are still to be dropped.
        """
        ranges = self._engine.records.take(
            records=self._records,
            epochs=self._epochs,
            batch=self._batch_size,
            data=self._data,
            wait=wait,
            early=self.only is not None and self.only < self._epochs - 1,
            epoch=None if self.only in (None, NO_EPOCH) else self.only,
        )
        if wait:
            self._forget()
        self._kept.extend(ranges)
        return bool(ranges)

    def _forget(self) -> bool:
        """Drop what others have been handed; returns whether something is left in hand."""
        if self.outdated:
            self._generation = self._engine.generation
            self._kept.clear()
        return bool(self._kept)
