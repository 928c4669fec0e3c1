"""The elastic data loader: which records this worker computes on is decided batch by batch, by the ledger.

Fetching, collating and worker processes are torch's own `DataLoader`; only its batch sampler is ours.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic_ps.core.ledger import Range
from elastic_ps.errors import InvalidModel, UsageError

if TYPE_CHECKING:
    from elastic_ps.worker.session import Session

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


@lru_cache(maxsize=4)
def permutation(records: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    """The index of the record at each position of an epoch; the same in every worker."""
    if not shuffle:
        return list(range(records))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(records, generator=generator).tolist()


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
        self, session: Session, source: Any, *, batch_size: int | None, epochs: int, options: Any
    ) -> None:
        self._session = session
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
        self._records, self._epochs = len(source), epochs
        self._only: int | None = None
        self._over = False
        self._kept: list[Range] = []
        self._generation = session.generation

    def __len__(self) -> int:
        """Batches of one epoch if this worker were alone."""
        return -(-self._records // self.batch_size)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        Each is yielded once at most. Records of an earlier one that another worker could not train are among
        those of the epoch that is under way.
        """
        try:
            while not self._over:
                if not self._in_hand() and not self._wait():
                    return
                self._only = self._kept[0].epoch
                self.epoch = self._only
                yield self._only
        finally:
            self._only = None
            self._give_up()

    def __iter__(self) -> Iterator[Any]:
        """Yield collated batches. Blocks while other workers hold the last records.

        Raises:
            SystemExit: this worker was asked to leave (SIGTERM); the records it holds are given back.
        """
        try:
            while self._in_hand() or self._wait():
                if self._only is not None and self._kept[0].epoch > self._only:
                    return
                sampler = _Sampler(self)
                for batch in DataLoader(self._source, batch_sampler=sampler, **self._options):
                    if self._outdated:
                        break  # what was fetched ahead belongs to others now
                    self._check_accumulation()
                    ranges = sampler.issued.popleft()
                    self.epoch = ranges[0].epoch
                    self._session._begin_batch(ranges)
                    yield batch
                    self._session._between_batches()
                if self._session._batches:
                    self._session._ended_early = self
                    return
        except GeneratorExit:  # the script broke out of the loop; what it has not computed on is not its own
            self._session._batches.drop()
            raise
        finally:
            if self._only is None:
                self._give_up()

    def _check_accumulation(self) -> None:
        """Raises UsageError if batches are left over at the end of the loop, and may have to be repeated."""
        if self._session._batches and self._only is None and self._session.spec.consistency.backup_workers:
            raise UsageError(
                "this script accumulates gradients of several batches, and with backupWorkers the step after "
                "the last of them may come too late, so that there are records to train after the loop. "
                "Iterate over loader.epochs(), and over the loader inside"
            )

    def _give_up(self) -> None:
        """Nobody iterates any more."""
        if not self._over:
            self._kept.clear()
            self._session._stop_computing()

    def _await_end(self) -> None:
        """Block until all records are in the model; what others give back meanwhile is left to others."""
        if self._wait():
            logger.warning(
                "records were given back after the loop over the loader had ended. A script that accumulates "
                "gradients trains them too if it iterates over loader.epochs(), and over the loader inside"
            )
            self._give_up()

    def _wait(self) -> bool:
        """Block until there are records, which are kept; False when all records are in the model."""
        if self._session._batches:
            raise UsageError(
                "the loop over the loader has ended with batches that no optimizer.step() was called for. "
                "When accumulating gradients, call optimizer.step() for the last batches after the loop"
            )
        self._over = not self._take(wait=True)
        return not self._over

    def _take(self, *, wait: bool) -> bool:
        """Get more records; without `wait` only if there are any at the moment.

        Without `wait`, what is in hand stays outdated if this worker had to join again meanwhile: a batch
        that was begun and those that were fetched ahead are still to be dropped.
        """
        ranges = self._session._take(self._records, self._epochs, self.batch_size, wait=wait)
        if wait:
            self._forget()
        self._kept.extend(ranges)
        return bool(ranges)

    def _in_hand(self) -> bool:
        self._forget()
        return bool(self._kept)

    @property
    def _outdated(self) -> bool:
        """Whether this worker had to join again, so that the records in hand are handed to others."""
        return self._session.generation != self._generation

    def _forget(self) -> None:
        if self._outdated:
            self._generation = self._session.generation
            self._kept.clear()

    def _next(self) -> list[Range]:
        """The positions of the next batch, all of one epoch; [] if there are none at the moment.

        After joining again there are none until `_wait` has got some: only that takes part in rounds again.
        """
        batch: list[Range] = []
        missing = self.batch_size
        while missing and not self._outdated and (self._kept or self._take(wait=False)):
            first = self._kept[0]
            ahead = self._only is not None and first.epoch > self._only
            if ahead or (batch and first.epoch != batch[0].epoch):
                break
            taken = first._replace(stop=min(first.stop, first.start + missing))
            batch.append(taken)
            missing -= taken.records
            self._kept[0] = first._replace(start=taken.stop)
            if not self._kept[0].records:
                self._kept.pop(0)
        return [] if self._outdated else batch

    def indices(self, ranges: list[Range]) -> list[int]:
        """The data set's indexes of the records at these positions."""
        data = self._session.spec.data
        result: list[int] = []
        for r in ranges:
            order = permutation(self._records, r.epoch, shuffle=data.shuffle, seed=data.seed)
            result.extend(order[r.start : r.stop])
        return result


class _Sampler:
    """A DataLoader's batch sampler that hands out what the ledger gave; it remembers what it handed out."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self.issued: deque[list[Range]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        while ranges := self._loader._next():
            self.issued.append(ranges)
            yield self._loader.indices(ranges)
