"""A shard's part in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from elastic_ps.checkpoint.store import ShardFile, Store, Stored
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.job import Consistency
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.node import Node
from elastic_ps.server.orders import Advance, Configuration, Written
from elastic_ps.telemetry import Trace
from tests.polling import eventually


class InstantStore(Store):
    """A disk that takes no time."""

    def write_shard(
        self, term: int, version: int, shard: int, shards: int, tensors: Iterator[Stored]
    ) -> ShardFile:
        return ShardFile("file", "digest", 0)


def test_a_part_is_told_until_another_checkpoint_is_ordered(tmp_path: Path) -> None:
    """The answer that tells it may be lost; then no checkpoint would ever be finished again."""
    node = Node(0, 1, store=InstantStore(tmp_path), consistency=Consistency(), trace=Trace(None, ""))
    layout = partition([TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0)], bucket_bytes=1 << 20, shards=1)
    node.configure(Configuration(layout, "SGD", Settings(({"lr": 0.1},)), 1, None))

    def told() -> int:
        written = told_in(node, term=1)
        return 0 if written is None else written.number

    try:
        for number in (1, 2):
            node.advance(Advance(0, 0, {}, checkpoint=number, term=1))
            eventually(lambda n=number: told() == n, "the part is written")  # type: ignore[misc]
            assert [told(), told()] == [number, number]
        node.configure(Configuration(layout, "SGD", Settings(({"lr": 0.1},)), 2, None))
        assert told_in(node, term=2) is None, "of a model that the shard has not got any more"
    finally:
        node.close()


def told_in(node: Node, *, term: int) -> Written | None:
    return node.advance(Advance(0, 0, {}, term=term)).written


def test_a_part_that_is_told_twice_is_one_part(tmp_path: Path) -> None:
    """Else the manifest would be finished before all shards have written, or twice."""
    store = Store(tmp_path)
    term = store.next_term()
    keeper = Keeper(store, job="j", term=term, shards=2, interval=timedelta(0), every=None, keep=3, now=0.0)
    keeper.begin(1, 0.0, {"tensors": [], "optimizer": "SGD"}, number=keeper.number())
    parts = [
        Written(term, 1, 1, store.write_shard(term, 1, shard, 2, iter(())), "", timedelta(seconds=1))
        for shard in (0, 1)
    ]
    try:
        for shard in (0, 0, 1, 1, 0):
            keeper.part(shard, parts[shard])
    finally:
        keeper.close()
    assert keeper.durable_version == 1
    assert [file.file for file in store.manifest(1).files] == [part.file.file for part in parts if part.file]
    assert keeper.paused == timedelta(seconds=1)
    assert not keeper.failure
