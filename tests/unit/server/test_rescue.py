"""Rounds that only a standby has become a checkpoint when another parameter server takes over."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from elastic_ps.api.checkpoints import Times
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Application, Settings
from elastic_ps.errors import AskedToEnd, ConnectionLost, Fenced, RefusalCode, Refused, StorageUnavailable
from elastic_ps.process.retrying import Patience
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.standby import Rescue, for_standby, sum_key
from elastic_ps.server.orders import Advance, Configuration, RemoteShard, Report, ShardControl
from elastic_ps.server.process import ParameterServer, service_of
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.convert import to_message
from elastic_ps.transport.inproc import InprocServer, connect
from tests.testing.service import Worker, environment
from tests.testing.shard import LR, Body, one_bucket, ones, tensor

TENSOR = asdict(TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0))
STATE = json.dumps({"tensors": [TENSOR], "optimizer": "SGD"})


def make_node(store: Store) -> Node:
    return Node(0, 1, store=store, trace=Trace(None, ""))


def configure(node: Node, *, term: int, load: int | None = None) -> None:
    node.configure(Configuration(one_bucket(tensor("w", 4)), "SGD", Settings(LR.groups), term, load))


def round_of(version: int) -> Advance:
    """What makes `version`, of a gradient of ones."""
    application = Application(0, [(0, 10, version - 1)], 1, LR)
    return Advance(version, 0, {}, application, term=1, state=STATE)


class Disk(Store):
    """A checkpoint directory in which there may be no room."""

    room = True

    def write_shard(self, *arguments: Any, **named: Any) -> ShardFile:
        if not self.room:
            raise StorageUnavailable("No space left on device")
        return super().write_shard(*arguments, **named)


class Setting:
    """A standby that has carried out version 1 and has the sum for version 2, and a new shard."""

    def __init__(self, directory: Path) -> None:
        self.store = Disk(directory)
        self.store.next_term()
        interval = timedelta(seconds=30)
        self.checkpoints = Checkpointer(
            self.store,
            job="job",
            term=self.store.next_term(),
            shards=1,
            times=Times(interval=interval, every_versions=9, keep=2),
        )
        self.shard, self.standby = make_node(self.store), make_node(self.store)
        configure(self.standby, term=1)
        first, second = round_of(1), round_of(2)
        self.standby.advance(Advance(0, 0, {}, term=1, next=first))
        self.standby.take_sum(sum_key(1, 0, 0, 0), [True], Body(ones(4)))
        self.standby.advance(replace(for_standby(first), next=second))
        self.standby.take_sum(sum_key(1, 0, 1, 0), [True], Body(ones(4)))

    def by(self, standby: object = None, *, shard: ShardControl | None = None, **more: Any) -> Rescue:
        """What saves versions with these; by default, with the shard and the standby that there are."""
        standbys = [cast(RemoteShard, standby or self.standby)]
        return Rescue(self.checkpoints, [shard or self.shard], standbys, **more)

    def rescue(self) -> bool:
        return self.by().save(self.by().held())

    def loaded(self, version: int) -> list[float]:
        """The values of the checkpoint."""
        node = make_node(self.store)
        try:
            configure(node, term=3, load=version)
            ((_, values),) = node.shard.values()
            return list(torch.Tensor.tolist(values))
        finally:
            node.close()

    def close(self) -> None:
        for each in (self.shard, self.standby, self.checkpoints):
            each.close()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    setting = Setting(tmp_path)
    yield setting
    setting.close()


def test_the_newest_round_of_the_standby_becomes_a_checkpoint(setting: Setting) -> None:
    assert setting.rescue()
    assert setting.checkpoints.durable_version == 2
    assert setting.loaded(2) == [-2.0] * 4


def test_a_model_with_a_long_description_is_saved_from_a_standby(tmp_path: Path) -> None:
    """It is in the checkpoint, and in no order, whose header has a largest size."""
    names = [f"{'layer.' * 200}{number}.weight" for number in range(2_000)]
    tensors = [TensorSpec(name, (4,), "float32", Rule.GRADIENT, 0) for name in names]
    layout, store = partition(tensors, bucket_bytes=1 << 22, shards=1), Store(tmp_path)
    times = Times(interval=timedelta(seconds=30), every_versions=9, keep=2)
    store.next_term()
    checkpoints = Checkpointer(store, job="job", term=store.next_term(), shards=1, times=times)
    shard, standby, listener = make_node(store), make_node(store), InprocServer()
    try:
        standby.configure(Configuration(layout, "SGD", Settings(LR.groups), 1, None))
        listener.serve(service_of("job", standby, None, standby=True))
        remote = RemoteShard("job", connect(listener), start=timedelta(0))
        remote.advance(Advance(0, 0, {}, term=1, next=replace(round_of(1), state="{}")))
        for bucket in layout.pushed:
            key = sum_key(1, bucket.index, 0, 0)
            standby.take_sum(key, [True] * len(bucket.pieces), Body(ones(bucket.elements)))
        rescue = Rescue(checkpoints, [shard], [remote], gone=timedelta(seconds=2))
        assert rescue.save(rescue.held())
        assert [each["name"] for each in checkpoints.newest().tensors] == names
    finally:
        for each in (shard, standby, checkpoints):
            each.close()


def test_an_order_of_a_standby_of_an_earlier_version_is_left_out(setting: Setting) -> None:
    assert not setting.by().save([replace(each, state="{}") for each in setting.by().held()])


def test_a_round_is_not_saved_from_a_model_of_another_term(setting: Setting) -> None:
    """A standby that was left behind keeps the rounds of a term that the job has given up since."""
    later = [replace(order, term=2) for order in setting.by().held()]
    assert later
    assert not setting.by().save(later)
    assert setting.checkpoints.durable_version is None


def test_what_is_on_disk_is_not_saved_again(setting: Setting) -> None:
    assert setting.rescue()
    assert not setting.rescue()
    assert setting.store.versions() == [2]


def test_without_the_last_sum_the_version_before_is_saved(tmp_path: Path, setting: Setting) -> None:
    orders = [round_of(1), round_of(3)]  # the standby is at version 1 and has the sum for 2
    assert setting.by().save(orders)
    assert setting.checkpoints.durable_version == 1
    assert setting.loaded(1) == [-1.0] * 4


def test_a_round_that_only_one_standby_has_leaves_the_version_before(tmp_path: Path) -> None:
    """Both parameter servers were lost when the first had sent its standby the next round."""
    tensors = [TensorSpec(name, (256,), "float32", Rule.GRADIENT, 0) for name in "ab"]
    layout, store = partition(tensors, bucket_bytes=1024, shards=2), Store(tmp_path)
    times = Times(interval=timedelta(seconds=30), every_versions=9, keep=2)
    store.next_term()
    checkpoints = Checkpointer(store, job="job", term=store.next_term(), shards=2, times=times)
    nodes = [Node(shard, 2, store=store, trace=Trace(None, "")) for shard in (0, 1, 0, 1)]
    standbys = nodes[2:]
    first, second = (replace(round_of(version), state="{}") for version in (1, 2))

    def send(standby: Node, order: Advance) -> None:
        [bucket] = layout.of_shard(standby.index)
        standby.advance(order)
        standby.take_sum(sum_key(1, bucket.index, order.version, 0), [True], Body(ones(256)))

    try:
        for standby in standbys:
            standby.configure(Configuration(layout, "SGD", Settings(LR.groups), 1, None))
            send(standby, Advance(0, 0, {}, term=1, next=first))
        send(standbys[0], replace(for_standby(first), next=second))
        rescue = Rescue(checkpoints, nodes[:2], cast(list[RemoteShard], standbys))
        held = rescue.held()
        assert [order.version for order in held] == [1, 2]
        assert rescue.save(held)
        assert checkpoints.durable_version == 1
    finally:
        for each in nodes:
            each.close()
        checkpoints.close()


def test_nothing_is_saved_if_nobody_can_carry_an_order_out(setting: Setting) -> None:
    assert not setting.by().save([round_of(3)])
    assert setting.checkpoints.durable_version is None


def test_a_version_that_cannot_be_written_is_not_lost(setting: Setting) -> None:
    """Nor is an older one written in its place. When there is room again, it is saved."""
    setting.store.room = False
    with pytest.raises(StorageUnavailable, match="version 2 cannot be saved yet: No space left on device"):
        setting.rescue()
    assert setting.checkpoints.durable_version is None
    setting.store.room = True
    assert setting.rescue()
    assert setting.loaded(2) == [-2.0] * 4


def test_a_parameter_server_that_starts_waits_for_room_for_what_its_standby_has(setting: Setting) -> None:
    setting.store.room = False
    problems: list[str] = []

    def asked_to_end() -> bool:
        problems.append(patience.problem)
        setting.store.room = True
        return False

    patience = Patience(asked_to_end)
    assert patience.until_done(setting.rescue)
    assert "version 2 cannot be saved yet" in problems[0]
    assert setting.loaded(2) == [-2.0] * 4


class Lossy:
    """Loses the answers to the first `losses` orders that `inner` carries out, which takes `seconds` each."""

    def __init__(self, inner: Node, losses: int, seconds: float = 0.0) -> None:
        self._inner, self.losses, self._seconds = inner, losses, seconds

    def advance(self, order: Advance) -> Report:
        report = self._inner.advance(order)
        if self.losses:
            self.losses -= 1
            time.sleep(self._seconds)
            raise ConnectionLost("reset")
        return report


def test_an_answer_of_the_standby_that_is_lost_is_asked_for_again(setting: Setting) -> None:
    lossy = Lossy(setting.standby, losses=3)
    assert setting.by(lossy).save([round_of(1), round_of(2)])
    assert setting.checkpoints.durable_version == 2


def test_an_answer_that_is_lost_after_long_work_is_asked_for_again(setting: Setting) -> None:
    """The time that a standby takes for the step and the copy is not time in which it has gone."""
    lossy = Lossy(setting.standby, losses=1, seconds=0.4)
    assert setting.by(lossy, gone=timedelta(seconds=0.2)).save([round_of(2)])


def test_a_standby_that_has_gone_is_given_up(setting: Setting) -> None:
    """Else a job whose shard and standby are lost together would never go back to its checkpoint."""
    lossy = Lossy(setting.standby, losses=1_000_000)
    orders = [round_of(1), round_of(2)]
    assert not setting.by(lossy, gone=timedelta(seconds=0.3)).save(orders)


def test_a_version_that_a_shard_was_writing_when_it_was_lost_comes_from_its_standby(setting: Setting) -> None:
    class Dying:
        """It begins to write, and is started again."""

        asked = 0

        def configure(self, configuration: Configuration) -> None: ...

        def advance(self, order: Advance) -> Report:
            self.asked += 1
            if self.asked > 1:
                raise Refused(RefusalCode.NOT_READY, "shard 0 does not know the model yet")
            return Report()

    dying = setting.by(shard=Dying())
    with pytest.raises(StorageUnavailable, match="given up: shard 0 does not know the model yet"):
        dying.save([round_of(2)])
    assert dying.save([round_of(2)])
    assert setting.loaded(2) == [-2.0] * 4


def test_a_shard_that_still_has_the_model_needs_no_standby(setting: Setting) -> None:
    configure(setting.shard, term=1)
    order = replace(round_of(0), apply=None)

    class Nobody:
        def advance(self, order: Advance) -> Report:
            raise AssertionError("the standby is asked")

    assert setting.by(Nobody()).save([order])
    assert setting.loaded(0) == [0.0] * 4


def test_a_standby_that_a_newer_term_has_asked_fences_this_one(setting: Setting) -> None:
    setting.standby.held(5)
    with pytest.raises(Fenced, match="term 5 gives the orders now"):
        setting.rescue()


def test_a_standby_that_does_not_answer_is_asked_for_a_while(setting: Setting) -> None:
    order = round_of(1)

    class Late:
        asked = 0

        def held(self, term: int) -> list[Advance]:
            self.asked += 1
            if self.asked < 3:
                raise ConnectionLost("not there yet")
            return [order]

    assert setting.by(Late()).held() == [order]

    class Never:
        def held(self, term: int) -> list[Any]:
            raise ConnectionLost("nobody")

    assert setting.by(Never(), gone=timedelta(seconds=0.3)).held() == []


def test_what_only_a_silent_standby_has_is_not_given_up_by_a_process_that_ends(setting: Setting) -> None:
    """The next parameter server asks it again, and this one does not outlast its grace period."""

    class Never:
        asked = 0

        def held(self, term: int) -> list[Any]:
            self.asked += 1
            raise ConnectionLost("nobody")

    never, silent = Never(), Lossy(setting.standby, losses=1_000_000)
    with pytest.raises(AskedToEnd, match="the standby did not answer: nobody"):
        setting.by(never, closing=lambda: True).held()
    with pytest.raises(StorageUnavailable, match="version 2 is left to the standby: reset"):
        setting.by(silent, closing=lambda: True).save([round_of(2)])
    assert (never.asked, silent.losses) == (1, 1_000_000 - 1)
    assert setting.rescue()
    assert setting.loaded(2) == [-2.0] * 4


def test_a_refusal_of_the_standby_is_no_answer(setting: Setting) -> None:
    class Busy:
        def held(self, term: int) -> list[Any]:
            raise Refused(RefusalCode.STALE_TERM, "term 9 gives the orders now")

    with pytest.raises(Fenced, match="term 9"):
        setting.by(Busy()).held()


def test_rounds_of_a_term_that_the_job_has_given_up_replace_no_later_checkpoint(tmp_path: Path) -> None:
    """The standby was away when the job went back to a checkpoint, and has told nobody of them since."""
    orders = [to_message(pb.AdvanceRequest, replace(round_of(9 - term), term=term)) for term in (2, 1)]
    asked: list[int] = []

    def standby(method: str, incoming: Incoming) -> Iterator[Frame]:
        if method == "Held":
            yield Frame(pb.HeldReply(orders=orders).SerializeToString())
            return
        if method == "Advance":
            asked.append(pb.AdvanceRequest.FromString(incoming.header).rescued_term)
        raise Refused(RefusalCode.NOT_READY, "the standby is still catching up")

    def start(listener: InprocServer) -> ParameterServer:
        given = environment(checkpoints=tmp_path)
        return ParameterServer(given, listener, lambda _: connect(listener), lambda _: connect(away))

    away = InprocServer()
    away.serve(standby)
    for term in (1, 2, 3):
        asked.clear()
        server = start(listener := InprocServer())
        try:
            assert server.term == term
            if term < 3:
                worker = Worker(listener)
                worker.start()
                worker.step(term)
        finally:
            server.close()
    assert asked == [2], "the newest checkpoint is of term 2"
    away.close()
