"""The epochs of a job, as Lightning's loop takes them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from elastic_ps.integrations.epochs import OpenEpochs


class Epochs(OpenEpochs):
    """The job's epochs as they come, for Lightning's loop."""

    _left = False

    def begin(self) -> Iterator[tuple[Any, int, int]]:
        """Loop over an epoch, as a fetcher of Lightning's has it: batches, with two numbers."""
        self._running = self._of_epoch()
        return self._running

    def _of_epoch(self) -> Iterator[tuple[Any, int, int]]:
        """The batches of an epoch. The last one goes on until all records are in the model."""
        while not (self._left or self.ends()):
            self.begin_epoch()
            empty = True
            given: Any = iter(self._loader)
            try:
                with closing(given):
                    for index, batch in enumerate(given):
                        self.batches += 1
                        empty = False
                        yield batch, index, 0
            finally:
                self.looping = False
            if self._left:
                return
            self._ended()
            if self.is_last and not self.ends():
                continue  # others have given back records
            if not empty or self.comes_through:
                return

    @property
    def next_number(self) -> int:
        """The number of the epoch that comes next, if `ends` was false."""
        return self.number if self._upcoming is None else self._upcoming

    def leave_epoch(self) -> None:
        """Lightning has left an epoch at a batch, which goes to others, as do those after it. May block."""
        running, self._running = self._running, None
        assert isinstance(running, Generator)
        running.close()
        self.batches -= 1

    def leave(self, reason: str) -> None:
        """Lightning has ended its loop: the training ends on all workers. Blocks."""
        self._left = True
        self._session.stop(reason)
        running, self._running = self._running, None
        if running is not None:
            next(running, None)
        self.ends()
