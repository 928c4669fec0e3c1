"""Has the first version on disk before training begins, and the last one before it ends.

Checkpoints in between are ordered with a round (`driver`). Those here wait for nobody's step: all shards are
told to write the version that they have, and the thread that asks waits until it is on disk.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Protocol

from elastic_ps.errors import CheckpointError, RefusalCode, Refused, TransportError
from elastic_ps.server import kept
from elastic_ps.server.guarded import Guarded
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.orders import Advance

logger = logging.getLogger(__name__)

LAST = timedelta(minutes=10)
"""For how long the end of the job waits for the last version to be on disk."""

RETRY = timedelta(milliseconds=100)
"""Between two attempts to have the shards write the current version."""


class Orders(Protocol):
    """How the shards get orders; see `Driver`."""

    def turn(self) -> AbstractContextManager[Advance]:
        """Be the only thread that gives orders. Yields the order that describes the current state."""

    def tell_all(self, advance: Advance) -> object:
        """Send an order to all shards. Raises Refused, TransportError."""


class Safekeeping:
    """Has the first version and the last one written. Thread-safe.

    Args:
        job: whose versions they are.
        orders: the way to the shards.
        keeper: makes the shards' parts a checkpoint; None for no checkpoints, so nothing is waited for.
    """

    def __init__(self, job: Guarded, orders: Orders, keeper: Keeper | None) -> None:
        self._job, self._orders, self._keeper = job, orders, keeper
        self._writing = False  # a thread writes a version that must be kept
        self._not_before = 0.0  # writing it has failed, and is not tried again before this time
        self._ended: tuple[tuple[int, int, str], float] | None = None  # what of `JobState.end`, since when
        self._durable_end: tuple[int, int, int, str] | None = None  # see `JobState.end`
        self._told: tuple[int, int, int] | None = None  # term, version, number: not all shards may know it

    def may_finish(self) -> bool:
        """Whether workers may be told that the job is finished. The job's lock is held.

        Not before the last version and the chief are on disk. If the parameter server was lost before that,
        the other workers would continue from the checkpoint, without the workers that were told. A full disk
        delays the end for `LAST` at most. Nor before the shards have the last values: a worker that has not
        made them may be the chief.
        """
        state = self._job.state
        return state.end is not None and state.values_are_here and self.is_kept()

    def is_kept(self) -> bool:
        """Whether the end of training is on disk, or writing it has failed for `LAST`. The lock is held."""
        now, state = self._job.clock(), self._job.state
        if self._keeper is None or self._holds(self._keeper):
            return True
        end = (state.term, state.version, state.script_state)
        if self._ended is None or self._ended[0] != end:
            self._ended = (end, now)
        return now - self._ended[1] > LAST.total_seconds()

    def _holds(self, keeper: Keeper) -> bool:
        """Whether the current version is on disk, and its end if training has ended. The lock is held."""
        state = self._job.state
        return keeper.durable_version == state.version and state.end in (None, self._durable_end)

    @property
    def problem(self) -> str:
        """Why the last checkpoint could not be written; "" if it was."""
        return self._keeper.failure if self._keeper is not None else ""

    def keep_what_must_be(self, *, patience: timedelta = timedelta()) -> None:
        """Write the first version before training begins, and the last one before it ends.

        Blocks while it does that. While another thread does it, blocks for `patience` at most.
        """
        job, keeper = self._job, self._keeper
        with job.lock:
            if patience:
                job.changed.wait_for(
                    lambda: job.closing or not self._writing, timeout=patience.total_seconds()
                )
            state = job.state
            if job.clock() < self._not_before:
                return
            first = state.arrived and not state.initialised
            last = state.initialised and state.finished and not self.is_kept() and state.values_are_here
            fenced = keeper is not None and keeper.fenced
            if not (first or last) or self._writing or job.closing or job.spoiled or fenced:
                return
            self._writing = True
        kept = False
        try:
            kept = self.keep_now()
        finally:
            with job.lock:
                self._writing = False
                state.initialised |= kept
                if not kept:
                    self._not_before = job.clock() + job.limits.keep_again.total_seconds()
                job.changed.notify_all()

    def keep_now(self, *, amend: bool = False) -> bool:
        """Write a checkpoint of the current version, and its end. Blocks; returns whether both are on disk.

        A failed call is repeated for `Limits.patience`. A checkpoint that is being written is finished first:
        two at a time would delete each other's files.

        Args:
            amend: what is said of the version has changed: write that also if the version is on disk already.
        """
        job, keeper = self._job, self._keeper
        if keeper is None:
            return True
        deadline = job.clock() + job.limits.patience.total_seconds()
        while True:
            try:
                self._keep(keeper, amend=amend)
            except TransportError as error:
                if job.clock() < deadline and not keeper.fenced:
                    time.sleep(RETRY.total_seconds())
                    continue
                logger.warning("no checkpoint of the current version was written: %s", error)
            except (Refused, CheckpointError) as error:
                logger.warning("no checkpoint of the current version was written: %s", error)
                if amend:
                    return False
            with job.lock:
                return self._holds(keeper)

    def order(self) -> None:
        """Order a checkpoint of the current version, if none is being written. Blocks for the copy in memory.

        Raises:
            Refused: NOT_READY; a worker has to send the values first.
        """
        job, keeper = self._job, self._keeper
        if keeper is None:
            return
        with self._orders.turn() as current:
            self._require_values(current.version)
            if keeper.writing or keeper.durable_version == current.version:
                return
            number, self._told = keeper.number(), None
            self._orders.tell_all(replace(current, checkpoint=number))
            with job.lock:
                state = kept.to_checkpoint(job.state)
            keeper.begin(current.version, job.clock(), state, number=number)

    def _require_values(self, version: int) -> None:
        """Raise Refused (NOT_READY) unless the shards have the values of the current version."""
        with self._job.lock:
            if not self._job.state.values_are_here:
                text = f"no worker has sent the values of version {version} yet"
                raise Refused(RefusalCode.NOT_READY, text)

    def _number_for(self, current: Advance, keeper: Keeper) -> int:
        """The number to order a checkpoint of the current version with.

        If that was ordered, and a shard was not reached, it is the same one. So a shard that has the order
        already need not copy its values again. It is this thread's turn.
        """
        if self._told is None or self._told[:2] != (current.term, current.version):
            self._told = (current.term, current.version, keeper.number())
        return self._told[2]

    def _keep(self, keeper: Keeper, *, amend: bool) -> None:
        """See `keep_now`. Raises TransportError, Refused, CheckpointError."""
        job, orders = self._job, self._orders

        def ask() -> None:
            with orders.turn() as current:
                orders.tell_all(current)

        await_whole = partial(keeper.await_whole, ask, closing=lambda: job.closing)
        await_whole()
        with orders.turn() as current:
            self._require_values(current.version)
            whole = keeper.durable_version == current.version
            number = 0
            if not whole:
                number = self._number_for(current, keeper)
                orders.tell_all(replace(current, checkpoint=number))
                self._told = None
            with job.lock:
                state, end = kept.to_checkpoint(job.state), job.state.end
            if not whole:
                keeper.begin(current.version, job.clock(), state, number=number)
            elif amend or end not in (None, self._durable_end):
                keeper.amend(current.version, state)
        await_whole()
        with job.lock:
            if keeper.durable_version == current.version:
                self._durable_end = end
