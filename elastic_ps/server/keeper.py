"""Decides when a checkpoint is taken, and completes it when every shard has written its part."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from elastic_ps.api.tuning import Times, Tuning, read_tuning
from elastic_ps.checkpoint.manifest import Manifest, ShardFile
from elastic_ps.checkpoint.store import Check, Store
from elastic_ps.errors import (
    CheckpointError,
    Fenced,
    Refused,
    TransportError,
)
from elastic_ps.evaluation.queue import Desk
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Written

logger = logging.getLogger(__name__)

POLL = 0.01
"""Seconds between two checks whether a checkpoint is whole."""

OVERDUE = timedelta(seconds=60)
"""If the newest checkpoint is older than three intervals and this, that is reported as a problem."""


class Keeper:
    """The checkpoints of a job, on shard 0. One is under way at a time. Thread-safe.

    Args:
        store: the directory that all shards share.
        shards: how many parts make a checkpoint.
        interval: time between two checkpoints.
        every: also take one when this many versions have passed since the last; None for not.
        keep: how many stay on disk.
        check: what a checkpoint must pass, besides being whole, so that the job can continue from it.
        desk: of the job's evaluator, for which checkpoints are written and kept, too; None if it has none.
        known: a version of which it is known that a checkpoint was written; see `newest`.

    Attributes:
        fenced: another parameter server has taken over; nothing will be written any more.
        paused: how long training stood still for the copies in memory; the mean over the shards.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        term: int,
        shards: int,
        interval: timedelta,
        every: int | None = None,
        keep: int,
        now: float,
        check: Check = lambda _: None,
        desk: Desk | None = None,
        known: int | None = None,
        limits: ServerLimits = USUAL,
    ) -> None:
        self._limits = limits
        self.fenced = False
        self.paused = timedelta(0)
        self._problem = ""
        self._unsure = ""  # why it is not known whether another parameter server has taken over
        self._looks = self._last_look = 0
        self._store, self._check, self._desk, self._known = store, check, desk, known
        self._job, self._term, self._shards = job, term, shards
        self._interval, self._every, self._keep = interval, every, keep
        self._lock = threading.Lock()
        self._durable: tuple[int, float] | None = None
        self._last = now
        self._last_version = 0
        self._durable_at = now
        self._number = 0
        self._pending: Manifest | None = None
        self._files: dict[int, ShardFile] = {}
        self._queue: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def tune(self, times: Times) -> None:
        """From now on checkpoints are taken at these times, and so many stay on disk."""
        with self._lock:
            self._interval, self._every, self._keep = times.interval, times.every_versions, times.keep

    @property
    def durable_version(self) -> int | None:
        """Version of the newest whole checkpoint."""
        durable = self.durable
        return None if durable is None else durable[0]

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
        """Going back to a checkpoint has failed. `failure` and `problem` say so until it has worked."""
        with self._lock:
            if self._problem != problem:
                logger.warning("%s", problem)
            self._problem = problem

    def problem(self, version: int, now: float) -> str:
        """What is wrong with the checkpoints while the model is at `version`; "" if nothing is."""
        with self._lock:
            problem = self._unsure or self._problem
            if problem or self._durable is None or self._durable[0] >= version:
                return problem
            age = now - self._durable_at
            if age <= (3 * self._interval + OVERDUE).total_seconds():
                return ""
            return (
                f"the newest checkpoint, of version {self._durable[0]}, is {age:.0f} s old, but a checkpoint "
                f"should be written every {self._interval.total_seconds():.0f} s"
            )

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is neither whole nor given up."""
        with self._lock:
            return self._pending is not None

    def due(self, version: int, now: float) -> bool:
        """Whether to take a checkpoint of `version`, the next one."""
        with self._lock:
            if self._pending is not None:
                return False
            passed = self._every is not None and version - self._last_version >= self._every
            timely = now - self._last >= self._interval.total_seconds()
            asked = self._desk is not None and self._desk.asks(version, since=self._last_version)
            return timely or passed or asked

    def leads(self) -> bool:
        """Whether no other parameter server has taken over. Reads a small file.

        False also if the file cannot be read at the moment, so that nobody can tell; `problem` says so.
        """
        term, unsure, leads = self.term, "", False
        with self._lock:
            self._looks += 1
            look = self._looks
        try:
            self._store.require_term(term)
            leads = not self.fenced
        except Fenced as error:
            if term == self.term:  # else this process has begun a new one itself
                self.fence(error)
        except CheckpointError as error:
            unsure = (
                f"training waits until it is known whether another parameter server has taken over: {error}"
            )
        with self._lock:
            if look > self._last_look:  # else another thread has begun later, and found out before
                if unsure and not self._unsure:
                    logger.warning("%s", unsure)
                self._last_look, self._unsure = look, unsure
        return leads

    def fence(self, reason: Exception) -> None:
        """Another parameter server has taken over."""
        with self._lock:
            if not self.fenced:
                logger.error("%s", reason)
                self.fenced = True

    def begin_term(self, *, above: int = 0) -> None:
        """Begin a new term, above `above`, to go back to a checkpoint. What is being written is given up.

        Raises:
            Fenced: another parameter server has begun a term.
        """
        try:
            with self._lock:
                self._pending = None
                self._term = self._store.next_term(after=self._term, above=above)
                if self._desk is not None:
                    self._desk.term = self._term
        except Fenced as error:
            self.fence(error)
            raise

    def newest(self) -> Manifest:
        """The newest whole checkpoint; broken ones are set aside. Raises as `Store.newest`.

        If a checkpoint has been written, but neither it nor a later one is there now, StorageUnavailable is
        raised: the volume may only be away, and a job that started from scratch would lose what was trained.
        """
        known = self._known if (durable := self.durable_version) is None else durable
        if known is not None:
            self._store.require_version(known)
        manifest, problems = self._store.newest(self._check)
        for problem in problems:
            logger.warning("%s", problem)
        written = self._store.written(manifest.version)
        with self._lock:
            self._durable, self._durable_at = (manifest.version, written), time.monotonic()
            self._last_version = manifest.version  # later ones are to be made, and kept, again
            self._problem = "; ".join(problems)
        if self._desk is not None:
            self._desk.go_back(manifest.version)
        return manifest

    @property
    def term(self) -> int:
        """The term that this keeper writes in."""
        with self._lock:
            return self._term

    def number(self) -> int:
        """A number for a checkpoint that the shards are about to be told to write."""
        with self._lock:
            self._number += 1
            return self._number

    def begin(self, version: int, now: float, state: dict[str, Any], *, number: int) -> None:
        """The shards have been told to write `version`, as checkpoint `number`.

        Args:
            state: everything of the version that is not a tensor.
        """
        tensors, optimizer, state = _beside_model(state)
        with self._lock:
            self._last, self._last_version, self._files = now, version, {}
            self._pending = Manifest(
                job=self._job,
                version=version,
                term=self._term,
                number=number,
                tensors=tensors,
                optimizer=optimizer,
                state=state,
            )

    def amend(self, version: int, state: dict[str, Any]) -> None:
        """The newest checkpoint, of `version`, gets another state. Blocks.

        Training may end without another version: its last records are skipped, or a script stops it.

        Raises:
            CheckpointError: it has the state that it had.
        """
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

        As long as the shards answer, they are writing, which takes its time where a part is large. The
        checkpoint is given up after `ServerLimits.given_up`, or if a shard does not answer for
        `ServerLimits.patience`. It cannot become whole later.

        Args:
            closing: whether the process is about to end; then it waits for `ServerLimits.patience` at most.

        Raises:
            Refused: a shard has lost the model; the checkpoint is given up.
        """
        began, silent = time.monotonic(), math.inf
        deadline = began + self._limits.given_up.total_seconds()
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
                deadline = min(
                    deadline, now + self._limits.patience.total_seconds()
                )  # of the first look that finds it so
            if now > deadline:
                self._give_up(f"a shard has not written its part after {now - began:.0f} s")
            elif now - silent > self._limits.patience.total_seconds():
                self._give_up(f"a shard has not answered for {now - silent:.0f} s")
            time.sleep(POLL)
        while self.writing:
            time.sleep(POLL)

    @property
    def _lacks_parts(self) -> bool:
        with self._lock:
            return self._pending is not None and len(self._files) < self._shards

    def _give_up(self, why: str) -> bool:
        """Give up the checkpoint under way. False if all its parts are there, so that it may become whole."""
        with self._lock:
            if self._pending is None or len(self._files) == self._shards:
                return False
            self._problem = f"the checkpoint of version {self._pending.version} was given up: {why}"
            logger.warning("%s", self._problem)
            self._pending = None
            return True

    def part(self, shard: int, written: Written | None) -> None:
        """What a shard has written; it says so more than once."""
        with self._lock:
            if written is None or self._pending is None or shard in self._files:
                return
            if (written.term, written.number) != (self._pending.term, self._pending.number):
                return
            self.paused += written.pause / self._shards
            if written.file is None:
                logger.warning(
                    "the checkpoint of version %d could not be written: %s", written.version, written.error
                )
                self._pending, self._problem = None, written.error
                return
            self._files[shard] = written.file
            if len(self._files) == self._shards:
                self._pending.files.extend(self._files[s] for s in sorted(self._files))
                self._queue.put(self._pending)

    def give_up_late(self, now: float) -> None:
        """Give up a checkpoint that has been under way for too long, so that another one can be begun."""
        with self._lock:
            most = self._limits.given_up.total_seconds()
            late = self._pending is not None and now - self._last > most
            missing = sorted(set(range(self._shards)) - self._files.keys())
        if late:
            self._give_up(f"shards {missing} have not written their parts after {most:.0f} s")

    def _run(self) -> None:
        while (manifest := self._queue.get()) is not None:
            problem, fenced = "", False
            try:
                held = self._desk.held if self._desk is not None else ()
                with self._lock:
                    keep = self._keep
                self._store.commit(manifest, keep=keep, held=held)
                logger.info("version %d is on disk", manifest.version)
            except CheckpointError as error:
                problem, fenced = str(error), isinstance(error, Fenced)
                logger.warning("%s", error)
            with self._lock:
                if manifest.term != self._term:
                    continue  # it was begun before a roll-back
                self.fenced = self.fenced or fenced
                if self._pending is manifest:  # else it was given up meanwhile
                    self._pending, self._problem = None, problem
                if not problem and (self._durable is None or manifest.version >= self._durable[0]):
                    self._durable, self._durable_at = (manifest.version, time.time()), time.monotonic()
            if not problem and self._desk is not None:
                self._desk.written(manifest.version)

    def close(self) -> None:
        """Finish the checkpoint whose parts are all there, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()


def tuning_of(found: Manifest, ours: Tuning) -> Tuning:
    """How a term makes versions that continues from a checkpoint: as that says, unless ours is newer.

    A parameter server begins with the word of its environment, which has no number. The one before it may
    have had a newer one.
    """
    recorded = _recorded(found, ours)
    if not ours.replaces(recorded) and recorded.run == ours.run:
        return recorded
    return ours.model_copy(update={"since": found.version}) if ours.needs_term(recorded) else ours


def of_same_run(found: Manifest, ours: Tuning) -> bool:
    """Whether a checkpoint was written by the run of the job that continues from it."""
    return _recorded(found, ours).run == ours.run


def _recorded(found: Manifest, ours: Tuning) -> Tuning:
    """The tuning that a checkpoint names; ours if it names none."""
    said = found.state["tuning"]
    return read_tuning(said, source="the checkpoint's tuning") if said else ours


def _beside_model(state: dict[str, Any]) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """The model's tensors, its optimizer, and everything else of a state."""
    beside = {key: value for key, value in state.items() if key not in ("tensors", "optimizer")}
    return state["tensors"], state["optimizer"], beside
