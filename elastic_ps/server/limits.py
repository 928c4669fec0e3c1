"""How long a parameter server waits, how much it keeps, and how it tries again.

A parameter server that starts needs the checkpoint directory before it can serve. If the disk is full, or its
network fails, `Patience` waits instead of failing the job, tells in `problem` what it waits for, and still
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
    """The limits of a parameter server. They are the same for every job; tests need not wait for so long."""

    answer: timedelta = timedelta(seconds=5)
    """After this time a blocked call to shard 0 answers that nothing has happened; the caller asks again."""

    shard_answer: timedelta = timedelta(seconds=10)
    """Likewise for a blocked push or pull, on each shard."""

    tick: timedelta = timedelta(milliseconds=250)
    """How often leases and checkpoints are looked after, and a blocked call looks again."""

    settled: timedelta = timedelta(seconds=5)
    """For how long a call waits for a round to be committed, before the worker has to call again."""

    patience: timedelta = timedelta(seconds=60)
    """How long a silent shard is asked for its part, and a closing server waits for its last checkpoint."""

    given_up: timedelta = timedelta(minutes=10)
    """A checkpoint is given up if a shard has not written its part after this time."""

    written: timedelta = timedelta(milliseconds=500)
    """For how long steps wait for a part of a checkpoint to be written, before they copy what is left."""

    keep_again: timedelta = timedelta(seconds=1)
    """After a checkpoint that must be written has failed, the time until the next attempt."""

    small_pull: int = 64 * 1024
    """Bytes of a pulled bucket that are copied, if it is the last one: nothing has to be said after it."""

    smallest_bucket: int = SMALLEST_BUCKET_BYTES
    """A model is cut into buckets that are not smaller, if it can be."""

    probe: timedelta = timedelta(milliseconds=500)
    """Between two tries to reach a standby."""

    slice: timedelta = timedelta(seconds=1)
    """For how long a round is held up, at about the most, to send buckets to a standby that catches up."""

    tensors: TensorLimits = TENSORS
    """Of those that scripts keep."""

    window: int = 200
    """Steps that are measured for a decision of `core.objective`: two of them may be more stale than the 99th
    percentile."""


USUAL = ServerLimits()


T = TypeVar("T")

PAUSE = timedelta(milliseconds=500)
"""Between two tries."""

LOOK = timedelta(milliseconds=50)
"""Between two looks whether the process was asked to end."""

RETRY = timedelta(milliseconds=100)
"""Between two calls to a process that does not answer."""


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
        patience: for how long after its first failure. A call that takes long is not silence.
        over: whether there is no use in trying again.

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
    """Tries again what the storage does not allow at the moment. One thread waits; any may read `problem`.

    Args:
        asked_to_end: whether the process was asked to end, so that it must not wait any longer.
        pause: between two tries.

    Attributes:
        problem: what is waited for, in words; "" while nothing is.
        asked_to_end: as given.
    """

    def __init__(self, asked_to_end: Callable[[], bool] = lambda: False, pause: timedelta = PAUSE) -> None:
        self.problem = ""
        self.asked_to_end, self._pause = asked_to_end, pause

    def until_done(self, action: Callable[[], T], *, between: Callable[[], object] = lambda: None) -> T:
        """Call `action` until the storage lets it through. Blocks without a limit.

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
