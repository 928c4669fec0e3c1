"""The elastic data loader: the ledger decides batch by batch which records this worker computes on.

Torch's own `DataLoader` fetches and collates records and runs worker processes. Only its batch sampler is
ours.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_ps.core.ledger import Range
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.supply import NO_EPOCH, Supply

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
    "persistent_workers",
)
"""The options that are copied from a DataLoader that the script passes."""

_OVER = (
    "training is over: an earlier loop over session.loader(...) has trained all epochs. To train 5 epochs, "
    "call session.loader(..., epochs=5) once, and write `for epoch in loader.epochs()` instead of "
    "`for epoch in range(5)`. To read the data again, for example to evaluate, use a "
    "torch.utils.data.DataLoader of your own"
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


_NOT_OPTIONS = {"sampler", "batch_sampler", "shuffle"}


def _shuffles(source: DataLoader[Any]) -> bool:
    """Whether a DataLoader's order is random. Raises UsageError if it chooses records in its own way."""
    module, data = type(source).__module__, source.dataset
    if module.partition(".")[0] in ("accelerate", "transformers"):
        raise UsageError(
            f"the DataLoader is a {module}.{type(source).__name__}, which divides the records "
            "among processes itself. Pass session.loader the DataLoader that you had before "
            "accelerator.prepare(...), or the data set"
        )
    if isinstance(data, IterableDataset):
        return False
    if source.batch_size is None:
        raise UsageError(
            "the DataLoader has a batch_sampler of its own, or batch_size=None. The parameter server decides "
            "which records make a batch, so pass session.loader the data set and batch_size"
        )
    sampler: Any = source.sampler
    if type(sampler) is SequentialSampler:
        return False
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    ):
        return True
    raise UsageError(
        f"the DataLoader has a {type(sampler).__name__}, which chooses records itself. A job trains every "
        "record once in each epoch. Pass session.loader a DataLoader with shuffle=True or False and no "
        "sampler, or a torch.utils.data.Subset of the records that you want"
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
        dataset: the data set, with all records.
        batch_size: records in a batch.
    """

    def __init__(
        self, engine: Engine, source: Any, *, batch_size: int | None, epochs: int, options: Any
    ) -> None:
        self._engine = engine
        shuffle = engine.spec.data.shuffle
        if isinstance(source, DataLoader):
            if batch_size is not None or options:
                raise UsageError(
                    "session.loader(DataLoader) takes its options from the DataLoader; pass only epochs"
                )
            shuffle = _shuffles(source)
            batch_size = source.batch_size
            options = {key: getattr(source, key) for key in (*_CARRIED, "drop_last")}
            options["in_order"] = getattr(source, "in_order", True)  # from torch 2.6 on
            source = source.dataset
        for name in _NOT_OPTIONS & options.keys():
            raise UsageError(
                f"session.loader has no option {name}: the parameter server decides which worker trains "
                "which records. For a random order, set the job's data.shuffle, or shuffle of a DataLoader"
            )
        options = dict(options)
        if not options.pop("in_order", True):
            raise UsageError(
                "in_order is False, but records are counted in the order in which batches were requested; "
                "leave in_order out"
            )
        if batch_size is None or batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; expected a number of records, at least 1")
        if batch_size < engine.world.size:
            raise UsageError(
                f"batch_size is {batch_size}, but each worker has {engine.world.size} processes, which share "
                "a batch (worker.processes); expected as many records at least"
            )
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}; expected at least 1")
        if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
            raise InvalidModel(
                f"{type(source).__name__} has no length and no index, so its records cannot be handed out "
                "exactly once; use a map-style data set (with __len__ and __getitem__). For what can only be "
                "read from the beginning, let each file or chunk be a record: Streams in docs/scripts.md"
            )
        if len(source) < 1:
            raise InvalidModel(f"the data set {type(source).__name__} is empty")
        self.batch_size = batch_size
        self.epoch = 0
        self.dataset = source
        self._drop_last = bool(options.pop("drop_last", False))
        if engine.spec.consistency.global_batch_size and options.get("num_workers"):
            options["persistent_workers"] = True  # they are asked for one version's records after another
        self._options = options
        self._epochs = epochs
        self._supply = Supply(
            engine,
            records=len(source),
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=self._drop_last,
        )
        self._sampler = _Sampler(self._supply)
        self._fetching: DataLoader[Any] | None = None
        self._ended_early = False
        self._ended: int | None = None  # the last epoch whose loop came to its end
        self._left: int | None = None  # the last epoch whose loop was left by a break

    def __len__(self) -> int:
        """The number of batches in an epoch for a single worker. Several workers share them."""
        if self._drop_last:
            return len(self.dataset) // self.batch_size
        return -(-len(self.dataset) // self.batch_size)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        If another worker could not train records of an earlier epoch, they are trained in the current one. A
        script that leaves the loop over the loader with `break` continues with the next epoch; other workers
        train the records that are left, or this one does in the next epoch. An epoch is yielded again only if
        another worker gives back records of it after this worker's loop over it has ended.

        Raises:
            UsageError: training is over, and an earlier loop has trained all epochs.
        """
        supply = self._supply
        if self._engine.records.over:
            raise UsageError(_OVER)
        supply.only = NO_EPOCH
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
            SystemExit: this worker was asked to leave (SIGTERM); it gives back the records that it holds.
            UsageError: training is over, this epoch's loop has ended, or another loop is running.
        """
        supply, engine = self._supply, self._engine
        if engine.records.over:
            raise UsageError(_OVER)
        if supply.only is not None and supply.only == self._ended:
            raise UsageError(_EPOCH_OVER.format(epoch=supply.only))
        if engine.iterating:
            raise UsageError(_TWO_LOOPS)
        if self._fetching is None:
            self._fetching = DataLoader(self.dataset, batch_sampler=self._sampler, **self._options)
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
                    engine.leave_if_asked()
                    if engine.stopped:
                        break
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
        except GeneratorExit:  # the script broke out of the loop; what it has not computed on is not its own
            engine.batches.drop()
            self._left = supply.only
            if supply.only is not None:
                supply.leave_epoch()
            raise
        finally:
            engine.iterating = False
            if supply.only is None:
                supply.give_up()

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
    """A DataLoader's batch sampler that hands out what the ledger gave; it remembers what it handed out."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self.issued: deque[list[Range]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.issued.clear()
        while ranges := self._supply.next_batch():
            self.issued.append(ranges)
            yield self._supply.own(ranges)
