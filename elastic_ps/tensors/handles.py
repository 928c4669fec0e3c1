"""Background threads that make a script's calls, and handles to wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Generic, TypeVar

from elastic_ps.errors import ElasticPSError, RefusalCode, Refused, TensorLost, UsageError

MOST_QUEUED = 32
"""The number of queued calls to a parameter server. A further one blocks, so that memory stays bounded."""

MOST_BYTES = 256 * 1024 * 1024
"""The same for the bytes of queued pushes, which are copies. A larger push waits until no other is queued."""

CLOSED = "the session is closed, so session.server cannot be used any more"

T = TypeVar("T")


class Handle(Generic[T]):
    """A call in the background.

    Attributes:
        name: the name of the tensor.
    """

    def __init__(self, name: str, parts: Sequence[Future[None]], result: Callable[[], T]) -> None:
        self.name = name
        self._parts, self._result = parts, result
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout: timedelta | None = None) -> T:
        """Block until the call is done; returns the tensor of a pull, None for a push. May be called again.

        Raises:
            TensorLost: the tensor is gone; the message says why.
            ConnectionLost: a parameter server has not answered for 15 minutes. A push may have been applied
                to some slices of the tensor.
            TimeoutError: the call is not done within `timeout`. It goes on.
            UsageError: `timeout` is not a timedelta.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise UsageError(
                f"wait() got {timeout!r}; expected a datetime.timedelta, such as timedelta(seconds=5)"
            )
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            for part in self._parts:
                part.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Refused as refusal:
            raise in_words(refusal) from refusal
        finally:
            self._seen = self.done
        return self._result()

    def raise_unseen(self) -> None:
        """Raise the error of a finished call, unless somebody has waited for it."""
        if not self._seen:
            self.wait()


class SerialExecutor:
    """A thread that makes the calls to one shard, in order."""

    def __init__(self, shard: int) -> None:
        self._changed = threading.Condition()
        self._work: deque[tuple[Callable[[], None], Future[None], int]] = deque()
        self._queued = 0  # bytes
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"tensors-{shard}", daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], None], nbytes: int = 0) -> Future[None]:
        """Queue a call. Blocks while too many wait, or they hold too many bytes with its `nbytes`."""
        future: Future[None] = Future()
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._has_room(nbytes))
            if self._closing:
                raise UsageError(CLOSED)
            self._work.append((work, future, nbytes))
            self._queued += nbytes
            self._changed.notify_all()
        return future

    def _has_room(self, nbytes: int) -> bool:
        fits = not nbytes or not self._queued or self._queued + nbytes <= MOST_BYTES
        return fits and len(self._work) < MOST_QUEUED

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._work)
                if not self._work:
                    return
                work, future, nbytes = self._work.popleft()
                self._queued -= nbytes
                self._changed.notify_all()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                future.set_exception(error)
            else:
                future.set_result(None)
            del work, future  # free the sent data before the next call

    def close(self) -> None:
        """Take no more calls, and end when those that were begun are done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)


def in_words(refusal: Refused) -> ElasticPSError:
    """The exception that a script gets for a refusal."""
    if refusal.code is RefusalCode.GONE:
        return TensorLost(str(refusal))
    return UsageError(str(refusal)) if refusal.code is RefusalCode.INVALID else refusal
