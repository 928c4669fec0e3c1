"""The policy of retries: what may succeed later is tried again, after a pause, for a limited time.

A parameter server needs the checkpoint directory before it can serve. If the disk is full, or its network
fails, `Patience` waits instead of failing the job. `problem` says what it waits for, and the process still
ends when it is asked to.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from elastic_ps.errors import (
    AskedToEnd,
    ConnectionLost,
    DeadlineExceeded,
    RefusalCode,
    Refused,
    StorageUnavailable,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY = timedelta(milliseconds=100)
"""The time between two attempts of `retry`."""

PAUSE = timedelta(milliseconds=500)
"""The time between two attempts of `Patience`."""

LOOK = timedelta(milliseconds=50)
"""The time between two looks whether the process was asked to end."""


def passes(error: Exception) -> bool:
    """Whether another attempt may succeed. Of refusals, that is NOT_READY alone."""
    return not isinstance(error, Refused) or error.code is RefusalCode.NOT_READY


def retry(
    action: Callable[[], T],
    on: type[Exception] | tuple[type[Exception], ...],
    *,
    patience: timedelta,
    over: Callable[[], bool] = lambda: False,
    pause: timedelta = RETRY,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `action` until it raises none of `on` that `passes`. Blocks.

    Args:
        patience: for how long it retries after the first failure. A slow call is not a failure.
        over: whether a retry has no use.
        pause: the time between two attempts.

    Raises:
        Exception: the last of `on`, when `patience` has passed or it is `over`; at once, anything else.
    """
    until = math.inf
    while True:
        try:
            return action()
        except on as error:
            until = min(until, clock() + patience.total_seconds())
            if over() or clock() >= until or not passes(error):
                raise
        time.sleep(pause.total_seconds())


class Pauses:
    """Growing pauses between attempts: each is twice the last, from `first` to `longest` seconds."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.reset()

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._next = self._first

    def next(self) -> float:
        """The pause before the next attempt."""
        pause, self._next = self._next, min(self._longest, 2 * self._next)
        return pause


class Patience:
    """Retries what the storage or another shard does not allow now. One thread waits; any may read `problem`.

    Args:
        asked_to_end: whether the process was asked to end. Then it stops waiting.
        pause: the time between two attempts.

    Attributes:
        problem: the cause of the wait, in words; "" if it does not wait.
        asked_to_end: as given.
    """

    def __init__(self, asked_to_end: Callable[[], bool] = lambda: False, pause: timedelta = PAUSE) -> None:
        self.problem = ""
        self.asked_to_end, self._pause = asked_to_end, pause

    def until_done(self, action: Callable[[], T], *, between: Callable[[], object] = lambda: None) -> T:
        """Call `action` until the storage and the other shards allow it. Blocks without a limit.

        Args:
            between: called after each failure.

        Raises:
            AskedToEnd: the process was asked to end meanwhile.
            Exception: whatever else `action` raises.
        """
        while True:
            try:
                result = action()
            except (StorageUnavailable, Refused, ConnectionLost, DeadlineExceeded) as error:
                if not passes(error):  # else another shard waits for its storage, or is away
                    raise
                if self.problem != str(error):
                    logger.warning("waiting: %s", error)
                self.problem = str(error)
            else:
                self.problem = ""
                return result
            between()
            deadline = time.monotonic() + self._pause.total_seconds()
            while time.monotonic() < deadline:
                if self.asked_to_end():
                    raise AskedToEnd(f"asked to end while waiting: {self.problem}")
                time.sleep(LOOK.total_seconds())
