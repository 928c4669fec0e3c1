"""The elastic data loader: the ledger decides batch by batch which records this worker computes on.

Torch's own `DataLoader` fetches and collates records and runs worker processes. Only its batch sampler is
ours.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader

from elastic_ps.core.ledger import Range
from elastic_ps.data.fingerprint import fingerprint
from elastic_ps.data.source import read_source
from elastic_ps.data.stream import Numbered, Place
from elastic_ps.errors import UsageError
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.supply import NO_EPOCH, Supply

logger = logging.getLogger(__name__)

MOST = 2**32 - 1
"""Epochs of a loop, and records of a batch, at most: what a call for records can say."""

_OVER = (
    "training is over: an earlier loop over session.loader(...) has trained all epochs. To train 5 epochs, "
    "call session.loader(..., epochs=5) once, and write `for epoch in loader.epochs()` instead of "
    "`for epoch in range(5)`. To read the data again, for example to evaluate, use a "
    "torch.utils.data.DataLoader of your own. To train anew in a notebook, run the cells from "
    "elastic_ps.connect() on again"
)
_TWO_LOOPS = (
    "a second loop over session.loader(...) begins during another one, as with zip(loader_a, loader_b). "
    "A job counts the records of one data set. Combine the data sets, for example with "
    "torch.utils.data.StackDataset or ConcatDataset, and pass the result to session.loader"
)
_EPOCH_OVER = (
    "a second loop over the records of epoch {epoch} begins, after the first one has come to its end. "
    "Iterate over the loader once for each epoch of `for epoch in loader.epochs()`. To read the data again, "
    "for example to evaluate, use a torch.utils.data.DataLoader of your own"
)


class ElasticLoader:
    """Iterates over this worker's share of the records. Made by `Session.loader`.

    One loop over it trains all epochs, from the point that the job has reached when this worker joins.
    To do something between epochs::

        for epoch in loader.epochs():
            for x, y in loader:
                ...

    Attributes:
        epoch: the epoch that the last batch belongs to, from 0.
        dataset: the data set or stream, with all records.
        batch_size: records in a batch.
    """

    def __init__(
        self,
        engine: Engine,
        given: Any,
        *,
        batch_size: int | None,
        epochs: int,
        records: int | None,
        options: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        source = read_source(
            given,
            batch_size=batch_size,
            records=records,
            data=engine.spec.data,
            late=engine.spec.consistency.may_be_late,
            options=options,
        )
        if source.batch_size < engine.world.size:
            raise UsageError(
                f"batch_size is {source.batch_size}, but each worker has {engine.world.size} processes, "
                "which share a batch (worker.processes); expected as many records at least"
            )
        for name, number in (("epochs", epochs), ("batch_size", source.batch_size)):
            if not (isinstance(number, Integral) and 1 <= number <= MOST):
                raise UsageError(f"{name} is {number}; expected a whole number from 1 to {MOST}")
        least = engine.spec.consistency.global_batch_size or source.batch_size
        if source.drop_last and source.records < least:
            raise UsageError(
                f"drop_last is set, and the data set has {source.records} records, fewer than the {least} of "
                "a batch, so there would be none. Leave drop_last out, or make batches smaller"
            )
        self._renew = not source.options.get("persistent_workers")
        placed = isinstance(source.readable, Numbered)
        if source.options.get("num_workers") and (placed or engine.spec.consistency.global_batch_size):
            # Within a loop new ones would read the stream from its beginning, or begin with each version.
            source.options["persistent_workers"] = True
        self.batch_size = source.batch_size
        self.epoch = 0
        self.dataset = source.dataset
        self._source = source
        self._epochs = epochs
        self._supply = Supply(
            engine,
            records=source.records,
            epochs=epochs,
            batch_size=source.batch_size,
            shuffle=source.shuffle,
            drop_last=source.drop_last,
            data=fingerprint(source.dataset, source.records),
        )
        self._sampler = _Sampler(self._supply, placed=placed)
        self._fetching: DataLoader[Any] | None = None
        self._ended_early = False
        self._ended: int | None = None  # the last epoch whose loop came to its end
        self._all_had = False  # a loop over all epochs came to its end, maybe before its last step
        self._left: int | None = None  # the last epoch whose loop was left by a break
        self._missed = False  # the epoch under way was trained by others, and this worker is its chief

    def __len__(self) -> int:
        """The number of batches in an epoch for a single worker. Several workers share them."""
        records = self._source.records
        return records // self.batch_size if self._source.drop_last else -(-records // self.batch_size)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        If another worker could not train records of an earlier epoch, they are trained in the current one. A
        script that leaves the loop over the loader with `break` continues with the next epoch; other workers
        train the records that are left, or this one does in the next epoch. An epoch is yielded again only if
        another worker gives back records of it after this worker's loop over it has ended. The chief of an
        epoch is the chief of the next one, too: if others have trained that meanwhile, it is yielded all the
        same, and the loop over the loader is empty.

        Raises:
            UsageError: training is over, and an earlier loop has trained all epochs.
        """
        supply = self._supply
        if self._engine.records.over:
            raise UsageError(_OVER)
        self._engine.forget_left()
        self._left = None  # by an earlier loop over epochs
        supply.only = NO_EPOCH
        try:
            while (epoch := self._next_epoch(supply.only)) is not None:
                self.epoch = supply.only = epoch
                self._ended = None
                yield epoch
        finally:
            supply.only, self._missed = None, False
            supply.give_up()

    def _next_epoch(self, last: int) -> int | None:
        """The epoch to yield after the `last` one; None after all of them. Blocks."""
        supply, engine = self._supply, self._engine
        least = 0 if self._left is None else self._left + 1
        none_left = least == self._epochs and not engine.stopped
        if none_left:
            return None
        some = not supply.over and supply.await_some()
        epoch = max(supply.epoch, least) if some else self._epochs
        missed = range(last + 1, 0 if last == NO_EPOCH or engine.stopped else epoch)
        chief_of = next((each for each in missed if engine.records.comes_to(each)), None)
        self._missed = chief_of is not None
        if chief_of is not None:
            return chief_of
        return epoch if some else None

    def __iter__(self) -> Iterator[Any]:
        """Yield collated batches. Blocks while other workers hold the last records.

        Raises:
            SystemExit: this worker was asked to leave (SIGTERM); it gives back the records that it holds.
            UsageError: training is over, this epoch's loop has ended, another loop is running, or the data
                set's length has changed.
        """
        supply, engine = self._supply, self._engine
        engine.check_loop()
        if (engine.records.over and not self._missed) or (self._all_had and supply.only is None):
            raise UsageError(_OVER)
        if supply.only is not None and supply.only == self._ended:
            raise UsageError(_EPOCH_OVER.format(epoch=supply.only))
        if self._missed:
            self._ended = supply.only
            return
        if engine.iterating:
            raise UsageError(_TWO_LOOPS)
        self._check_length()
        if supply.only is None:
            engine.forget_left()
        if self._fetching is None or self._renew:
            self._fetching = DataLoader(
                self._source.readable, batch_sampler=self._sampler, **self._source.options
            )
        engine.iterating = True
        try:
            while supply.await_some():
                if supply.only is not None and supply.epoch > supply.only:
                    engine.exchange_steps()
                    if supply.outdated:
                        continue
                    break
                for batch in self._fetching:
                    if supply.outdated:
                        break  # what was fetched ahead belongs to others now
                    self._check_accumulation()
                    ranges = self._sampler.issued.popleft()
                    self.epoch = ranges[0].epoch
                    engine.begin_batch(ranges)
                    yield batch
                    self._check_length()
                    engine.leave_if_asked()
                    if engine.stopped:
                        break
                else:
                    self._check_end()
                if engine.stopped:
                    continue
                if engine.spec.consistency.global_batch_size is not None:
                    self._end_version()
                elif not engine.batches.grouped:
                    engine.settle()
                if engine.batches.undecided or not engine.skip_if_not_finite():
                    self._ended_early = True
                    break
            self._ended = supply.only
            self._all_had = supply.only is None
        except GeneratorExit:  # the script broke out of the loop; what it has not computed on is not its own
            engine.batches.drop()
            engine.left = bool(engine.batches.computed)
            self._left = supply.only
            if supply.only is not None:
                supply.leave_epoch()
            raise
        finally:
            engine.iterating = False
            if supply.only is None:
                supply.give_up()

    def close(self) -> None:
        """End the processes that fetch. Waits a while for them; those that are late end later. Idempotent.

        Those that outlive an epoch would be killed when this process ends, and leave what they keep in the
        temporary directory. Torch waits 5 s for each one that is busy with a record, and a worker that has
        left the job has not much longer in all.
        """
        last, self._fetching = [self._fetching], None
        # Torch ends them when nobody refers to the DataLoader any more.
        ending = threading.Thread(target=last.clear, name="end of fetching", daemon=True)
        ending.start()
        ending.join(self._engine.client.limits.fetching.total_seconds())

    def _check_length(self) -> None:
        """Raise UsageError if the data set has got more records, or fewer. A stream notices that itself."""
        if (now := len(self._source.readable)) != self._source.records:
            raise UsageError(
                f"the {type(self.dataset).__name__} has {now} records now; it had {self._source.records} at "
                "session.loader(...), and the job counts those in each epoch. Give it all records from the "
                "start. To train on more of them later, run a job for each stage, which begins with "
                "the values of the one before: Fine-tuning in docs/scripts.md"
            )

    def _check_end(self) -> None:
        """Raise UsageError if torch's loop over the batches has ended, though some were asked for."""
        if self._sampler.issued and not self._supply.outdated:
            raise UsageError(
                "reading records ended with StopIteration, which Python's loops take for their end: a "
                f"{type(self.dataset).__name__}, a transform or collate_fn calls next() where there is "
                "nothing more. Let it raise another error there, or return the record"
            )

    def _end_version(self) -> None:
        """This worker has had all its records of a version: it makes no step with what has had none."""
        self._engine.settle()
        if self._engine.batches.computed:
            self._engine.skip()

    def _check_accumulation(self) -> None:
        """Raise UsageError if a last step of several batches may have to be repeated after the loop."""
        if (
            self._engine.spec.consistency.global_batch_size is None  # else each batch has its own step
            and self._engine.batches.computed
            and self._supply.only is None
            and self._engine.spec.consistency.may_be_late
        ):
            raise UsageError(
                "this script accumulates gradients of several batches. With backupWorkers, and in mode "
                "accumulate, its last step may be dropped as too late, and its records would have to be "
                "trained after the loop. So write `for epoch in loader.epochs()`, and iterate over the "
                "loader inside"
            )

    def is_chief(self) -> bool | None:
        """Whether this worker is to evaluate and save in the epoch under way; None outside of `epochs`.

        Blocks: in the last epoch, until all records are in the model.
        """
        epoch, engine = self._supply.only, self._engine
        if epoch is None or engine.stopped or engine.closed:
            return None
        if epoch < self._epochs - 1:
            return engine.records.is_chief_of(epoch)
        if engine.records.over:
            return None
        if self._ended != epoch or engine.batches.computed or self._supply.await_some():
            return False  # there are records to train, in another round of the same epoch
        return None

    def await_end(self) -> None:
        """Block until training is over, if the loop has ended with batches for a last step, or was stopped.

        Does nothing before that step, nor between epochs. What others give back meanwhile is left to others.
        """
        engine, between = self._engine, self._supply.only is not None
        due = engine.stopped or (self._ended_early and not (between or engine.batches.computed))
        if not due or engine.records.over or engine.closed:
            return
        self._ended_early = False
        if self._supply.await_some():
            logger.warning(
                "another worker gave back records after this script's loop over the loader had ended. A "
                "script that accumulates gradients trains these, too, if it writes `for epoch in "
                "loader.epochs()` and iterates over the loader inside"
            )
            self._supply.give_up()


class _Sampler:
    """A DataLoader's batch sampler that hands out what the ledger gave; it remembers what it handed out.

    Args:
        placed: hand out each record's place in a stream instead of its index in a data set.
    """

    def __init__(self, supply: Supply, *, placed: bool) -> None:
        self._supply, self._placed = supply, placed
        self.issued: deque[list[Range]] = deque()

    def __iter__(self) -> Iterator[list[int] | list[Place]]:
        self.issued.clear()
        while ranges := self._supply.next_batch():
            self.issued.append(ranges)
            indices = self._supply.own(ranges)
            yield [Place(ranges[0].epoch, index) for index in indices] if self._placed else indices
