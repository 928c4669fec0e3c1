"""The elastic data loader: the ledger decides batch by batch which records this worker computes on.

Torch's own `DataLoader` fetches and collates records, and runs processes. Only its batch sampler is ours.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic_ps.core.ledger import LEAST, Range
from elastic_ps.data.fingerprint import fingerprint
from elastic_ps.data.source import MOST, is_count, read_source
from elastic_ps.data.states import HandEvent, Loop, LoopEvent
from elastic_ps.data.stream import IndexedStream, ItemIndex
from elastic_ps.data.supply import Supply
from elastic_ps.embedding.ahead import Prefetch
from elastic_ps.errors import ConnectionLost, ElasticPSError, UsageError
from elastic_ps.worker.model.checks import check_loop
from elastic_ps.worker.runtime.records import DataSet
from elastic_ps.worker.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

_NO_EPOCH = -1
"""The script asks for epochs, and has not been given one yet."""

_OVER = (
    "training is over: one loop over session.loader(...) trains all epochs, and that loop has ended. To "
    "train 5 epochs, call session.loader(..., epochs=5) once, and write `for epoch in loader.epochs()` "
    "instead of `for epoch in range(5)`. To read the data again, for example to evaluate, use a "
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

TOO_EARLY = (
    "session.is_chief is not known before the end of the loop over session.loader(...), so it would be false "
    "on all workers. Read it after the loop; before and within it, use session.worker == 0"
)


class ElasticLoader:
    """Iterates over this worker's share of the records. Made by `Session.loader`.

    One loop over it trains all epochs, from the point that the job has reached when this worker joins.
    To act between epochs::

        for epoch in loader.epochs():
            for x, y in loader:
                ...

    Attributes:
        epoch: the epoch that the last batch belongs to, from 0.
        dataset: the data set or stream, with all records.
        batch_size: records in a batch.
        records: the number of records in an epoch.
        batches: those in hand, which no step was made with yet.
    """

    def __init__(
        self,
        runtime: Runtime,
        given: Any,
        *,
        batch_size: int | None,
        epochs: int,
        records: int | None,
        options: Mapping[str, Any],
        prefetch: Prefetch | None = None,
    ) -> None:
        self._runtime, self._prefetch, self.batches = runtime, prefetch, runtime.batches
        consistency, data = runtime.spec.consistency, runtime.spec.data
        late = consistency.may_be_late
        source = read_source(
            given, batch_size=batch_size, records=records, data=data, late=late, options=options
        )
        if source.batch_size < runtime.world.size:
            raise UsageError(
                f"batch_size is {source.batch_size}, but each worker has {runtime.world.size} processes, "
                f"which share a batch (worker.processes); expected {runtime.world.size} or more"
            )
        if not is_count(epochs):
            raise UsageError(f"epochs is {epochs}; expected a whole number from 1 to {MOST}")
        shares = min(runtime.spec.worker.replicas, source.records) if consistency.fixed_workers else 1
        least = source.records // max(1, shares)
        if source.drop_last and least < source.batch_size and not consistency.global_batch_size:
            raise UsageError(
                f"drop_last is set, and {'a share of ' * (shares > 1)}the data set has {least} records, "
                f"fewer than the {source.batch_size} of a batch, so no batch would be left of it. Leave "
                "drop_last out, or make batches smaller"
            )
        self._renew = not source.options.get("persistent_workers")
        self._placed = isinstance(source.readable, IndexedStream)
        if source.options.get("num_workers") and (self._placed or consistency.global_batch_size):
            # Within a loop new ones would read the stream from its beginning, or begin with each version.
            source.options["persistent_workers"] = True
        runtime.slices.least = LEAST if source.batch_size >= LEAST * runtime.slices.processes else 1
        self.batch_size, self.records = source.batch_size, source.records
        self.epoch = 0
        self.dataset = source.dataset
        self._source = source
        order = source.order.to_text() if source.order else ""
        data_id = fingerprint(source.dataset, source.records, order, shuffle=source.shuffle)
        self._data_set = DataSet(source.records, epochs, source.batch_size, data_id, order)
        self._supply = Supply(source, seed=data.seed, version_records=consistency.global_batch_size)
        self._drops = runtime.drops  # as of the records in hand
        self._issued: deque[list[Range]] = deque()  # what torch's DataLoader was told to fetch, and has not
        self._fetching: DataLoader[Any] | None = None
        self._only: int | None = None  # the epoch that is asked for; None: any
        self._first_epoch = 0  # the first epoch that no loop was left by a break in
        self._warned = False

    def __len__(self) -> int:
        """The number of batches in an epoch for a single worker. Several workers share them."""
        records = self._source.records
        return records // self.batch_size if self._source.drop_last else -(-records // self.batch_size)

    @property
    def ended(self) -> int | None:
        """The last epoch that is over for the script; None within a loop."""
        loop, only = self._runtime.records.loop, self._only
        if only is None or loop is Loop.RUNS:
            return None
        return only if loop.is_over or self._first_epoch > only else only - 1

    @property
    def evaluates(self) -> bool:
        """Whether this worker comes to the end of each epoch; see `Schedule`."""
        return self._runtime.schedule.evaluates

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that still has records to train; iterate over the loader inside.

        If another worker could not train records of an earlier epoch, they are trained in the current one. A
        script that leaves the loop over the loader with `break` continues with the next epoch; other workers
        train the records that are left, or this one does in the next epoch. An epoch is yielded again only if
        another worker gives back records of it after this worker's loop over it has ended. The chief of an
        epoch is the chief of the next one, too. So the chief gets the next epoch even if others have trained
        all of it meanwhile; the loop over the loader is empty then.

        Raises:
            UsageError: training is over, because a loop over all epochs has ended.
        """
        records = self._runtime.records
        if records.over:
            raise UsageError(_OVER)
        self._void_left()
        self._only, self._first_epoch = _NO_EPOCH, 0
        try:
            while (epoch := self._next_epoch(self._only)) is not None:
                self.epoch = self._only = epoch
                yield epoch
        finally:
            self._only, records.loader = None, self
            records.note(LoopEvent.LEAVE_EPOCHS)
            self._leave(for_good=True)

    def _next_epoch(self, last: int) -> int | None:
        """The epoch to yield after the `last` one; None after all of them. Blocks."""
        runtime, records = self._runtime, self._runtime.records
        if self._first_epoch == self._data_set.epochs and not runtime.stopped:
            return None
        some = self._await_some()
        epoch = max(self._supply.in_hand[0].epoch, self._first_epoch) if some else self._data_set.epochs
        for each in range(last + 1, 0 if last == _NO_EPOCH or runtime.stopped else epoch):
            if records.is_chief_of(each, passes=True) or self.evaluates:
                records.note(LoopEvent.PASS)
                return each
        records.note(LoopEvent.EPOCH)
        return epoch if some else None

    def __iter__(self) -> Iterator[Any]:
        """Yield collated batches. Blocks while other workers hold the last records.

        Raises:
            SystemExit: this worker was asked to leave (SIGTERM); it gives back the records that it holds.
            UsageError: training is over, this epoch's loop has ended, another loop is running, or the data
                set's length has changed.
        """
        runtime, records = self._runtime, self._runtime.records
        if runtime.model is not None:
            check_loop(runtime.model)
        ended = records.loop.is_over
        if records.loop is Loop.PASSED:
            records.note(LoopEvent.END)
            return
        if records.over or (ended and self._only is None):
            raise UsageError(_OVER)
        if ended:
            raise UsageError(_EPOCH_OVER.format(epoch=self._only))
        if records.loop is Loop.RUNS:
            raise UsageError(_TWO_LOOPS)
        self._check_length()
        if self._only is None:
            self._void_left()
        if self._fetching is None or self._renew:
            sampler: Any = _Sampler(self._next_batch)
            self._fetching = DataLoader(self._source.readable, batch_sampler=sampler, **self._source.options)
        records.leave_if_asked()  # several processes meet: one may have changed the values that they share
        records.note(LoopEvent.BEGIN)
        records.loader, end = self, LoopEvent.LEAVE
        try:
            end = yield from self._batches(self._fetching)
        except BaseException as error:
            # The script broke out of the loop, or a record cannot be read, which other processes do not know.
            failed = isinstance(error, Exception) and not isinstance(error, ElasticPSError)
            if not isinstance(error, GeneratorExit) and not (failed and runtime.world.alone):
                raise
            runtime.batches.drop()
            if self._only is not None:
                self._first_epoch = self._only + 1
                self._leave(for_good=False)
            raise
        finally:
            records.note(end)
            if self._only is None:
                self._leave(for_good=True)

    def _batches(self, fetching: Iterable[Any]) -> Generator[Any, None, LoopEvent]:
        """Yield the batches of a loop over the epoch, or over all of them; returns how it ends. Blocks."""
        runtime = self._runtime
        while self._await_some():
            if self._only is not None and self._supply.in_hand[0].epoch > self._only:
                runtime.exchange_steps()
                if self._outdated:
                    continue
                break
            self._issued.clear()
            prefetch = self._prefetch
            for batch in fetching if prefetch is None else prefetch.batches(fetching, runtime.prefetch_rows):
                if self._outdated:
                    break  # what was fetched ahead belongs to others now
                self._check_accumulation()
                ranges = self._issued.popleft()
                self.epoch = ranges[0].epoch
                runtime.begin_batch(ranges)
                yield batch
                runtime.skip_dropped()
                self._check_length()
                runtime.records.leave_if_asked()
                if runtime.stopped:
                    break
            else:
                self._check_end()
            if runtime.stopped:
                continue
            if runtime.spec.consistency.global_batch_size is not None and not runtime.settle():
                runtime.batches.left_out = True
                runtime.skip()  # no step is made with what has had none of the version
            self.batches.end_loop(of_epoch=self._only is not None)
            if self.batches.ended or not runtime.settle():
                return LoopEvent.END_EARLY
        return LoopEvent.END

    def untrained(self) -> Generator[Any, None, None]:
        """Yield one batch that counts nowhere, for a script that needs one in a loop without records.

        No step is made with it, and buffers get their values back. Yields nothing if the script owes a step.
        """
        runtime, batches = self._runtime, self.batches
        if batches or (model := runtime.model) is None:
            return
        own = runtime.slices.own([*range(min(self.batch_size, self.records))])
        sampler: Any = [[ItemIndex(self.epoch, index) for index in own] if self._placed else own]
        collate = self._source.options.get("collate_fn")
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for batch in DataLoader(self._source.readable, batch_sampler=sampler, collate_fn=collate):
            runtime.gradients.void()
            batches.note(HandEvent.HAND_OUT_LOST)
            runtime.untrained = batches.mixes_lost = True
            try:
                yield batch
            finally:
                runtime.untrained = batches.mixes_lost = False
                batches.note(HandEvent.LAY_DOWN)
                batches.note(HandEvent.FORGET)
                runtime.gradients.void()
                with torch.no_grad():
                    for name, value in before.items():
                        if not torch.equal(now := model.get_buffer(name), value):
                            now.copy_(value)

    def _void_left(self) -> None:
        """Another loop begins: if the last one was left between backward() and step(), that step is void.

        So after Ctrl-C in a notebook. The records go to others, or come again.
        """
        if self._runtime.batches.computed and self._runtime.records.loop is Loop.BEFORE:
            self._runtime.give_up_step()
            self._runtime.gradients.void()

    @property
    def _outdated(self) -> bool:
        """Whether this worker had to join again, so that the records in hand are handed to others."""
        return self._runtime.drops != self._drops

    def _await_some(self) -> bool:
        """Block until there are records in hand; False when all records are in the model.

        Raises:
            UsageError: the script has batches that it made no step with.
        """
        runtime = self._runtime
        if runtime.records.over:
            return False
        runtime.check_given()
        if runtime.stopped:
            self._supply.in_hand.clear()
            runtime.exchange_steps()
            runtime.forget(lost=bool(runtime.batches))
        self._forget()
        if self._supply.in_hand:
            return True
        if runtime.batches and not runtime.settle():
            raise UsageError(
                "the loop over the loader has ended, but no optimizer.step() was called for the last "
                "batches. When you accumulate gradients, call optimizer.step() or skip() after the loop"
            )
        runtime.exchange_steps()
        return self._take(wait=True)

    def _take(self, *, wait: bool = False) -> bool:
        """Get more records; without `wait` only if there are any at the moment.

        Without `wait`, what is in hand stays outdated if this worker had to join again meanwhile: a batch
        that was begun and those that were fetched ahead are still to be dropped.
        """
        only, epoch = self._only, None if self._only == _NO_EPOCH else self._only
        early = only is not None and only < self._data_set.epochs - 1
        ranges = self._runtime.records.take(self._data_set, wait=wait, early=early, epoch=epoch)
        if wait:
            self._forget()
        self._supply.in_hand += ranges
        return bool(ranges)

    def _forget(self) -> None:
        """Drop what others have been handed."""
        if self._outdated:
            self._drops = self._runtime.drops
            self._supply.in_hand.clear()

    def _next_batch(self) -> list[int] | list[ItemIndex]:
        """What torch is to fetch next; [] if there is nothing at the moment.

        With a global batch size there is nothing either when all that this worker has of the open version is
        handed to the script. After joining again, `_await_some` has to get some first, which takes part.
        """
        while not (self._runtime.stopped or self._outdated):
            batch, indices = self._supply.cut(self._take, only=self._only)
            if self._outdated or not batch:
                break
            if indices is None:
                self._runtime.batches.leave_out(batch)
                continue
            self._issued.append(batch)
            own = self._runtime.slices.own(indices)
            return [ItemIndex(batch[0].epoch, index) for index in own] if self._placed else own
        return []

    def _leave(self, *, for_good: bool) -> None:
        """A loop is left: give back the records in hand, which others or this worker's next loop get."""
        if not self._runtime.records.over:
            self._supply.in_hand.clear()
            with suppress(ConnectionLost):  # others get them when this worker's lease ends
                self._runtime.records.stop_computing(leaves=for_good)

    def close(self) -> None:
        """End the processes that fetch. Waits a while for them; those that are late end later. Idempotent.

        Processes that outlive an epoch would be killed when this process ends, and leave files in the
        temporary directory. Torch waits 5 s for each one that is busy with a record, and a worker that has
        left the job has not much longer in all.
        """
        last, self._fetching = [self._fetching], None
        # Torch ends them when nobody refers to the DataLoader any more.
        ending = threading.Thread(target=last.clear, name="end of fetching", daemon=True)
        ending.start()
        ending.join(self._runtime.client.limits.fetching.total_seconds())

    def _check_length(self) -> None:
        """Raise UsageError if the data set has got more records, or fewer. A stream notices that itself."""
        if (now := len(self._source.readable)) != self._source.records:
            raise UsageError(
                f"the {type(self.dataset).__name__} has {now} records now; it had {self._source.records} at "
                "session.loader(...), and the job counts that many in each epoch. Give it all records from "
                "the start. To train on more later, run a second job that begins with the values of the "
                'first: see "Fine-tuning" in docs/cookbook.md'
            )

    def _check_end(self) -> None:
        """Raise UsageError if torch's loop over the batches has ended, though some were asked for."""
        if self._issued and not self._outdated:
            raise UsageError(
                "StopIteration was raised while records were read, which would end the loop: a "
                f"{type(self.dataset).__name__}, a transform or collate_fn calls next() on an iterator that "
                "is exhausted. Let it raise another error there, or return the record"
            )

    def _check_accumulation(self) -> None:
        """Raise UsageError if a last step of several batches might have to be repeated after the loop."""
        consistency, gradients = self._runtime.spec.consistency, self._runtime.gradients
        late = consistency.may_be_late and consistency.global_batch_size is None and self._only is None
        # With a global batch size each batch has its own step. A GradScaler leaves out what is not finite.
        if late and self._runtime.batches.computed and gradients.may_make_a_step and gradients.finite():
            raise UsageError(
                "this script accumulates gradients of several batches. With backupWorkers, and in mode "
                "accumulate, the last step may be dropped as too late. Its records would then be trained "
                "after the loop. Write `for epoch in loader.epochs():`, and loop over the loader in it"
            )

    def is_chief(self) -> bool | None:
        """Whether this worker is to evaluate and save in the epoch under way; None outside of `epochs`.

        Blocks in the last epoch, and after a loop that ended before its last step, until training is over.
        """
        epoch, runtime, records = self._only, self._runtime, self._runtime.records
        if runtime.closed:
            return None
        if epoch is None or runtime.stopped:
            self._warn_if(records.loop is Loop.RUNS and records.loader is self and not runtime.stopped)
            self._await_end()
            return None
        if epoch < self._data_set.epochs - 1:
            return records.is_chief_of(epoch)
        if records.over:
            return None
        self._warn_if(not records.loop.is_over and self._first_epoch <= epoch)
        return False if not records.loop.is_over or runtime.batches.computed or self._await_some() else None

    def _warn_if(self, early: bool) -> None:
        if early and not self._warned:
            logger.warning(TOO_EARLY)
            self._warned = True

    def _await_end(self) -> None:
        """Block until training is over, if the loop has ended with batches for a last step, or was stopped.

        Does nothing before that step, nor between epochs. What others give back meanwhile is left to others.
        """
        runtime, records = self._runtime, self._runtime.records
        unfinished = records.loader is self and records.loop in (Loop.UNFINISHED, Loop.OWES)
        if records.over or not (runtime.stopped or (unfinished and not runtime.batches.computed)):
            return
        if unfinished:
            records.note(LoopEvent.AWAIT)
        if self._await_some():
            logger.warning(
                "another worker gave back records after this script's loop over the loader had ended. A "
                "script that accumulates gradients trains these, too, if it writes `for epoch in "
                "loader.epochs()` and iterates over the loader inside"
            )
            self._leave(for_good=True)


@dataclass
class _Sampler:
    """A DataLoader's batch sampler: `following` says what is to be fetched next."""

    following: Callable[[], list[int] | list[ItemIndex]]

    def __iter__(self) -> Iterator[list[int] | list[ItemIndex]]:
        return iter(self.following, [])
