"""The elastic data loader: which records this worker computes on is decided batch by batch, by the ledger.

Fetching, collating and worker processes are torch's own `DataLoader`; only its batch sampler is ours.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elastic_ps.core.ledger import Range
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.supply import Supply

logger = logging.getLogger(__name__)

_CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)
"""What is taken over from a DataLoader that the script gives."""

_OVER = (
    "this loop over session.loader(...) begins after the end of training: all epochs were trained in the "
    "loop before. For several epochs write session.loader(..., epochs=5), once, and instead of "
    "`for epoch in range(5)` write `for epoch in loader.epochs()`. To look at the data once more, "
    "for example to evaluate, use a torch.utils.data.DataLoader of your own"
)
_EPOCH_OVER = (
    "the loop over the records of epoch {epoch} has come to its end and begins a second time. Iterate once "
    "in each round of `for epoch in loader.epochs()`; to look at the data once more, for example to "
    "evaluate, use a torch.utils.data.DataLoader of your own"
)


class ElasticLoader:
    """Iterates over this worker's share of the records. Made by `Session.loader`.

    One pass over it is the whole job: all epochs, from wherever the job stands when this worker comes.
    To do something between epochs::

        for epoch in loader.epochs():
            for x, y in loader:
                ...

    Attributes:
        epoch: the epoch that the last batch belongs to, from 0.
    """

    def __init__(
        self, engine: Engine, source: Any, *, batch_size: int | None, epochs: int, options: Any
    ) -> None:
        self._engine = engine
        if isinstance(source, DataLoader):
            if batch_size is not None or options:
                raise UsageError(
                    "session.loader(DataLoader) takes its options from the DataLoader; give only epochs"
                )
            batch_size = source.batch_size
            options = {key: getattr(source, key) for key in _CARRIED}
            source = source.dataset
        if batch_size is None or batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; expected a number of records, at least 1")
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}; expected at least 1")
        if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
            raise InvalidModel(
                f"{type(source).__name__} has no length and no index, so its records cannot be handed out "
                "exactly once; use a map-style data set (__len__ and __getitem__)"
            )
        if len(source) < 1:
            raise InvalidModel(f"the data set {type(source).__name__} is empty")
        self.batch_size = batch_size
        self.epoch = 0
        self._source, self._options = source, dict(options)
        self._epochs = epochs
        self._supply = Supply(engine, records=len(source), epochs=epochs, batch_size=batch_size)
        self._ended_early = False
        self._ended: int | None = None  # the last epoch whose loop came to its end
        self._left: int | None = None  # the last epoch whose loop was left by a break

    def __len__(self) -> int:
        """Batches of one epoch if this worker were alone."""
        return -(-len(self._source) // self.batch_size)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        Records of an earlier one that another worker could not train are among those of the epoch that is
        under way. A script that leaves the loop over the loader by `break` goes on with the next epoch; the
        records that it leaves are trained by other workers, or by this one in the next epoch. An epoch is
        yielded again only if other workers give records of it back after the loop over it came to its end.

        Raises:
            UsageError: there are no more epochs, and this has been seen before.
        """
        supply = self._supply
        if self._engine.over:
            raise UsageError(_OVER)
        try:
            while not supply.over:
                least = 0 if self._left is None else self._left + 1
                none_left = least == self._epochs and not self._engine.stopped
                if none_left or not supply.await_some():
                    return
                self.epoch = supply.only = max(supply.epoch, least)
                self._ended = None
                yield self.epoch
        finally:
            supply.only = None
            supply.give_up()

    def __iter__(self) -> Iterator[Any]:
        """Yield collated batches. Blocks while other workers hold the last records.

        Raises:
            SystemExit: this worker was asked to leave (SIGTERM); the records it holds are given back.
        """
        supply, engine = self._supply, self._engine
        if engine.over:
            raise UsageError(_OVER)
        if supply.only is not None and supply.only == self._ended:
            raise UsageError(_EPOCH_OVER.format(epoch=supply.only))
        try:
            while supply.await_some():
                if supply.only is not None and supply.epoch > supply.only:
                    break
                sampler = _Sampler(supply)
                for batch in DataLoader(self._source, batch_sampler=sampler, **self._options):
                    if supply.outdated:
                        break  # what was fetched ahead belongs to others now
                    self._check_accumulation()
                    ranges = sampler.issued.popleft()
                    self.epoch = ranges[0].epoch
                    engine.begin_batch(ranges)
                    yield batch
                    engine.leave_if_asked()
                    if engine.stopped:
                        break
                if engine.stopped:
                    continue
                if not engine.batches.grouped:
                    engine.settle()
                if engine.batches.undecided or not engine.skip_if_not_finite():
                    self._ended_early = True
                    break
            self._ended = supply.only
        except GeneratorExit:  # the script broke out of the loop; what it has not computed on is not its own
            engine.batches.drop()
            self._left = supply.only
            if supply.only is not None:
                supply.leave_epoch()
            raise
        finally:
            if supply.only is None:
                supply.give_up()

    def _check_accumulation(self) -> None:
        """Raises UsageError if batches are left over at the end of the loop, and may have to be repeated."""
        if (
            self._engine.batches.computed
            and self._supply.only is None
            and self._engine.spec.consistency.backup_workers
        ):
            raise UsageError(
                "this script accumulates gradients of several batches, and with backupWorkers the step after "
                "the last of them may come too late, so that there are records to train after the loop. "
                "Iterate over loader.epochs(), and over the loader inside"
            )

    def is_chief(self) -> bool | None:
        """Whether this worker is to evaluate and save in the epoch under way; None outside of `epochs`.

        Blocks: in the last epoch, until all records are in the model.
        """
        epoch, engine = self._supply.only, self._engine
        if epoch is None or engine.over or engine.stopped or engine.closed:
            return None
        if epoch < self._epochs - 1:
            return engine.is_chief_of(epoch)
        if self._ended != epoch or engine.batches.computed or self._supply.await_some():
            return False  # there are records to train, in another round of the same epoch
        return None

    def await_end(self) -> None:
        """Block until training is over, if the loop has ended with batches for a last step, or was stopped.

        Does nothing before that step, nor between epochs. What others give back meanwhile is left to others.
        """
        engine, between = self._engine, self._supply.only is not None
        due = engine.stopped or (self._ended_early and not (between or engine.batches.computed))
        if not due or engine.over or engine.closed:
            return
        self._ended_early = False
        if self._supply.await_some():
            logger.warning(
                "records were given back after the loop over the loader had ended. A script that accumulates "
                "gradients trains them too if it iterates over loader.epochs(), and over the loader inside"
            )
            self._supply.give_up()


class _Sampler:
    """A DataLoader's batch sampler that hands out what the ledger gave; it remembers what it handed out."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self.issued: deque[list[Range]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        while ranges := self._supply.next_batch():
            self.issued.append(ranges)
            yield self._supply.indices(ranges)
