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
        self._supply = Supply(engine, records=len(source), epochs=epochs, batch_size=batch_size)
        self._ended_early = False

    def __len__(self) -> int:
        """Batches of one epoch if this worker were alone."""
        return -(-len(self._source) // self.batch_size)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        Each is yielded once at most. Records of an earlier one that another worker could not train are among
        those of the epoch that is under way.
        """
        supply = self._supply
        try:
            while not supply.over:
                if not supply.await_some():
                    return
                self.epoch = supply.only = supply.epoch
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
        try:
            while supply.await_some():
                if supply.only is not None and supply.epoch > supply.only:
                    return
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
                if engine.batches:
                    self._ended_early = True
                    return
        except GeneratorExit:  # the script broke out of the loop; what it has not computed on is not its own
            engine.batches.drop()
            raise
        finally:
            if supply.only is None:
                supply.give_up()

    def _check_accumulation(self) -> None:
        """Raises UsageError if batches are left over at the end of the loop, and may have to be repeated."""
        if (
            self._engine.batches
            and self._supply.only is None
            and self._engine.spec.consistency.backup_workers
        ):
            raise UsageError(
                "this script accumulates gradients of several batches, and with backupWorkers the step after "
                "the last of them may come too late, so that there are records to train after the loop. "
                "Iterate over loader.epochs(), and over the loader inside"
            )

    def await_end(self) -> None:
        """Block until all records are in the model, if the loop has ended with batches for a last step.

        Does nothing before that step, nor between epochs. What others give back meanwhile is left to others.
        """
        between = self._supply.only is not None
        if not self._ended_early or between or self._engine.batches or self._engine.closed:
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
