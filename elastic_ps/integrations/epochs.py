"""The job's records for a script, or a library, that begins a loop over its loader in each epoch.

A script with `for epoch in range(3)` counts epochs itself, while the job says which epoch has records: a
worker that joins late begins with a later one, and an epoch comes again if another worker gives back records
of it. `EpochLoader` brings the two together: what its loop 2 yields is of epoch 2, or of an earlier one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_ps.errors import UsageError
from elastic_ps.worker.loader import ElasticLoader
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

_END, _GROUP = object(), object()
_LACKS = (
    "the training data of a job have no {name!r}: the parameter server says which records a worker trains. A "
    "job that goes on from a checkpoint (`elastic-ps run --resume DIR`) skips those already trained"
)
_NO_MORE = (
    "this worker has no further batch of the epoch. The workers of a job share the len(loader) batches of an "
    "epoch. End the loop after this worker's last batch: use a for loop, or next(iterator, None)"
)
_LOOKED = (
    "the script left its first loop over the training data without any backward(), as it does with "
    "next(iter(loader)). That ends the training. To look at batches, take them from the DataLoader before it "
    "is prepared or set up"
)
_LEFT = "the script left its loop over the training data"


class EpochLoader:
    """A loader with a loop for each epoch, as torch's. For the thread that has made the session.

    Scripts use after a loop what its batches have given them. If other workers have trained the epoch, a loop
    yields a batch that is not trained (see `ElasticLoader.untrained`). If the script leaves a loop with
    `break`, the training ends on all workers, as `Session.stop` does it.

    Args:
        epochs: how many loops there are.
        place: moves a batch to the device.
        ended: called at the end of the records of an epoch, to make a step with what was accumulated.

    Attributes:
        looping: whether a loop is under way.
        begun: how many loops have begun.
        batches: how many batches this worker was given.
        dataset: with all records.
        records: in an epoch.
        batch_size: of one worker.
    """

    def __init__(
        self,
        loader: ElasticLoader,
        session: Session,
        *,
        epochs: int,
        place: Callable[[Any], Any],
        ended: Callable[[], object],
    ) -> None:
        self.looping, self.begun, self.batches = False, 0, 0
        self.dataset, self.records, self.batch_size = loader.dataset, loader.records, loader.batch_size
        self._loader, self._session, self._epochs = loader, session, epochs
        self._place, self._ended = place, ended
        self._numbers = loader.epochs()
        self._upcoming: int | None = None  # an epoch that has been asked for, and not looped over
        self._finished = False  # the job has no further epoch
        self._is_of_job = False  # the last loop had an epoch of the job's
        self._running: Iterator[Any] | None = None  # what the loop under way takes from, or one that was left
        self._untrained: Generator[Any, None, None] | None = None
        self._owes = False  # the last loop has ended before the script made a step with its last batches

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_LACKS.format(name=name))

    @property
    def within(self) -> bool:
        """Whether the script is in a loop, or in the step with the last batches of one."""
        batches = self._loader.batches
        return self.looping or (self._owes and (bool(batches.computed) or batches.mixes_lost))

    @property
    def entered(self) -> bool:
        """Return True once a loop has begun, or once training has ended without one."""
        return self.begun > 0 or self._finished

    @property
    def computed(self) -> int:
        """How many batches the script has computed on for its next step."""
        return len(self._loader.batches.sizes)

    @property
    def ends_group(self) -> bool:
        """Whether the next backward() is for the last batch of an epoch."""
        return self._owes and self._loader.batches.ends_group

    def __len__(self) -> int:
        """The batches of an epoch for a single worker. Several workers share them."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Loop over the records of the next epoch. Blocks as `ElasticLoader` does, and raises the same.

        A script may load several batches before it computes on them. Then the iterator ends with the last
        ones, and goes on if it is asked again: if a step was lost, its records come again.

        Raises:
            SystemExit: the training was finished before this worker's first batch, and another one is the
                chief. The status is 0.
            UsageError: all loops have ended.
        """
        return _UntilGroup(self._batches())

    def _batches(self) -> Iterator[Any]:
        """See `__iter__`. Yields `_GROUP` where the script is to compute on what it has loaded."""
        self.heed_break()
        if self.begun >= self._epochs and not self._session.stopped:
            raise UsageError(
                f"loop {self.begun + 1} over the training data begins, but epochs={self._epochs} was given, "
                "so the job has no further records. If the script trains in this loop, give more epochs. To "
                "read the data again, for example to evaluate, use another DataLoader, prepared or set up "
                "after the training one"
            )
        self._running = self._loop(self.begun)
        self.begun, self.looping = self.begun + 1, True
        before, mine = self.batches, self.begun
        try:
            for batch in self._running:
                if batch is not _GROUP:
                    self.batches += 1
                    yield self._place(batch)
                elif not (yield from self._pause(mine)):
                    return
            self._running = None
            if self.batches == before:
                self._end_if_late()
                logger.info(
                    "other workers have all records of this epoch, so this loop gets one batch that does not "
                    "count"
                )
                self._untrained = self._loader.untrained()
                yield from map(self._place, islice(self._untrained, 1))
                if self._loader.batches.mixes_lost and not (yield from self._pause(mine)):
                    return
                self._untrained.close()
                self._ended()
        finally:
            if self.begun == mine:
                self.looping = False

    def _pause(self, number: int) -> Generator[Any, None, bool]:
        """End loop `number` for now. Returns whether it goes on: no other one has begun since."""
        self._owes, self.looping = True, False
        yield _GROUP
        if self.begun != number:
            return False
        self._owes, self.looping = False, True
        return True

    def _loop(self, number: int) -> Iterator[Any]:
        """The batches of this loop, of which the last one goes on until all records are in the model.

        Yields `_GROUP` where the script has loaded all batches of a step, and computes on them now.
        """
        self._is_of_job = last = number == self._epochs - 1
        while (epoch := self.upcoming()) is not None and (last or epoch <= number):
            self._upcoming, self._is_of_job = None, True
            yield from self._loader
            if self._loader.batches.ended and self._loader.batches:
                yield _GROUP
            self._ended()
            if epoch == number and not last:
                return
        if not self._is_of_job and self._upcoming is not None:
            self._session.pause()  # it may take the script a while to come to that epoch

    def _end_if_late(self) -> None:
        """End the script if this worker has nothing to do in the job. Raises SystemExit."""
        if self.batches or (self._is_of_job and self.begun < self._epochs):
            return
        if self.upcoming() is not None or self._session.is_chief:
            return
        logger.warning(
            "the training was finished before this worker's first batch, so it ends its script here"
        )
        raise SystemExit(0)

    def upcoming(self) -> int | None:
        """The job's next epoch that this worker has records of; None after the last one. Blocks."""
        if self._upcoming is None:
            self._upcoming = next(self._numbers, None)
            self._finished = self._upcoming is None
        return self._upcoming

    def epochs(self) -> Iterator[int]:
        """The number of each epoch, for a script that begins with the one that the job has reached.

        Raises SystemExit as a loop does.
        """
        while True:
            self.heed_break()
            if self.begun >= self._epochs or (upcoming := self.upcoming()) is None:
                self._end_if_late()
                return
            self.begun = max(self.begun, min(upcoming, self._epochs - 1))
            yield self.begun

    def heed_break(self, *, ends: bool = False) -> None:
        """The script goes on after a loop: if it has left batches there, the training ends. May block.

        Args:
            ends: the script has ended, so it has left the epochs to come, too.

        Raises:
            UsageError: the script has only looked at batches before the job's first step.
        """
        if self._left_without_backward and not (self._session.version or self._session.stopped):
            raise UsageError(_LOOKED)
        if self._owes:
            self._owes = False
            if self._untrained is not None:
                self._untrained.close()
            self._running = None
            self._ended()
            if self.begun == self._epochs and self.upcoming() is not None:
                logger.warning(
                    "records remain after this script's last loop over the training data, because a step was "
                    "lost. Other workers, if there are any, train them. If this script loads several batches "
                    "before it computes on them, let it call next() on its iterator again to train them here"
                )
        running, self._running = self._running, None
        left = running is not None and next(running, _END) is not _END
        if left or (ends and 0 < self.begun < self._epochs and self.upcoming() is not None):
            self._session.stop(_LEFT)
            logger.warning("%s, so the training ends on all workers", _LEFT)

    @property
    def _left_without_backward(self) -> bool:
        """Return True if the script left its first loop without an error and without any backward()."""
        batches, left = self._loader.batches, self._running is not None and not self._owes
        never = batches.grouped is None and bool(batches.undecided)
        return left and self.begun == 1 and never and sys.exception() is None

    def is_chief(self) -> bool:
        """`Session.is_chief` after a loop: also false if the loop had no epoch of the job's. May block."""
        self.heed_break()
        late = self._finished and not self.begun
        return (self._is_of_job or late or bool(self._session.stopped)) and self._session.is_chief


class _UntilGroup:
    """An iterator that ends at each `_GROUP`, and goes on behind it if it is asked again."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (batch := next(self._batches, _GROUP)) is _GROUP:
            raise StopIteration(_NO_MORE)
        return batch


class OpenEpochs(EpochLoader):
    """The job's epochs as they come, for a library's loop that ends when the job says so.

    Attributes:
        number: the job's number of the epoch of the last loop.
        finished: all epochs are over.
    """

    number = -1
    finished = False

    def begin_epoch(self) -> None:
        """Begin a loop over the epoch that comes next, after `ends` was false."""
        assert self._upcoming is not None
        self.number, self._upcoming = self._upcoming, None
        self.looping, self.begun = True, self.begun + 1

    def ends(self) -> bool:
        """Return whether all epochs are over. Blocks."""
        self.finished = self.finished or self.upcoming() is None
        return self.finished

    @property
    def comes_through(self) -> bool:
        """Return whether this worker evaluates or saves the epoch, though others have trained it."""
        return self._session.is_chief or self._loader.evaluates

    @property
    def is_last(self) -> bool:
        """Return whether `number` is that of the last epoch."""
        return self.number == self._epochs - 1
