"""When a checkpoint is taken, and making it whole once every shard has written its part."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from elastic_ps.checkpoint.store import Manifest, ShardFile, Store
from elastic_ps.errors import CheckpointError
from elastic_ps.server.node import Written

logger = logging.getLogger(__name__)


class Keeper:
    """The checkpoints of a job, on shard 0. One is under way at a time. Thread-safe.

    Args:
        store: the directory that all shards share.
        shards: how many parts make a checkpoint.
        interval: time between two checkpoints.
        keep: how many stay on disk.
        found: the checkpoint to go on from, if any.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        epoch: int,
        shards: int,
        interval: timedelta,
        keep: int,
        found: Manifest | None,
        now: float,
    ) -> None:
        self.found = found
        self.pauses: list[timedelta] = []
        self._store = store
        self._job, self._epoch, self._shards = job, epoch, shards
        self._interval, self._keep = interval, keep
        self._lock = threading.Lock()
        self._durable = found.version if found else None
        self._last = now
        self._pending: Manifest | None = None
        self._files: dict[int, ShardFile] = {}
        self._queue: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    @property
    def durable_version(self) -> int | None:
        """Version of the newest whole checkpoint."""
        with self._lock:
            return self._durable

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is neither whole nor given up."""
        with self._lock:
            return self._pending is not None

    def due(self, now: float) -> bool:
        """Whether the next version shall be kept."""
        with self._lock:
            return self._pending is None and now - self._last >= self._interval.total_seconds()

    def begin(self, version: int, now: float, state: dict[str, Any]) -> None:
        """The shards have been told to write `version`; `state` is everything that is not a tensor."""
        tensors, optimizer = state.pop("tensors"), state.pop("optimizer")
        with self._lock:
            self._last, self._files = now, {}
            self._pending = Manifest(
                job=self._job,
                version=version,
                epoch=self._epoch,
                tensors=tensors,
                optimizer=optimizer,
                state=state,
            )

    def parts(self, shard: int, written: Sequence[Written]) -> None:
        """What a shard has written since it was last asked."""
        with self._lock:
            for part in written:
                if self._pending is None or part.version != self._pending.version:
                    continue
                self.pauses = [*self.pauses, part.pause][-1000:]
                if part.file is None:
                    logger.warning("no checkpoint of version %d: %s", part.version, part.error)
                    self._pending = None
                    return
                self._files[shard] = part.file
                if len(self._files) == self._shards:
                    self._pending.files.extend(self._files[s] for s in sorted(self._files))
                    self._queue.put(self._pending)

    def _run(self) -> None:
        while (manifest := self._queue.get()) is not None:
            durable = None
            try:
                self._store.commit(manifest, keep=self._keep)
                durable = manifest.version
                logger.info("version %d is on disk", manifest.version)
            except CheckpointError as error:
                logger.warning("%s", error)
            with self._lock:
                self._pending = None
                self._durable = durable if durable is not None else self._durable

    def close(self) -> None:
        """Finish the checkpoint whose parts are all there, and end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()
