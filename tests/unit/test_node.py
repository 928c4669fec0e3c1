"""A shard's part in checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.checkpoint.store import ShardFile, Store, Stored
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.job import Consistency
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.node import Node
from elastic_ps.server.orders import Advance, Configuration, Written
from elastic_ps.telemetry import Trace


class InstantStore(Store):
    """A disk that takes no time."""

    def write_shard(
        self, epoch: int, version: int, shard: int, shards: int, tensors: Iterator[Stored]
    ) -> ShardFile:
        return ShardFile("file", "digest", 0)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns at every opportunity."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_a_part_is_never_answered_by_the_order_to_write_it(tmp_path: Path) -> None:
    """The coordinator takes note of a checkpoint when all shards have been told, and drops earlier parts."""
    node = Node(0, 1, store=InstantStore(tmp_path), consistency=Consistency(), trace=Trace(None, ""))
    layout = partition([TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0)], bucket_bytes=1 << 20, shards=1)
    node.configure(Configuration(layout, "SGD", Settings(({"lr": 0.1},)), 1, None))
    try:
        for _ in range(300):
            assert node.advance(Advance(0, 0, {}, checkpoint=True)).written == []
            deadline = time.monotonic() + 10
            while not (written := node.advance(Advance(0, 0, {})).written):
                assert time.monotonic() < deadline
            assert [part.version for part in written] == [0]
    finally:
        node.close()


def test_a_part_that_is_told_twice_is_one_part(tmp_path: Path) -> None:
    """Else the manifest would be finished before all shards have written, or twice."""
    store = Store(tmp_path)
    epoch = store.next_epoch()
    keeper = Keeper(store, job="j", epoch=epoch, shards=2, interval=timedelta(0), every=None, keep=3, now=0.0)
    keeper.begin(1, 0.0, {"tensors": [], "optimizer": "SGD"})
    parts = [
        Written(1, store.write_shard(epoch, 1, shard, 2, iter(())), "", timedelta(seconds=1))
        for shard in (0, 1)
    ]
    try:
        for shard in (0, 0, 1, 1, 0):
            keeper.parts(shard, [parts[shard]])
    finally:
        keeper.close()
    assert keeper.durable_version == 1
    assert [file.file for file in store.manifest(1).files] == [part.file.file for part in parts if part.file]
    assert keeper.paused == timedelta(seconds=1)
    assert not keeper.problem
