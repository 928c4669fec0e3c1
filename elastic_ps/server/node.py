"""What a parameter server process does as a shard: load, take part in rounds, write its part of checkpoints.

Shard 0's coordinator drives its own node directly and the others by calls; both are a `ShardControl`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from elastic_ps.checkpoint.store import Assembled, ShardFile, Store, Stored
from elastic_ps.core.partition import Layout
from elastic_ps.core.settings import Settings
from elastic_ps.errors import CheckpointError, RefusalCode, Refused
from elastic_ps.server.shard import Application, Shard
from elastic_ps.telemetry import Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """The outcome of writing a shard's part of a checkpoint: `file`, or the reason in `error`.

    `pause` is how long training stood still for the copy in memory.
    """

    version: int
    file: ShardFile | None
    error: str
    pause: timedelta


@dataclass(frozen=True)
class Configuration:
    """What a shard needs to know to begin."""

    layout: Layout
    optimizer: str
    settings: Settings
    epoch: int
    load_version: int | None


@dataclass(frozen=True)
class Advance:
    """The state of the round, and what to do to get there. See messages.proto."""

    version: int
    attempt: int
    expected: Mapping[int, int]
    apply: Application | None = None
    checkpoint: bool = False


class ShardControl(Protocol):
    """A shard as the coordinator sees it. Both methods block and may be repeated."""

    def configure(self, configuration: Configuration) -> None:
        """Take a model over, empty or from a checkpoint; whatever was there before is dropped."""

    def advance(self, advance: Advance) -> list[Written]:
        """Bring the round to this state. Returns the checkpoint parts written since the last call."""


class Node:
    """The shard of this process, once it is configured, and the thread that writes its checkpoints."""

    def __init__(
        self, index: int, shards: int, *, store: Store | None, deterministic: bool, trace: Trace
    ) -> None:
        self.index = index
        self.shards = shards
        self.store = store
        self._deterministic = deterministic
        self._trace = trace
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._epoch = 0
        self._snapshots: queue.SimpleQueue[tuple[int, int, list[Stored], timedelta] | None] = (
            queue.SimpleQueue()
        )
        self._written: list[Written] = []
        self._writer = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._writer.start()

    @property
    def configured(self) -> bool:
        """Whether the shard knows the model."""
        with self._lock:
            return self._shard is not None

    @property
    def epoch(self) -> int:
        """The job's epoch when the shard was configured last; 0 before."""
        with self._lock:
            return self._epoch

    @property
    def shard(self) -> Shard:
        """Raises Refused (NOT_READY) before the shard knows the model."""
        with self._lock:
            if self._shard is None:
                raise Refused(RefusalCode.NOT_READY, f"shard {self.index} does not know the model yet")
            return self._shard

    def configure(self, configuration: Configuration) -> None:
        """See ShardControl. Raises InvalidModel, CheckpointError."""
        shard = Shard(
            configuration.layout,
            self.index,
            configuration.epoch,
            (configuration.optimizer, configuration.settings),
            deterministic=self._deterministic,
            trace=self._trace,
        )
        if configuration.load_version is not None:
            if self.store is None:
                raise CheckpointError(f"shard {self.index} has no checkpoint directory to load from")
            manifest = self.store.manifest(configuration.load_version)
            elements = {i: t.elements for i, t in enumerate(configuration.layout.tensors)}
            shard.load(Assembled(elements, self.store.read(manifest)), configuration.load_version)
        with self._lock:
            before, self._shard = self._shard, shard
            self._epoch = configuration.epoch
        if before is not None:
            before.retire(RefusalCode.STALE_EPOCH)

    def advance(self, advance: Advance) -> list[Written]:
        """See ShardControl."""
        self.shard.advance(advance.version, advance.attempt, advance.expected, advance.apply)
        with self._lock:  # before the next part is begun, which must not be among these
            written, self._written = self._written, []
        if advance.checkpoint and self.store is not None:
            started = time.monotonic()
            copy = list(self._copy())
            pause = timedelta(seconds=time.monotonic() - started)
            self._snapshots.put((self.epoch, advance.version, copy, pause))
        return written

    def _copy(self) -> Iterator[Stored]:
        for bucket, flat in self.shard.values():
            start = 0
            for piece in bucket.pieces:
                yield Stored(piece.tensor, piece.start, "value", flat[start : start + piece.length].clone())
                start += piece.length
        for entry in self.shard.state():
            yield Stored(entry.tensor, entry.start, entry.key, entry.value, entry.scalar)

    def _write(self) -> None:
        while (snapshot := self._snapshots.get()) is not None:
            epoch, version, tensors, pause = snapshot
            assert self.store is not None
            try:
                file: ShardFile | None = self.store.write_shard(
                    epoch, version, self.index, self.shards, iter(tensors)
                )
                error = ""
            except CheckpointError as failure:
                logger.warning("%s", failure)
                file, error = None, str(failure)
            del tensors, snapshot
            with self._lock:
                self._written.append(Written(version, file, error, pause))

    def retire(self) -> None:
        """Let nobody wait any longer: the process is about to end."""
        if self.configured:
            self.shard.retire(RefusalCode.NOT_READY)

    def close(self) -> None:
        """Write what is still to be written and end the thread. Blocks."""
        self._snapshots.put(None)
        self._writer.join()
