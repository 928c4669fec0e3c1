"""A shard and the standby that follows it: how it catches up, and what both hold meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch._subclasses import FakeTensor

from elastic_ps.codec.state import CopiedTensor
from elastic_ps.core.partition import Layout, Rule, partition
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import Application, Settings
from elastic_ps.core.stages import StandbyState
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.standby import Follower, for_standby
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, OrderId, RemoteShard
from elastic_ps.server.process import service_of
from elastic_ps.server.shards.shard import Shard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.inproc import InprocServer, connect
from tests.testing.polling import eventually
from tests.testing.shard import PLAIN, Body, one_bucket, tensor

ADAM = Settings(groups=({"lr": 0.01},))
MIB = 1 << 20


class Pair:
    """A shard that one worker trains on, and its standby, which is told of the model when `gate` opens."""

    def __init__(self, layout: Layout, *, optimizer: str = "Adam", limits: ServerLimits = USUAL) -> None:
        self.gate = threading.Event()
        self.before_sum: Callable[[], None] = lambda: None
        self.layout, self.optimizer, self.version = layout, optimizer, 0
        self.standby = self._node(None)
        self._listener = InprocServer()
        self._service = service_of("job", self.standby, None, standby=True)
        self._listener.serve(self._serve)
        self.connection = connect(self._listener)
        self.follower = Follower(RemoteShard("job", self.connection, start=timedelta(0)), limits)
        self.leader = self._node(self.follower)
        self.configure(term=1)

    def _node(self, follower: Follower | None) -> Node:
        trace = Trace(None, "")
        return Node(0, 1, store=None, trace=trace, follower=follower)

    def _serve(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        if method == "Configure":
            assert self.gate.wait(30)
        if method == "Sum":
            self.before_sum()
        return self._service(method, incoming)

    def configure(self, *, term: int) -> None:
        self.term, self.version = term, 0
        self.leader.configure(Configuration(self.layout, self.optimizer, ADAM, term, None))
        self.leader.advance(Advance(0, 0, {0: 1}, term=term))
        for bucket in self.layout.buckets:
            if bucket.rule is Rule.CONSTANT:
                self.leader.shard.initialise(bucket.index, 0, 1, Body(torch.full((bucket.elements,), 2.0)))

    def round(self) -> None:
        """The worker's step, and the order to apply it."""
        self.leader.advance(self.step())

    def step(self) -> Advance:
        """The worker's step. Returns the order to apply it."""
        for bucket in self.layout.pushed:
            generator = torch.Generator().manual_seed(self.version)
            values = torch.randn(bucket.elements, generator=generator)
            key = PushKey(
                term=self.term,
                worker=0,
                incarnation=1,
                step=self.version,
                bucket=bucket.index,
                version=self.version,
                attempt=0,
            )
            self.leader.shard.push(key, 1, PLAIN, Body(values))
        apply = Application(0, [(0, 1, self.version)], 1, ADAM)
        self.version += 1
        return Advance(self.version, 0, {0: 1}, apply, term=self.term, state="{}")

    def told(self) -> None:
        """The standby is told of the model."""
        self.gate.set()
        eventually(lambda: self.follower.state is not StandbyState.AWAY, "the standby is told of the model")

    @property
    def follows(self) -> bool:
        """Whether the standby has every round, as far as the shard knows."""
        return self.follower.state is StandbyState.WHOLE

    def close(self) -> None:
        self.gate.set()
        self.leader.close()
        self._listener.close()
        self.standby.close()


def layout(*, megabytes: int = 0) -> Layout:
    """Four buckets that are trained, or eight of a larger model, and one that is not."""
    elements, bucket = (megabytes * MIB // 4 // 16, megabytes * MIB // 8) if megabytes else (64, 256)
    trained = [tensor(f"w{i}", elements) for i in range(16 if megabytes else 4)]
    constant = tensor("c", 4, rule=Rule.CONSTANT)
    cut = partition([*trained, constant], bucket_bytes=bucket, shards=1, smallest=256)
    assert len(cut.buckets) == (9 if megabytes else 5), cut.buckets
    return cut


a_bucket_a_round = pytest.mark.parametrize(
    "limits", [ServerLimits(slice=timedelta(seconds=-1))], ids=["a bucket a round"]
)
"""A standby that is catching up gets one bucket with each round."""


@pytest.fixture
def pair(limits: ServerLimits) -> Iterator[Pair]:
    made = Pair(layout(), limits=limits)
    yield made
    made.close()


def held() -> int:
    """Bytes of all tensors in this process."""
    kinds = ((each, type(each)) for each in gc.get_objects())
    tensors = [each for each, kind in kinds if issubclass(kind, torch.Tensor) and kind is not FakeTensor]
    storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@a_bucket_a_round
def test_what_both_hold_does_not_grow_with_the_rounds_that_a_standby_lacks(limits: ServerLimits) -> None:
    """The sums of up to sixteen rounds, each as large as the model, were kept for it."""
    model = 8 * MIB
    pair = Pair(layout(megabytes=8), limits=limits)
    try:
        pair.round()
        alone = held()
        for _ in range(4):
            pair.round()
        assert held() - alone < model // 8, "before it has been told of the model"
        pair.told()
        most = 0
        while pair.follower.state is not StandbyState.WHOLE:
            pair.round()
            most = max(most, held())
        own = 4 * model  # values, a sum, and Adam's two moments
        assert most - alone < own + model, "while it catches up"
    finally:
        pair.close()


def assert_same_bits(pair: Pair) -> None:
    """The standby carries out what it has got, and is what the shard is."""
    (order,) = [order for order in pair.standby.held(0) if order.version == pair.version]
    pair.standby.advance(for_standby(order))
    for index in range(len(pair.layout.buckets)):
        ours, theirs = pair.leader.shard.stored(index), pair.standby.shard.stored(index)
        for one, other in zip(ours, theirs, strict=True):
            assert one.name == other.name
            assert torch.equal(one.value, other.value)


@a_bucket_a_round
@pytest.mark.parametrize("before", [0, 3])
def test_it_has_the_shards_bits_when_it_has_caught_up(pair: Pair, before: int) -> None:
    for _ in range(before):
        pair.round()
    pair.told()
    for bucket in range(len(pair.layout.buckets)):
        assert pair.follower.state is (StandbyState.CATCHING_UP if bucket else StandbyState.READY)
        pair.round()
        assert len(list(pair.standby.shard.values())) == bucket + 1
    assert pair.follower.state is StandbyState.WHOLE
    pair.round()
    assert_same_bits(pair)


def test_training_continues_without_a_standby_that_fails_and_it_catches_up_again(pair: Pair) -> None:
    def fail() -> None:
        raise Refused(RefusalCode.NOT_READY, "out of memory")

    pair.told()
    pair.round()
    pair.before_sum = fail
    pair.round()
    assert pair.leader.shard.version == 2
    assert not pair.follows
    pair.before_sum = lambda: None
    pair.told()
    pair.round()
    pair.round()
    assert pair.follows
    assert_same_bits(pair)


def test_an_order_that_is_repeated_while_it_is_carried_out_waits_for_the_first(pair: Pair) -> None:
    """The optimizer's step changes the sums, which would be sent to the standby half changed."""
    sending, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        sending.set()
        assert go_on.wait(30)

    pair.told()
    pair.round()
    pair.before_sum = slowly
    order = pair.step()
    orders = [threading.Thread(target=pair.leader.advance, args=(order,)) for _ in range(2)]
    orders[0].start()
    assert sending.wait(10)
    orders[1].start()
    orders[1].join(0.5)
    assert pair.leader.shard.version == 1, "before the standby has the sums"
    go_on.set()
    for each in orders:
        each.join(10)
    assert pair.leader.shard.version == 2
    assert_same_bits(pair)


@a_bucket_a_round
def test_a_standby_that_is_catching_up_is_not_used(pair: Pair) -> None:
    """It would write a checkpoint of a model of which it has a part."""
    pair.told()
    pair.round()
    pair.round()
    assert pair.standby.held(0) == []
    with pytest.raises(Refused, match="still catching up") as refused:
        pair.standby.advance(Advance(2, 0, {}, Application(0, [(0, 0, 0)], 1, ADAM), term=1, checkpoint=1))
    assert refused.value.code is RefusalCode.NOT_READY
    assert pair.standby.shard.version == 1


@a_bucket_a_round
def test_a_shard_that_begins_anew_has_its_standby_begin_anew(pair: Pair) -> None:
    pair.told()
    pair.round()
    pair.configure(term=2)
    eventually(lambda: pair.standby.term == 2, "the standby is told of it")
    assert list(pair.standby.shard.values()) == []
    for _ in pair.layout.buckets:
        eventually(lambda: pair.follower.state is not StandbyState.AWAY, "it is there")
        pair.round()
    assert pair.follower.state is StandbyState.WHOLE


def test_a_small_shard_is_followed_from_the_next_round_on(pair: Pair) -> None:
    pair.told()
    pair.round()
    assert pair.follower.state is StandbyState.WHOLE


def test_a_shard_without_buckets_is_followed() -> None:
    """A small model has fewer buckets than its parameter server may have shards."""
    pair = Pair(Layout((), (), 1))
    try:
        pair.round()
        pair.told()
        for _ in range(2):
            pair.round()
            assert pair.follower.state is StandbyState.WHOLE
            assert [order.version for order in pair.standby.held(0)][-1] == pair.version
    finally:
        pair.close()


def part(**change: object) -> CopiedTensor:
    fields = {"tensor": 0, "start": 0, "key": "value", "dtype": "float32", "scalar": False, "last": True}
    return CopiedTensor(**{"bucket": 0, **fields, **change})  # type: ignore[arg-type]


@pytest.fixture
def empty() -> Iterator[Node]:
    """A standby that has been told of a model of one bucket, and of its version 3."""
    node = Node(0, 1, store=None, trace=Trace(None, ""))
    cut = one_bucket(tensor("w", 4), tensor("v", 2))
    node.configure(Configuration(cut, "SGD", ADAM, 1, None, follows=True))
    node.advance(Advance(3, 0, {}, term=1, next=Advance(4, 0, {}, Application(0, [], 1, ADAM), state="{}")))
    yield node
    node.close()


@pytest.mark.parametrize(
    ("change", "elements", "text"),
    [
        ({}, 3, "12 bytes of float32 as value of tensor 0 from element 0 on; the piece of bucket 0 has 4"),
        ({"start": 1}, 4, "the piece of bucket 0 has 0 elements"),
        ({"tensor": 2}, 4, "the piece of bucket 0 has 0 elements"),
        ({"dtype": "float64"}, 2, "8 bytes of float64"),
        ({"dtype": "int32"}, 4, "16 bytes of int32"),
        ({"dtype": "text"}, 4, "16 bytes of text"),
        ({"scalar": True}, 1, "4 bytes of float32 as value"),
        ({"key": "step", "dtype": "float64", "scalar": True}, 3, "12 bytes of float64 as step"),
        ({}, 4, "the values of 1 pieces have not come"),
        ({"bucket": 7}, 4, "bucket 7 is not on shard 0"),
    ],
)
def test_state_that_is_not_the_buckets_is_refused(
    empty: Node, change: dict[str, object], elements: int, text: str
) -> None:
    with pytest.raises(Refused, match=text) as refused:
        empty.take_state(1, part(**change), Body(torch.ones(elements)))
    assert refused.value.code is RefusalCode.MALFORMED
    assert list(empty.shard.values()) == []


def test_state_is_taken_once(empty: Node) -> None:
    empty.take_state(1, part(last=False), Body(torch.ones(4)))
    empty.take_state(1, part(tensor=1), Body(torch.ones(2)))
    assert not empty.shard.whole
    rows = pb.RowsRequest(term=1, what=pb.RowsRequest.WHOLE, version=3)
    empty.take_rows(rows, Body(torch.empty(0)), OrderId("leader", 1))
    assert empty.shard.whole
    with pytest.raises(Refused, match="does not wait for the state of bucket 0") as refused:
        empty.take_state(1, part(), Body(torch.zeros(4)))
    assert refused.value.code is RefusalCode.NOT_READY
    assert [float(values.sum()) for _, values in empty.shard.values()] == [6.0]


def test_a_newer_term_that_has_asked_gets_no_state_any_more(empty: Node) -> None:
    gate = threading.Event()
    body = Body(torch.ones(4), gate=gate)
    errors: list[Refused] = []

    def send() -> None:
        try:
            empty.take_state(1, part(last=False), body)
        except Refused as error:
            errors.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    assert body.started.wait(10)
    assert empty.held(2) == []
    gate.set()
    sending.join(10)
    assert [error.code for error in errors] == [RefusalCode.STALE_TERM]


def test_a_round_that_a_newer_parameter_server_has_not_got_is_not_applied(pair: Pair) -> None:
    """It has asked the standby for its rounds, and continues from them: this one would be shown and lost."""
    pair.told()
    pair.round()
    pair.standby.held(2)
    with pytest.raises(Refused, match="term 2 gives the orders now") as refused:
        pair.round()
    assert refused.value.code is RefusalCode.STALE_TERM
    assert pair.leader.shard.version == 1


def test_the_way_to_the_standby_ends_with_the_shard(pair: Pair) -> None:
    remote = RemoteShard("job", pair.connection)
    assert remote.held(1) == []
    pair.leader.close()
    with pytest.raises(ConnectionLost):
        remote.held(1)


def test_a_standby_that_is_not_there_is_asked_now_and_then() -> None:
    """Not all the time: that would take a core."""
    asked = 0

    class Nobody(RemoteShard):
        def configure(self, configuration: Configuration) -> None:
            nonlocal asked
            asked += 1
            raise ConnectionLost("nobody serves there")

    follower = Follower(Nobody("job", connect(InprocServer())), ServerLimits(probe=timedelta(hours=1)))
    model = Configuration(one_bucket(tensor("w", 4)), "SGD", ADAM, 1, None)
    try:
        for _ in range(3):
            follower.reset(model)
            eventually(lambda: asked > 0, "it is asked")
            threading.Event().wait(0.05)
        assert asked == 1
        assert follower.state is StandbyState.AWAY
    finally:
        follower.close()


@pytest.mark.parametrize("closes", [False, True])
def test_a_standby_is_told_of_the_newest_model_once_the_round_before_was_given(closes: bool) -> None:
    giving, go_on = threading.Event(), threading.Event()
    told: list[int] = []

    class Slow(RemoteShard):
        def configure(self, configuration: Configuration) -> None:
            told.append(configuration.term)

        def rows(self, request: pb.RowsRequest, data: memoryview, *, term: int) -> None:
            del request, data, term
            giving.set()
            assert go_on.wait(30)
            raise ConnectionLost("it has gone")

    follower = Follower(Slow("job", connect(InprocServer())), ServerLimits(probe=timedelta(0)))
    model = Configuration(one_bucket(tensor("w", 4)), "SGD", ADAM, 1, None)
    order = Advance(1, 0, {}, Application(0, (), 1, ADAM), term=1)
    shard = Shard(0, model, trace=Trace(None, ""))
    round_given = threading.Thread(target=follower.stage, args=(shard, order))
    closing = threading.Thread(target=follower.close)
    try:
        follower.reset(model)
        eventually(lambda: follower.state is not StandbyState.AWAY, "it knows of the model")
        round_given.start()
        assert giving.wait(10)
        for term in (2, 3):
            follower.reset(replace(model, term=term))
            threading.Event().wait(0.05)
        if closes:
            closing.start()
            threading.Event().wait(0.05)
        go_on.set()
        round_given.join(10)
        if not closes:
            eventually(lambda: len(told) > 1, "it is told again")
    finally:
        go_on.set()
        follower.close()
    assert told == ([1] if closes else [1, 3])
