"""Decides when a checkpoint is taken, and completes it when every shard has written its part.

Most are ordered with a round (`commit`). The first version has to be on disk before training begins, and the
last one before it ends. They wait for no step: all shards are ordered to write their present version, and the
thread waits until it is on disk.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from elastic_ps.api.checkpoints import Times
from elastic_ps.checkpoint.manifest import Manifest, ShardFile
from elastic_ps.checkpoint.store import Check, Store
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.core.stages import Stage, StageEvent
from elastic_ps.errors import CheckpointError, Fenced, NoCheckpoint, RefusalCode, Refused, TransportError
from elastic_ps.evaluation import results
from elastic_ps.evaluation.queue import EvaluationQueue
from elastic_ps.process.retrying import retry
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.job.record import to_checkpoint
from elastic_ps.server.limits import SLOWEST, USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Report
from elastic_ps.transport import calls

logger = logging.getLogger(__name__)

POLL = 0.01
"""Seconds between two looks whether a checkpoint is whole."""

OVERDUE = timedelta(seconds=60)
"""A problem is reported if the newest checkpoint is older than three intervals and this.

After one that has failed, the next one is due within that, while steps are made.
"""


class Orders(Protocol):
    """Sends orders to the shards; see `CommitCoordinator`."""

    def turn(self) -> AbstractContextManager[Advance]:
        """Be the only thread that gives orders. Yields the order that describes the current state."""

    def tell_all(self, advance: Advance) -> object:
        """Send an order to all shards. Raises Refused, TransportError."""


class Checkpointer:
    """The checkpoints of a job, on shard 0. One is under way at a time. Thread-safe.

    Args:
        store: the directory that all shards share; None: no checkpoints are written.
        shards: the number of parts of a checkpoint.
        times: when checkpoints are written, and how many stay on disk.
        check: raises if the job cannot continue from a whole checkpoint.
        evaluation_queue: needs checkpoints, too; None if the job has no evaluator.
        known: a version of which a checkpoint is known to exist; see `newest`.

    Attributes:
        fenced: another parameter server has taken over, so nothing more is written.
        paused: how long steps waited for copies of what was not written yet; the mean over the shards.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        job: str,
        term: int,
        shards: int,
        times: Times,
        now: float = 0.0,
        check: Check = lambda _: None,
        evaluation_queue: EvaluationQueue | None = None,
        known: int | None = None,
        limits: ServerLimits = USUAL,
    ) -> None:
        self._limits, self._problem = limits, ""
        self._size, self._rows = 0, dict[int, int]()  # bytes of the model on each shard; of each one's tables
        self.fenced, self.paused = False, timedelta(0)
        self._unsure = ""  # why it is not known whether another parameter server has taken over
        self._looks = self._last_look = 0
        self._store, self._check, self.evaluation_queue, self._known = store, check, evaluation_queue, known
        self._name, self._term, self._shards, self._times = job, term, shards, times
        self._lock = threading.Lock()
        self._durable: tuple[int, float] | None = None
        self._last = self._durable_at = now
        self._newer_since = math.inf  # when `problem` was first asked for a version that is not on disk
        self._last_version = self._number = 0
        self._pending: Manifest | None = None
        self._files: dict[int, list[ShardFile]] = {}
        self._queue: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
        self._thread.start()
        self._writing = False  # a thread writes a version that must be kept
        self._not_before = 0.0  # the time of the next attempt, if writing it has failed
        # (part of `JobState.end`, the time of the first look that found it)
        self._ended: tuple[tuple[int, int, str], float] | None = None
        self._durable_end: tuple[int, int, int, str] | None = None  # see `JobState.end`
        # (term, version, number) of an order that some shards may lack
        self._told: tuple[int, int, int] | None = None

    def serve(self, job: Guarded, orders: Orders) -> None:
        """Write versions of `job` from now on. `orders` reaches its shards."""
        self._job, self._orders = job, orders

    def tune(self, times: Times) -> None:
        """Use these times from now on."""
        with self._lock:
            self._times = times

    @property
    def writes(self) -> bool:
        """Whether the job has checkpoints at all."""
        return self._store is not None

    @property
    def durable_version(self) -> int | None:
        """Version of the newest whole checkpoint."""
        return None if (durable := self.durable) is None else durable[0]

    @property
    def durable(self) -> tuple[int, float] | None:
        """Version of the newest whole checkpoint, and when it was written (Unix time)."""
        with self._lock:
            return self._durable

    @property
    def failure(self) -> str:
        """Why the last checkpoint could not be written; "" if it was."""
        with self._lock:
            return self._problem

    def failed(self, problem: str) -> None:
        """Note that going back to a checkpoint has failed. `failure` and `problem` say so until it works."""
        with self._lock:
            if self._problem != problem:
                logger.warning("%s", problem)
            self._problem = problem

    def problem(self, version: int, now: float) -> str:
        """The problem with the checkpoints while the model is at `version`; "" if there is none."""
        with self._lock:
            if problem := self._unsure or self._problem:
                return problem
            if self._durable is None or self._durable[0] >= version:
                self._newer_since = math.inf
                return ""
            self._newer_since = min(self._newer_since, now)
            age, interval = now - self._durable_at, self._times.interval
            if min(age, now - self._newer_since) <= (3 * interval + OVERDUE).total_seconds():
                return ""
            return (
                f"the newest checkpoint, of version {self._durable[0]}, is {age:.0f} s old, but a checkpoint "
                f"should be written every {interval.total_seconds():.0f} s"
            )

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is neither whole nor given up."""
        with self._lock:
            return self._pending is not None

    def due(self, version: int, now: float) -> bool:
        """Whether to take a checkpoint of `version`, the next one."""
        with self._lock:
            if self._pending is not None or self._store is None:
                return False
            every = self._times.every_versions
            passed = every is not None and version - self._last_version >= every
            timely = now - self._last >= self._times.interval.total_seconds()
            asked = self.evaluation_queue is not None and self.evaluation_queue.asks(
                version, since=self._last_version
            )
            return timely or passed or asked

    def leads(self) -> bool:
        """Whether no other parameter server has taken over. Reads a small file.

        Returns False, too, if the file cannot be read at the moment; `problem` says so.
        """
        if self._store is None:
            return True
        term, unsure, leads = self.term, "", False
        with self._lock:
            self._looks += 1
            look = self._looks
        try:
            self._store.require_term(term)
            leads = not self.fenced
        except Fenced as error:
            if term == self.term:  # otherwise this process has begun a new one itself
                self.fence(error)
        except CheckpointError as error:
            unsure = (
                f"training waits until it is known whether another parameter server has taken over: {error}"
            )
        with self._lock:
            if look > self._last_look:  # otherwise a later look of another thread has ended before
                if unsure and not self._unsure:
                    logger.warning("%s", unsure)
                self._last_look, self._unsure = look, unsure
        return leads

    def fence(self, reason: Exception) -> None:
        """Note that another parameter server has taken over."""
        with self._lock:
            if not self.fenced:
                logger.error("%s", reason)
                self.fenced = True

    def begin_term(self, *, above: int = 0) -> None:
        """Begin a new term, above `above`, to go back to a checkpoint. Gives up the one under way.

        Raises:
            Fenced: another parameter server has begun a term.
            NoCheckpoint: the job has no checkpoints. The term has begun.
        """
        try:
            with self._lock:
                self._pending = None
                if self._store is None:
                    self._term += 1
                    raise NoCheckpoint("there is no checkpoint directory")
                self._term = self._store.next_term(after=self._term, above=above)
                if self.evaluation_queue is not None:
                    self.evaluation_queue.term = self._term
        except Fenced as error:
            self.fence(error)
            raise

    def newest(self) -> Manifest:
        """The newest whole checkpoint; broken ones are set aside. Raises as `Store.newest`.

        If a checkpoint was written, but neither it nor a later one is there, StorageUnavailable is raised:
        the volume may be away for a while, and a job that starts from scratch would lose its training.
        """
        assert self._store is not None
        known = self._known if (durable := self.durable_version) is None else durable
        if known is not None:
            self._store.require_version(known)
        manifest, problems = self._store.newest(self._check)
        for problem in problems:
            logger.warning("%s", problem)
        written = self._store.written(manifest.version)
        with self._lock:
            self._durable, self._durable_at = (manifest.version, written), time.monotonic()
            self._last_version = manifest.version  # later versions are made, and written, again
            self._problem = "; ".join(problems)
        if self.evaluation_queue is not None:
            self.evaluation_queue.go_back(manifest.version)
        return manifest

    @property
    def term(self) -> int:
        """The term in which checkpoints are written."""
        with self._lock:
            return self._term

    def number(self) -> int:
        """The number of the next checkpoint that is ordered."""
        with self._lock:
            self._number += 1
            return self._number

    def begin(self, version: int, now: float, state: dict[str, Any], *, number: int) -> None:
        """Note that the shards were ordered to write `version`, as checkpoint `number`.

        Args:
            state: the state of the job at this version, without tensors.
        """
        tensors, optimizer, state = _beside_model(state)
        size = sum(math.prod(t["shape"]) * ITEM_SIZE.get(t["dtype"], 0) for t in tensors)
        with self._lock:
            self._last, self._last_version, self._files = now, version, {}
            self._size = size // self._shards
            self._pending = Manifest(
                job=self._name,
                version=version,
                term=self._term,
                number=number,
                tensors=tensors,
                optimizer=optimizer,
                state=state,
            )

    def amend(self, version: int, state: dict[str, Any]) -> None:
        """Replace the state in the newest checkpoint, which is of `version`. Blocks.

        Training may end without another version: its last records are skipped, or a script stops it.

        Raises:
            CheckpointError: the checkpoint is unchanged.
        """
        assert self._store is not None
        problem = ""
        try:
            self._store.amend(version, term=self.term, state=_beside_model(state)[2])
        except CheckpointError as error:
            problem = str(error)
            if isinstance(error, Fenced):
                self.fence(error)
            raise
        finally:
            with self._lock:
                self._problem = problem

    def await_whole(self, ask: Callable[[], None], *, closing: Callable[[], bool] = lambda: False) -> None:
        """Wait until the checkpoint under way is whole or given up. `ask` collects the shards' parts.

        It is given up after `ServerLimits.given_up`, or if a shard does not answer for
        `ServerLimits.patience`. Then it cannot become whole later.

        Args:
            closing: whether the process is about to end. Then this waits for `ServerLimits.patience` at most.

        Raises:
            Refused: a shard has lost the model; the checkpoint is given up.
        """
        began, silent, closed = time.monotonic(), math.inf, math.inf
        patience = self._limits.patience.total_seconds()
        while self._lacks_parts:
            try:
                ask()
                silent = math.inf
            except TransportError as error:
                silent = min(silent, time.monotonic())  # since the first call without an answer
                logger.info("a shard has not reported its part of a checkpoint yet: %s", error)
            except Refused as refusal:
                if self._give_up(str(refusal)):
                    raise
            now = time.monotonic()
            if closing():
                closed = min(closed, now + patience)  # counted from the first look that finds it so
            if now > min(closed, began + self._allowed):
                self._give_up(f"a shard has not written its part after {now - began:.0f} s")
            elif now - silent > patience:
                self._give_up(f"a shard has not answered for {now - silent:.0f} s")
            time.sleep(POLL)
        while self.writing:
            time.sleep(POLL)

    @property
    def _lacks_parts(self) -> bool:
        with self._lock:
            return self._pending is not None and len(self._files) < self._shards

    def _give_up(self, why: str) -> bool:
        """Give up the checkpoint under way. Returns False if all its parts are there: it may become whole."""
        with self._lock:
            if self._pending is None or len(self._files) == self._shards:
                return False
            self._end(f"the checkpoint of version {self._pending.version} was given up: {why}")
            logger.warning("%s", self._problem)
            return True

    def _end(self, problem: str) -> None:
        """No checkpoint is under way any more. After a problem the next one is due soon. Hold the lock."""
        self._pending, self._problem = None, problem
        self._last -= max(0.0, (self._times.interval - OVERDUE).total_seconds()) if problem else 0.0

    @property
    def _allowed(self) -> float:
        """The seconds for a checkpoint. An optimizer has up to about four values for each of the model."""
        size = 5 * self._size + max([*self._rows.values()], default=0)
        return calls.allowing(self._limits.given_up, size, SLOWEST).total_seconds()

    def part(self, shard: int, report: Report) -> None:
        """Note the part that a shard has written. Shards report it more than once."""
        written = report.written
        with self._lock:
            self._rows[shard] = sum(table.size_bytes for table in report.tables)
            if written is None or self._pending is None or shard in self._files:
                return
            if (written.term, written.number) != (self._pending.term, self._pending.number):
                return
            self.paused += written.pause / self._shards
            if written.file is None:
                logger.warning(
                    "the checkpoint of version %d could not be written: %s", written.version, written.error
                )
                self._end(written.error)
                return
            self._files[shard] = [file for file in (written.file, written.base) if file is not None]
            if len(self._files) == self._shards:
                self._pending.files.extend(file for s in sorted(self._files) for file in self._files[s])
                self._queue.put(self._pending)

    def give_up_late(self, now: float) -> None:
        """Give up a checkpoint that has been under way for too long, so another one can begin."""
        with self._lock:
            most = self._allowed
            late = self._pending is not None and now - self._last > most
            missing = sorted(set(range(self._shards)) - self._files.keys())
        if late:
            self._give_up(f"shards {missing} have not written their parts after {most:.0f} s")

    def _run(self) -> None:
        while (manifest := self._queue.get()) is not None:
            assert self._store is not None
            problem, fenced = "", False
            try:
                asks, keep = self.evaluation_queue, self._times.keep
                held = results.kept(self._store.directory) if asks is None else asks.held
                self._store.commit(manifest, keep=keep, held=held)
                logger.info("version %d is on disk", manifest.version)
            except CheckpointError as error:
                problem, fenced = str(error), isinstance(error, Fenced)
                logger.warning("%s", error)
            with self._lock:
                if manifest.term != self._term:
                    continue  # it was begun before a roll-back
                self.fenced = self.fenced or fenced
                if self._pending is manifest:  # otherwise it was given up meanwhile
                    self._end(problem)
                if not problem and (self._durable is None or manifest.version >= self._durable[0]):
                    self._durable, self._durable_at = (manifest.version, time.time()), time.monotonic()
            if not problem and self.evaluation_queue is not None:
                self.evaluation_queue.written(manifest.version)

    def may_finish(self) -> bool:
        """Whether workers may be told that the job is finished. The job's lock is held.

        The last version and the chief have to be on disk. If the parameter server was lost before that, the
        other workers would continue from the checkpoint, without the workers that were told. A full disk
        delays the end for the time of a checkpoint at most. The shards have to have the last values, too: a
        worker that lacks them may be the chief.
        """
        state = self._job.state
        return state.end is not None and state.values_are_here and self.is_kept()

    def is_kept(self) -> bool:
        """Return True if the end of training is on disk, or writing it has failed for long. Hold the lock."""
        now, state = self._job.clock(), self._job.state
        if self._store is None or self._holds():
            return True
        end = (state.term, state.version, state.script_state)
        if self._ended is None or self._ended[0] != end:
            self._ended = (end, now)
        return now - self._ended[1] > self._allowed

    def _holds(self) -> bool:
        """Whether the current version is on disk, and its end if training has ended. The lock is held."""
        state = self._job.state
        return self.durable_version == state.version and state.end in (None, self._durable_end)

    def keep_what_must_be(self, *, patience: timedelta = timedelta(), begun: bool = False) -> None:
        """Write the first version before training begins, and the last one before it ends.

        Blocks while it does that. While another thread does it, blocks for `patience` at most.

        Args:
            begun: also write the first version while workers compute on it already.
        """
        job = self._job
        with job.lock:
            if patience:
                job.changed.wait_for(
                    lambda: job.closing or not self._writing, timeout=patience.total_seconds()
                )
            state = job.state
            if job.clock() < self._not_before:
                return
            first = state.stage is Stage.ARRIVED or (begun and state.stage is Stage.BEGUN)
            last = state.initialised and state.finished and not self.is_kept() and state.values_are_here
            if not (first or last) or self._writing or job.closing or job.rolling_back or self.fenced:
                return
            self._writing = True
        kept = False
        try:
            kept = self.write()
        finally:
            with job.lock:
                self._writing = False
                if not kept:
                    self._not_before = job.clock() + job.limits.keep_again.total_seconds()
                elif first:
                    state.note(StageEvent.KEEP)
                job.changed.notify_all()

    def write(self, *, amend: bool = False) -> bool:
        """Write a checkpoint of the current version, and its end. Blocks. Returns whether both are on disk.

        A failed call is repeated for `ServerLimits.patience`. A checkpoint under way is finished first: two
        at the same time would delete each other's files.

        Args:
            amend: the state of the version has changed, so write it even if the version is on disk already.
        """
        if self._store is None:
            return True
        job = self._job
        patience, over = job.limits.patience, lambda: self.fenced
        again = True
        try:
            while again:
                write = partial(self._write, amend)
                retry(write, TransportError, patience=patience, over=over, clock=job.clock)
                with job.lock:  # the chief may have been chosen meanwhile
                    again = self.durable_version == job.state.version and not self._holds()
        except (Refused, TransportError, CheckpointError) as error:
            logger.warning("no checkpoint of the current version was written: %s", error)
            if amend and not isinstance(error, TransportError):
                return False
        with job.lock:
            return self._holds()

    def order(self) -> None:
        """Order a checkpoint of the current version, if none is being written. Blocks for the order.

        Raises:
            Refused: NOT_READY; a worker has to send the values first.
        """
        if self._store is None:
            return
        with self._orders.turn() as current:
            self._require_values(current.version)
            if not self.writing and self.durable_version != current.version:
                self._order(current)

    def order_late(self) -> None:
        """Order a checkpoint of the newest version if none has followed for two intervals. Blocks."""
        with self._job.lock:
            state, idle = self._job.state, self._job.clock() - self._last
            newer = state.values_are_here and self.durable_version not in (None, state.version)
        if newer and idle >= 2 * self._times.interval.total_seconds() and not self.fenced:
            with suppress(Refused, TransportError):  # the next look repeats it
                self.order()

    def _require_values(self, version: int) -> None:
        """Raise Refused (NOT_READY) unless the shards have the values of the current version."""
        with self._job.lock:
            if not self._job.state.values_are_here:
                raise Refused(
                    RefusalCode.NOT_READY, f"a worker has yet to send the values of version {version}"
                )

    def _order(self, current: Advance) -> tuple[int, int, int, str] | None:
        """Have the shards write the current version, in this thread's turn. Returns `JobState.end` then.

        If this was ordered before, and a shard was not reached, the number is the same. So a shard that has
        the order already does not write twice.
        """
        if self._told is None or self._told[:2] != (current.term, current.version):
            self._told = (current.term, current.version, self.number())
        number = self._told[2]
        self._orders.tell_all(replace(current, checkpoint=number))
        self._told = None
        state, end = self._said()
        self.begin(current.version, self._job.clock(), state, number=number)
        return end

    def _said(self) -> tuple[dict[str, Any], tuple[int, int, int, str] | None]:
        with self._job.lock:
            return to_checkpoint(self._job.state), self._job.state.end

    def _write(self, amend: bool) -> None:
        """See `write`. Raises TransportError, Refused, CheckpointError."""
        orders = self._orders

        def ask() -> None:
            with orders.turn() as current:
                orders.tell_all(current)

        await_whole = partial(self.await_whole, ask, closing=lambda: self._job.closing)
        await_whole()
        with orders.turn() as current:
            self._require_values(current.version)
            if self.durable_version == current.version:
                state, end = self._said()
                if amend or end not in (None, self._durable_end):
                    self.amend(current.version, state)
            else:
                end = self._order(current)
        await_whole()
        with self._job.lock:
            if self.durable_version == current.version:
                self._durable_end = end

    def close(self) -> None:
        """Finish a checkpoint whose parts are all there, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()


def _beside_model(state: dict[str, Any]) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Split a state into the model's tensors, its optimizer, and everything else."""
    beside = {key: value for key, value in state.items() if key not in ("tensors", "optimizer")}
    return state["tensors"], state["optimizer"], beside
