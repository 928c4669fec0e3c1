"""When a checkpoint is taken, and making it whole once every shard has written its part."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from elastic_ps.checkpoint.store import Manifest, ShardFile, Store
from elastic_ps.errors import CheckpointError, Fenced
from elastic_ps.server.orders import Written

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=60)
"""How long somebody waits for a checkpoint: the first worker for the first, a closing server for its last."""


class Keeper:
    """The checkpoints of a job, on shard 0. One is under way at a time. Thread-safe.

    Args:
        store: the directory that all shards share.
        shards: how many parts make a checkpoint.
        interval: time between two checkpoints.
        every: also one when this many versions have passed since the last; None not.
        keep: how many stay on disk.

    Attributes:
        problem: why the last checkpoint could not be written; "" if it was.
        fenced: another parameter server has taken over; nothing will be written any more.
        paused: how long training stood still for the copies in memory; the mean over the shards.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        epoch: int,
        shards: int,
        interval: timedelta,
        every: int | None = None,
        keep: int,
        now: float,
    ) -> None:
        self.problem = ""
        self.fenced = False
        self.paused = timedelta(0)
        self._store = store
        self._job, self._epoch, self._shards = job, epoch, shards
        self._interval, self._every, self._keep = interval, every, keep
        self._lock = threading.Lock()
        self._durable: tuple[int, float] | None = None
        self._last = now
        self._last_version = 0
        self._pending: Manifest | None = None
        self._files: dict[int, ShardFile] = {}
        self._queue: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

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
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is neither whole nor given up."""
        with self._lock:
            return self._pending is not None

    def due(self, version: int, now: float, *, wanted: bool = False) -> bool:
        """Whether `version`, the next one, shall be kept; `wanted`: somebody waits for a checkpoint."""
        with self._lock:
            if self._pending is not None:
                return False
            passed = self._every is not None and version - self._last_version >= self._every
            timely = now - self._last >= self._interval.total_seconds()
            return timely or passed or (wanted and not self.problem)

    def check_fence(self) -> bool:
        """Whether another parameter server has taken over. Reads a small file."""
        epoch = self.epoch
        try:
            self._store.require_epoch(epoch)
        except Fenced as error:
            with self._lock:
                if epoch == self._epoch and not self.fenced:  # else this process has begun a new one itself
                    logger.error("%s", error)
                    self.fenced = True
        except CheckpointError as error:
            logger.warning("%s", error)
        return self.fenced

    def roll_back(self) -> Manifest:
        """Begin a new epoch and return the newest whole checkpoint. What is being written is given up.

        Raises:
            NoCheckpoint: there is none.
        """
        with self._lock:
            self._pending = None
            self._epoch = self._store.next_epoch()
        return self.newest()

    def newest(self) -> Manifest:
        """The newest whole checkpoint; broken ones are set aside. Raises NoCheckpoint."""
        manifest, problems = self._store.newest()
        for problem in problems:
            logger.warning("set aside a broken checkpoint: %s", problem)
        written = self._store.written(manifest.version)
        with self._lock:
            self._durable = (manifest.version, written)
            self.problem = "; ".join(problems)
        return manifest

    @property
    def epoch(self) -> int:
        """The epoch that this keeper writes in."""
        with self._lock:
            return self._epoch

    def begin(self, version: int, now: float, state: dict[str, Any]) -> None:
        """The shards have been told to write `version`; `state` is everything that is not a tensor."""
        tensors, optimizer = state.pop("tensors"), state.pop("optimizer")
        with self._lock:
            self._last, self._last_version, self._files = now, version, {}
            self._pending = Manifest(
                job=self._job,
                version=version,
                epoch=self._epoch,
                tensors=tensors,
                optimizer=optimizer,
                state=state,
            )

    def await_whole(self, ask: Callable[[], None]) -> None:
        """Wait until the checkpoint under way is whole or given up. `ask` collects the shards' parts.

        Raises:
            CheckpointError: not within `PATIENCE`.
        """
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while self.writing:
            if time.monotonic() > deadline:
                raise CheckpointError(f"a checkpoint is not written after {PATIENCE.total_seconds():.0f} s")
            ask()
            time.sleep(0.01)

    def parts(self, shard: int, written: Sequence[Written]) -> None:
        """What a shard has written since it was last asked."""
        with self._lock:
            for part in written:
                if self._pending is None or part.version != self._pending.version or shard in self._files:
                    continue
                self.paused += part.pause / self._shards
                if part.file is None:
                    logger.warning("no checkpoint of version %d: %s", part.version, part.error)
                    self._pending, self.problem = None, part.error
                    return
                self._files[shard] = part.file
                if len(self._files) == self._shards:
                    self._pending.files.extend(self._files[s] for s in sorted(self._files))
                    self._queue.put(self._pending)

    def _run(self) -> None:
        while (manifest := self._queue.get()) is not None:
            problem, fenced = "", False
            try:
                self._store.commit(manifest, keep=self._keep)
                logger.info("version %d is on disk", manifest.version)
            except CheckpointError as error:
                problem, fenced = str(error), isinstance(error, Fenced)
                logger.warning("%s", error)
            with self._lock:
                if manifest.epoch != self._epoch:
                    continue  # of before a roll-back
                self._pending, self.problem, self.fenced = None, problem, self.fenced or fenced
                if not problem:
                    self._durable = (manifest.version, time.time())

    def close(self) -> None:
        """Finish the checkpoint whose parts are all there, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()
