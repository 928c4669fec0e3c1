"""How long a parameter server waits, how much it keeps, and how it retries.

A parameter server needs the checkpoint directory before it can serve. If the disk is full, or its network
fails, `Patience` waits instead of failing the job. `problem` says what it waits for, and the process still
ends when it is asked to.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from elastic_ps.core.partition import SMALLEST_BUCKET_BYTES
from elastic_ps.errors import AskedToEnd, RefusalCode, Refused, StorageUnavailable
from elastic_ps.tensors.limits import USUAL as TENSORS
from elastic_ps.tensors.limits import TensorLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a parameter server, the same for every job. Tests pass shorter ones."""

    answer: timedelta = timedelta(seconds=5)
    """A blocked call to shard 0 answers after this time that nothing has happened. The caller repeats it."""

    shard_answer: timedelta = timedelta(seconds=10)
    """The same for a blocked push or pull, on each shard."""

    tick: timedelta = timedelta(milliseconds=250)
    """The time between two looks at leases and checkpoints, and of a blocked call at the state."""

    settled: timedelta = timedelta(seconds=5)
    """How long a call waits for the commit of a round, before the worker has to call again."""

    patience: timedelta = timedelta(seconds=60)
    """How long calls to a silent shard are repeated, and a closing server waits for its last checkpoint."""

    given_up: timedelta = timedelta(minutes=10)
    """A checkpoint is given up if a shard has not written its part after this time."""

    written: timedelta = timedelta(milliseconds=500)
    """How long steps wait for the writing of a checkpoint's part, before they copy the rest."""

    keep_again: timedelta = timedelta(seconds=1)
    """The time between two attempts to write a checkpoint that must be written."""

    small_pull: int = 64 * 1024
    """The last bucket of a pull is copied if it has at most so many bytes: then no other answer follows."""

    smallest_bucket: int = SMALLEST_BUCKET_BYTES
    """Bytes of a bucket, at least, if the model is large enough."""

    probe: timedelta = timedelta(milliseconds=500)
    """The time between two attempts to reach a standby."""

    slice: timedelta = timedelta(seconds=1)
    """How long a round is delayed, at most, to send buckets to a standby that is catching up."""

    tensors: TensorLimits = TENSORS
    """The limits of the tensors that scripts keep."""

    window: int = 200
    """The number of steps that `core.objective` measures for a decision. Two of them may be more stale than
    the 99th percentile."""


USUAL = ServerLimits()


T = TypeVar("T")

PAUSE = timedelta(milliseconds=500)
"""The time between two attempts."""

LOOK = timedelta(milliseconds=50)
"""The time between two looks whether the process was asked to end."""

RETRY = timedelta(milliseconds=100)
"""The time between two calls to a process that does not answer."""


def retry(
    action: Callable[[], T],
    on: type[Exception] | tuple[type[Exception], ...],
    *,
    patience: timedelta,
    over: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `action` until it raises none of `on`. Blocks.

    Args:
        patience: for how long it retries after the first failure. A slow call is no failure.
        over: whether a retry has no use.

    Raises:
        Exception: the last of `on`, when `patience` has passed or it is `over`; at once, anything else.
    """
    until = math.inf
    while True:
        try:
            return action()
        except on:
            until = min(until, clock() + patience.total_seconds())
            if over() or clock() >= until:
                raise
        time.sleep(RETRY.total_seconds())


class Patience:
    """Retries what the storage does not allow at the moment. One thread waits; any may read `problem`.

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
        """Call `action` until the storage allows it. Blocks without a limit.

        Args:
            between: called after each failure.

        Raises:
            AskedToEnd: the process was asked to end meanwhile.
            Exception: whatever else `action` raises.
        """
        while True:
            try:
                result = action()
            except (StorageUnavailable, Refused) as error:
                if isinstance(error, Refused) and error.code is not RefusalCode.NOT_READY:
                    raise  # else another shard waits for its storage
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
