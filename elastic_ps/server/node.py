"""What a parameter server process does as a shard: load, take part in rounds, write its part of checkpoints.

A standby is a node, too: one that is told of the next order before it carries it out.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

from elastic_ps.checkpoint.store import Assembled, ShardFile, Store, Stored
from elastic_ps.errors import CheckpointError, RefusalCode, Refused
from elastic_ps.job import Consistency
from elastic_ps.server.follower import Follower, for_standby, sum_key
from elastic_ps.server.orders import Advance, Configuration, Report, Standing, Written
from elastic_ps.server.shard import Shard
from elastic_ps.telemetry import Trace
from elastic_ps.transport.base import Incoming

logger = logging.getLogger(__name__)


class Node:
    """The shard of this process, once it is configured, and the thread that writes its checkpoints.

    Args:
        follower: the shard's standby; closed by `close`.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        *,
        store: Store | None,
        consistency: Consistency,
        trace: Trace,
        follower: Follower | None = None,
    ) -> None:
        self.index = index
        self.shards = shards
        self.store = store
        self._consistency = consistency
        self._trace = trace
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._epoch = 0
        self._configuration: Configuration | None = None
        self._follower = follower
        self._obeys = 0  # the newest epoch that has given orders
        self._orders: list[Advance] = []  # as a standby: the one carried out last, and the next
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
        """See ShardControl. Raises InvalidModel, CheckpointError, Refused (STALE_EPOCH)."""
        self._obey(configuration.epoch)
        shard = Shard(
            configuration.layout,
            self.index,
            configuration.epoch,
            (configuration.optimizer, configuration.settings),
            consistency=self._consistency,
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
            self._epoch, self._configuration, self._orders = configuration.epoch, configuration, []
        if self._follower is not None:
            self._follower.reset(configuration)
        if before is not None:
            before.retire(RefusalCode.STALE_EPOCH)

    def advance(self, advance: Advance) -> Report:
        """See ShardControl.

        Raises:
            Refused: see `Shard.advance`; STALE_EPOCH: a newer epoch gives the orders now.
        """
        self._obey(advance.epoch)
        shard = self.shard
        if advance.apply is not None and self._follower is not None and shard.version < advance.version:
            shard.require_complete(advance.version, advance.apply)
            self._follower.stage(shard, advance)
        if advance.prepare:
            return self._report()
        shard.advance(advance.version, advance.attempt, advance.expected, advance.apply)
        if advance.next is not None:
            with self._lock:
                done = [order for order in self._orders if order.version == advance.version]
                self._orders = [*done, advance.next]
            self._obey(advance.epoch)  # as in take_sum
        report = self._report()  # before the next part is begun, which must not be in it
        if advance.checkpoint and self.store is not None:
            self._snapshot(advance)
        return report

    def _obey(self, epoch: int) -> None:
        with self._lock:
            if epoch and epoch < self._obeys:
                text = f"an order of epoch {epoch}; epoch {self._obeys} gives the orders now"
                raise Refused(RefusalCode.STALE_EPOCH, text)
            self._obeys = max(self._obeys, epoch)

    def _report(self) -> Report:
        with self._lock:
            written, self._written = self._written, []
        return Report(written, self._follower.standing if self._follower else Standing.NONE)

    def _snapshot(self, advance: Advance) -> None:
        """Copy the shard and have the copy written in the background."""
        started = time.monotonic()
        copy = list(self._copy())
        pause = timedelta(seconds=time.monotonic() - started)
        self._snapshots.put((advance.epoch or self.epoch, advance.version, copy, pause))
        if self._follower is not None and self._configuration is not None:
            self._follower.begin(replace(self._configuration, load_version=advance.version))

    def take_sum(
        self, epoch: int, bucket: int, version: int, attempt: int, present: Sequence[bool], body: Incoming
    ) -> None:
        """As a standby: take a bucket's sum over. Blocks while it is received. Raises Refused."""
        self._obey(epoch)
        self.shard.take_sum(sum_key(epoch, bucket, version, attempt), present, body)
        self._obey(epoch)  # else a newer epoch may have asked meanwhile, and been told that it is not here

    def held(self, epoch: int) -> list[Advance]:
        """As a standby: the orders that it can carry out, oldest first. Older epochs are refused hence.

        Raises:
            Refused: STALE_EPOCH; a newer epoch has asked.
        """
        self._obey(epoch)
        with self._lock:
            shard, orders = self._shard, list(self._orders)
        return [order for order in orders if shard is not None and _can_follow(shard, order)]

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
        if self._follower is not None:
            self._follower.close()


def _can_follow(shard: Shard, order: Advance) -> bool:
    """Whether a standby has carried the order out, or has all the sums for it."""
    following = for_standby(order).apply
    assert following is not None
    if shard.version >= order.version:
        return True
    try:
        shard.require_complete(order.version, following)
    except Refused:
        return False
    return True
