"""A shard under orders: its part in checkpoints, votes, what comes late or twice, and its end."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_ps.api.checkpoints import Times
from elastic_ps.checkpoint.manifest import Manifest, ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import as_bytes, checksum, dtype_of
from elastic_ps.codec.optimizers import MASTER
from elastic_ps.codec.state import Stored
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import Application, Settings
from elastic_ps.errors import CheckpointError, RefusalCode, Refused
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.standby import Follower
from elastic_ps.server.limits import ServerLimits
from elastic_ps.server.orders import Advance, Configuration, OrderId, RemoteShard, Report, Written
from elastic_ps.server.shards.pulls import Pull, Pulled
from elastic_ps.server.shards.shard import Shard
from elastic_ps.transport.inproc import InprocServer, connect
from tests.testing.polling import LIMIT, eventually
from tests.testing.shard import PLAIN, Body, tensor


class InstantStore(Store):
    """A disk that takes no time."""

    def write_shard(self, *_: Any, **__: Any) -> ShardFile:
        return ShardFile("file", "digest", 0)


def test_a_part_is_told_until_another_checkpoint_is_ordered(tmp_path: Path) -> None:
    """The answer that tells it may be lost; then no checkpoint would ever be finished again."""
    node = Node(0, 1, store=InstantStore(tmp_path), trace=Trace(None, ""))
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


def test_a_checkpoint_keeps_the_master_of_half_precision_values(tmp_path: Path) -> None:
    """Else what has added up below half precision would be lost by each restart."""
    store = Store(tmp_path)
    term = store.next_term()
    spec = TensorSpec("w", (4,), "bfloat16", Rule.GRADIENT, 0)
    layout = partition([spec], bucket_bytes=1 << 20, shards=1)
    settings = Settings(({"lr": 1.0, "momentum": 0.5},))
    one = torch.full((4,), -(2.0**-12), dtype=torch.bfloat16)

    def step(node: Node, version: int) -> None:
        node.advance(Advance(version, 0, {0: 1}, term=term))
        key = PushKey(term=term, worker=0, incarnation=1, step=version, bucket=0, version=version, attempt=0)
        node.shard.push(key, 1, PLAIN, Body(one))
        apply = Application(0, [(0, 1, version)], 1, settings)
        node.advance(Advance(version + 1, 0, {0: 1}, apply, term=term))

    def master(node: Node) -> list[float]:
        (values,) = [stored.value for stored in node.shard.stored(0) if stored.key == MASTER]
        return [float(value) for value in values]

    first, second = (Node(0, 1, store=store, trace=Trace(None, "")) for _ in range(2))
    try:
        first.configure(Configuration(layout, "SGD", settings, term, None))
        step(first, 0)
        first.advance(Advance(1, 0, {}, checkpoint=1, term=term))
        eventually(lambda: told_in(first, term=term, version=1) is not None, "the part is written")
        written = told_in(first, term=term, version=1)
        assert written is not None
        assert written.file is not None
        store.commit(
            Manifest(
                job="j",
                version=1,
                term=term,
                number=1,
                tensors=[asdict(spec)],
                optimizer="SGD",
                state={},
                files=[written.file],
            ),
            keep=1,
        )
        second.configure(Configuration(layout, "SGD", settings, term, 1))
        assert master(second) == [2.0**-12] * 4
        for node in (first, second):
            step(node, 1)
        assert master(first) == master(second) == [2.0**-12 * 2.5] * 4
        assert [
            torch.equal(a, b)
            for (_, a), (_, b) in zip(first.shard.values(), second.shard.values(), strict=True)
        ] == [True]
    finally:
        first.close()
        second.close()


def told_in(node: Node, *, term: int, version: int = 0) -> Written | None:
    return node.advance(Advance(version, 0, {}, term=term)).written


def test_a_part_that_is_told_twice_is_one_part(tmp_path: Path) -> None:
    """Else the manifest would be finished before all shards have written, or twice."""
    store = Store(tmp_path)
    term = store.next_term()
    checkpoints = Checkpointer(
        store, job="j", term=term, shards=2, times=Times(interval=timedelta(0), keep=3)
    )
    checkpoints.begin(1, 0.0, {"tensors": [], "optimizer": "SGD"}, number=checkpoints.number())
    parts = [
        Written(
            term, 1, 1, store.write_shard(term, 1, shard, 2, iter(()), number=1), "", timedelta(seconds=1)
        )
        for shard in (0, 1)
    ]
    try:
        for shard in (0, 0, 1, 1, 0):
            checkpoints.part(shard, Report(parts[shard]))
    finally:
        checkpoints.close()
    assert checkpoints.durable_version == 1
    assert [file.file for file in store.manifest(1).files] == [part.file.file for part in parts if part.file]
    assert checkpoints.paused == timedelta(seconds=1)
    assert not checkpoints.failure


LAYOUT = partition([TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0)], bucket_bytes=1 << 20, shards=1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A shard at version 2."""
    store = Store(tmp_path)
    node = Node(0, 1, store=store, trace=Trace(None, ""))
    configure(node, term=1)
    node.shard.initialise(0, 0, 1, Body(torch.zeros(4)))
    for version in (1, 2):
        push(node, version - 1)
        node.advance(Advance(version, 0, {0: 1}, application(version - 1), term=1))
    yield node
    node.close()


def configure(node: Node, *, term: int, order: OrderId | None = None) -> None:
    node.configure(Configuration(LAYOUT, "SGD", Settings(({"lr": 1.0},)), term, None), order)
    node.advance(Advance(0, 0, {0: 1}, term=term))


def push(node: Node, version: int) -> None:
    key = PushKey(term=1, worker=0, incarnation=1, step=version, bucket=0, version=version, attempt=0)
    node.shard.push(key, 1, PLAIN, Body(torch.ones(4)))


def application(version: int) -> Application:
    return Application(0, [(0, 1, version)], 1, Settings(({"lr": 1.0},)))


def test_a_checkpoint_is_not_made_of_another_versions_values(node: Node) -> None:
    """An overtaken order applies nothing; its checkpoint would be of the values that are there."""
    for overtaken in (
        Advance(1, 0, {0: 1}, application(0), checkpoint=1, term=1),
        Advance(1, 0, {0: 1}, checkpoint=1, term=1),
    ):
        with pytest.raises(Refused, match="checkpoint of version 1, but shard 0 is at version 2") as refused:
            node.advance(overtaken)
        assert refused.value.code is RefusalCode.NOT_READY
    node.advance(Advance(2, 0, {0: 1}, checkpoint=2, term=1))
    eventually(lambda: told_in(node, term=1) is not None, "the part is written")
    written = told_in(node, term=1)
    assert written is not None
    assert (written.number, written.version, written.error) == (2, 2, "")


def test_a_vote_changes_nothing_and_says_whether_the_round_can_be_applied(node: Node) -> None:
    vote = Advance(3, 0, {0: 1}, application(2), term=1, prepare=True)
    with pytest.raises(Refused, match="lacks gradients") as refused:
        node.advance(vote)
    assert refused.value.code is RefusalCode.INVALID
    push(node, 2)
    node.advance(vote)
    assert node.shard.version == 2
    node.advance(replace(vote, prepare=False))
    assert node.shard.version == 3


def test_a_part_of_an_earlier_life_is_no_part_of_the_checkpoint_of_this_one(tmp_path: Path) -> None:
    """Else a slow write from before a roll-back is taken for the same version's after it."""
    store = SlowStore(tmp_path)
    node = Node(0, 1, store=store, trace=Trace(None, ""))
    try:
        configure(node, term=1)
        node.advance(Advance(0, 0, {}, checkpoint=1, term=1))
        assert store.began.wait(10)
        configure(node, term=2)
        node.advance(Advance(0, 0, {}, checkpoint=1, term=2))
        assert told_in(node, term=2) is None
        store.go_on.set()
        eventually(lambda: told_in(node, term=2) is not None, "the second part is written")
        written = told_in(node, term=2)
        assert written is not None
        assert written.term == 2
    finally:
        store.go_on.set()
        node.close()


def test_a_checkpoint_that_nobody_waits_for_is_not_written(tmp_path: Path) -> None:
    """On a slow disk each checkpoint that is given up would leave a copy of the shard behind."""
    store = SlowStore(tmp_path)
    node = Node(0, 1, store=store, trace=Trace(None, ""))
    try:
        configure(node, term=1)
        for number in (1, 2, 3):
            node.advance(Advance(0, 0, {}, checkpoint=number, term=1))
            assert store.began.wait(10)
        store.go_on.set()
        eventually(lambda: told_in(node, term=1) is not None, "the last one is written")
        assert store.numbers == [1, 3]
    finally:
        store.go_on.set()
        node.close()


class SlowHistory(History):
    """A history that waits, once, before a snapshot is given to the writer.

    Attributes:
        slow: set to let it wait the next time.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "ps-0")
        self.slow, self.began, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def record(self, event: str, **values: Any) -> None:
        super().record(event, **values)
        if event == "values" and self.slow.is_set():
            self.slow.clear()
            self.began.set()
            assert self.go_on.wait(10)


def test_a_part_that_is_ordered_again_while_it_is_carried_out_is_written_once(tmp_path: Path) -> None:
    """The second time, the file would be replaced in a checkpoint that may be whole."""
    store, history = SlowStore(tmp_path / "kept"), SlowHistory(tmp_path)
    store.go_on.set()
    node = Node(0, 1, store=store, trace=Trace(None, ""), history=history)
    order = Advance(0, 0, {}, checkpoint=1, term=1)
    try:
        configure(node, term=1)
        history.slow.set()
        first = threading.Thread(target=node.advance, args=(order,))
        first.start()
        assert history.began.wait(10)
        node.advance(order)
        eventually(lambda: told_in(node, term=1) is not None, "the part is written")
        history.go_on.set()
        first.join(10)
    finally:
        history.go_on.set()
        node.close()
        history.close()
    assert store.numbers == [1]


def test_a_snapshot_that_waits_is_not_dropped_for_an_order_that_is_repeated(tmp_path: Path) -> None:
    """The order is on its way in twice, and the one is overtaken by the other."""
    store, history = SlowStore(tmp_path / "kept"), SlowHistory(tmp_path)
    node = Node(0, 1, store=store, trace=Trace(None, ""), history=history)
    order = Advance(0, 0, {}, checkpoint=2, term=1)
    try:
        configure(node, term=1)
        node.advance(replace(order, checkpoint=1))
        assert store.began.wait(10)
        history.slow.set()
        overtaken = threading.Thread(target=node.advance, args=(order,))
        overtaken.start()
        assert history.began.wait(10)
        node.advance(order)
        history.go_on.set()
        overtaken.join(10)
        store.go_on.set()
        eventually(lambda: store.numbers == [1, 2], "both are written")
    finally:
        history.go_on.set()
        store.go_on.set()
        node.close()
        history.close()


class SlowStore(InstantStore):
    """A disk that waits.

    Attributes:
        numbers: of the checkpoints that a part was written of.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.numbers: list[int] = []

    def write_shard(self, *place: Any, number: int = 0, **_: Any) -> ShardFile:
        self.began.set()
        assert self.go_on.wait(10)
        self.numbers.append(number)
        return super().write_shard(*place, number=number)


def test_an_order_that_arrives_after_it_was_repeated_changes_nothing(node: Node) -> None:
    """Such a `Configure` would drop the model that is being trained."""
    configure(node, term=1, order=OrderId("leader", 5))
    before = node.shard
    for late in (4, 5):
        configure(node, term=1, order=OrderId("leader", late))
    assert node.shard is before
    configure(node, term=1, order=OrderId("leader", 6))
    assert node.shard is not before


class OpenedSlowly(Store):
    """A disk that waits the first time that a checkpoint is opened."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.began, self.go_on = threading.Event(), threading.Event()

    def open(self, version: int) -> Reader:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(10)
        return super().open(version)


def test_a_configuration_that_was_repeated_while_it_was_carried_out_changes_nothing(tmp_path: Path) -> None:
    """The second one has been answered, and training has begun on what it made."""
    store = OpenedSlowly(tmp_path)
    written = store.write_shard(store.next_term(), 0, 0, 1, iter([Stored(0, 0, "value", torch.zeros(4))]))
    tensors, settings = [asdict(each) for each in LAYOUT.tensors], Settings(({"lr": 1.0},))
    store.commit(
        Manifest(job="j", version=0, term=1, tensors=tensors, optimizer="SGD", state={}, files=[written]),
        keep=1,
    )
    configuration = Configuration(LAYOUT, "SGD", settings, 1, 0)
    node = Node(0, 1, store=store, trace=Trace(None, ""))
    first = threading.Thread(target=node.configure, args=(configuration, OrderId("leader", 1)))
    try:
        first.start()
        assert store.began.wait(10)
        node.configure(configuration, OrderId("leader", 2))
        trained = node.shard
        store.go_on.set()
        first.join(10)
        assert node.shard is trained
    finally:
        store.go_on.set()
        node.close()


class SlowFollower(Follower):
    """The first round waits, while it is sent to a standby that is not there."""

    def __init__(self) -> None:
        nobody = InprocServer()
        nobody.close()
        super().__init__(
            RemoteShard("job", connect(nobody), start=timedelta(0), timeout=timedelta(seconds=1))
        )
        self.began, self.go_on = threading.Event(), threading.Event()

    def stage(self, shard: Shard, order: Advance) -> None:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(10)


def test_an_order_that_was_overtaken_while_it_was_carried_out_is_not_the_last_one(tmp_path: Path) -> None:
    """A standby would carry out an older round for its shard than the one that it was told of last."""
    follower = SlowFollower()
    node = Node(0, 1, store=Store(tmp_path), trace=Trace(None, ""), follower=follower)
    try:
        configure(node, term=1)
        push(node, 0)
        applies = Advance(1, 0, {0: 1}, application(0), term=1)
        older, newer = (replace(applies, next=Advance(2, attempt, {}, term=1)) for attempt in (0, 1))
        first = threading.Thread(target=node.advance, args=(older, OrderId("leader", 1)))
        first.start()
        assert follower.began.wait(10)
        node.advance(newer, OrderId("leader", 2))
        follower.go_on.set()
        first.join(10)
        assert node._orders == [newer.next]  # noqa: SLF001  `held` tells only those whose sums are here
    finally:
        follower.go_on.set()
        node.close()


def test_a_shard_that_is_to_end_waits_until_shard_0_has_no_more_to_order(node: Node) -> None:
    """All are asked to end at once, and shard 0 needs the others' parts of the last checkpoint."""
    second = timedelta(seconds=1)
    released = threading.Thread(target=node.await_release, args=(60 * second,), kwargs={"quiet": 60 * second})
    released.start()
    node.advance(Advance(2, 0, {}, checkpoint=3, term=1))
    assert released.is_alive()
    node.advance(Advance(2, 0, {}, last=True, term=1))
    released.join(10)
    assert not released.is_alive()


def test_a_shard_waits_no_longer_than_it_may(node: Node) -> None:
    began = time.monotonic()
    node.await_release(timedelta(milliseconds=300), quiet=timedelta(seconds=60))
    assert time.monotonic() - began >= 0.3


def test_a_shard_does_not_wait_for_a_shard_0_that_says_nothing(node: Node) -> None:
    began = time.monotonic()
    node.await_release(timedelta(seconds=2 * LIMIT), quiet=timedelta(milliseconds=1))
    assert time.monotonic() - began < LIMIT


def test_an_order_is_not_for_a_model_of_another_term() -> None:
    """A late copy of a `configure` of term 1 reached a shard that had been started again in term 2.

    It answered each order that had nothing to apply, and refused all workers, for ever.
    """
    node = Node(1, 2, store=None, trace=Trace(None, ""))
    layout = partition([TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0)], bucket_bytes=1 << 20, shards=2)
    try:
        node.configure(Configuration(layout, "SGD", Settings(({"lr": 0.1},)), 1, None), OrderId("old", 1))
        with pytest.raises(Refused, match="has the model of term 1; the order is of term 2") as refused:
            node.advance(Advance(0, 1, {0: 2}, term=2), OrderId("new", 1))
        assert refused.value.code is RefusalCode.NOT_READY
        node.advance(Advance(0, 1, {}, term=2, rescued_term=1), OrderId("new", 2))
    finally:
        node.close()


def test_an_order_that_arrives_late_opens_no_round(node: Node) -> None:
    node.advance(Advance(2, 0, {0: 1}, term=1), OrderId("leader", 6))
    report = node.advance(Advance(2, 1, {}, term=1), OrderId("leader", 5))
    assert report == node.advance(Advance(2, 1, {}, term=1), OrderId("leader", 6))
    push(node, 2)
    node.advance(Advance(3, 0, {0: 1}, application(2), term=1), OrderId("leader", 7))
    assert node.shard.version == 3


def test_a_checkpoint_that_is_ordered_again_is_written_once(tmp_path: Path) -> None:
    written: list[int] = []

    class Counting(InstantStore):
        def write_shard(self, *place: Any, number: int = 0, **named: Any) -> ShardFile:
            written.append(number)
            return super().write_shard(*place, number=number, **named)

    node = Node(0, 1, store=Counting(tmp_path), trace=Trace(None, ""))
    try:
        configure(node, term=1)
        for number in (1, 1, 2, 1, 2):
            node.advance(Advance(0, 0, {}, checkpoint=number, term=1))
            eventually(lambda n=number: n in written, "it is written")  # type: ignore[misc]
    finally:
        node.close()
    assert written == [1, 2]


def test_a_shard_without_a_checkpoint_directory_loads_nothing() -> None:
    node = Node(1, 2, store=None, trace=Trace(None, ""))
    try:
        with pytest.raises(CheckpointError, match="shard 1 has no checkpoint directory to load from"):
            node.configure(Configuration(LAYOUT, "SGD", Settings(({"lr": 1.0},)), 1, 0))
        assert not node.configured
    finally:
        node.close()


def test_a_history_tells_the_values_of_each_version_that_was_made_or_kept(tmp_path: Path) -> None:
    layout = partition([tensor("w", 4), tensor("c", 2, rule=Rule.CONSTANT)], bucket_bytes=1 << 20, shards=1)
    (trained,) = layout.pushed
    history = History(tmp_path, "ps-0")
    store = InstantStore(tmp_path / "checkpoints")
    node = Node(0, 1, store=store, trace=Trace(None, ""), history=history)
    try:
        node.configure(Configuration(layout, "SGD", Settings(({"lr": 1.0},)), 1, None))
        node.advance(Advance(0, 0, {0: 1}, term=1))
        node.shard.initialise(trained.index, 0, 1, Body(torch.zeros(4)))
        key = PushKey(term=1, worker=0, incarnation=1, step=0, bucket=trained.index, version=0, attempt=0)
        node.shard.push(key, 1, PLAIN, Body(torch.ones(4)))
        node.advance(Advance(1, 0, {0: 1}, application(0), term=1))
        node.advance(Advance(1, 0, {0: 1}, application(0), term=1))
        node.advance(Advance(1, 0, {0: 1}, checkpoint=1, term=1))
    finally:
        node.close()
        history.close()
    (file,) = tmp_path.glob("ps-0-*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    coding = events.pop(0)
    assert (coding["event"], coding["term"], coding["compression"]) == ("coding", 1, {})
    expected = [trained.index, 1, checksum(as_bytes(torch.full((4,), -1.0)))]
    assert [(event["event"], event["term"], event["values"]) for event in events] == [
        ("values", 1, [expected])
    ] * 2, "when it was made, and when it was kept"


class StepwiseStore(Store):
    """A disk that takes so many tensors at once, and the others when it may go on."""

    def __init__(self, directory: Path, at_once: int) -> None:
        super().__init__(directory)
        self.began, self.go_on = threading.Event(), threading.Event()
        self._at_once = at_once

    def write_shard(self, *place: Any, **named: Any) -> ShardFile:
        *where, tensors = place

        def slowly() -> Iterator[Stored]:
            yield from itertools.islice(tensors, self._at_once)
            self.began.set()
            self.go_on.wait()
            yield from tensors

        where.append(slowly())
        return super().write_shard(*where, **named)


MIXED = [
    tensor("a", 400),
    tensor("b", 300),
    tensor("c", 100),
    tensor("half", 400, dtype="bfloat16"),
    tensor("mean", 8, rule=Rule.MEAN),
    tensor("constant", 8, rule=Rule.CONSTANT),
]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "with speculative updates"])
@pytest.mark.parametrize("at_once", [0, 1, 2, 6, 17], ids=lambda count: f"{count} tensors are written before")
def test_a_checkpoint_that_is_written_while_steps_go_on_is_of_one_version(
    tmp_path: Path, at_once: int, ahead: bool
) -> None:
    """Nothing is copied before a step changes it, so each step must copy what is not on disk yet."""
    layout = partition(MIXED, bucket_bytes=1600, shards=1)
    settings = Settings(({"lr": 0.1},))
    store = StepwiseStore(tmp_path, at_once)
    node = Node(
        0,
        1,
        store=store,
        trace=Trace(None, ""),
        limits=ServerLimits(written=timedelta(milliseconds=20)),
    )
    generator = torch.Generator().manual_seed(0)

    def step(version: int) -> None:
        shard, place = node.shard, {"worker": 0, "incarnation": 1, "step": version, "attempt": 0}
        for bucket in layout.pushed:
            values = torch.randn(bucket.elements, generator=generator).to(dtype_of(bucket.dtype))
            key = PushKey(term=1, bucket=bucket.index, version=version, **place)
            shard.push(key, 1, PLAIN, Body(values))
        if ahead:
            numbers = [bucket.index for bucket in layout.pushed]
            asked = Pull(
                buckets=numbers, version=version + 1, term=1, contributor=(0, 1), groups=settings.groups
            )
            drafts = list(itertools.islice(shard.pull(asked), len(numbers)))
            assert all(isinstance(draft, Pulled) and draft.draft for draft in drafts)
        apply = Application(0, [(0, 1, version)], 1, settings)
        node.advance(Advance(version + 1, 0, {0: 1}, apply, term=1))

    try:
        node.configure(Configuration(layout, "Adam", settings, 1, None))
        node.advance(Advance(0, 0, {0: 1}, term=1))
        for version in range(2):
            step(version)
        stored = [each for index in sorted(node.shard.buckets) for each in node.shard.stored(index)]
        assert len(stored) == 19
        expected = {each.name: each.value.clone() for each in stored}
        node.advance(Advance(2, 0, {0: 1}, checkpoint=1, term=1))
        eventually(store.began.is_set, "some of it is written")
        for version in range(2, 5):
            step(version)
        assert not torch.equal(stored[0].value, expected[stored[0].name]), "the steps change something"
        store.go_on.set()
        eventually(lambda: told_in(node, term=1, version=5) is not None, "the part is written")
    finally:
        store.go_on.set()
        node.close()
    (file,) = tmp_path.rglob("*.safetensors")
    written = load_file(file)
    assert {name: value.dtype for name, value in written.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert [name for name, value in expected.items() if not torch.equal(value, written[name])] == []
