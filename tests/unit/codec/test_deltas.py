"""Deltas: what a version changes, encoded once. Workers follow the parameter server's values with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.codec.base import Encoded, Sparse
from elastic_ps.codec.changes import Changed, FewChanges, difference, follow, make_delta
from elastic_ps.codec.optimizers import PULLED, VALUE
from elastic_ps.codec.plan import DELTAS, Plan, make
from elastic_ps.core.partition import Rule, partition
from elastic_ps.errors import Malformed
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.shard_service import answer_of
from elastic_ps.server.shards.pulls import Pull, Pulled
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.values import Drafts, Values
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.shard import TERM, Body, Rig, ones, tensor

LAYOUT = partition([tensor("w", 60, 10)], bucket_bytes=1 << 20, shards=1)
(BUCKET,) = LAYOUT.buckets
LOSSY = [name for name, codec in DELTAS.items() if not codec.lossless]


def plan(values: str = "int8", **more: Any) -> Plan:
    return Plan(Compression.model_validate({"values": values, **more}))


def numbers(seed: int, count: int = 600) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Server:
    """A shard, and what it sends of its bucket."""

    def __init__(self, used: Plan, **more: Any) -> None:
        self.rig = Rig(LAYOUT, workers=(0,), codecs=used, **more)

    def step(self, gradient: torch.Tensor) -> None:
        self.rig.push(0, gradient)
        self.rig.commit(0, samples=1)

    @property
    def exact(self) -> torch.Tensor:
        """What the optimizer steps."""
        return next(s.value for s in self.rig.shard.stored(0) if s.key == VALUE).clone()

    def pulled(self, held: int | None) -> Pulled:
        contributor = (0, self.rig.workers[0])
        (item,) = self.rig.shard.pull(
            Pull(
                buckets=[0],
                version=self.rig.version,
                term=TERM,
                contributor=contributor,
                held=held,
            )
        )
        assert isinstance(item, Pulled)
        return item

    def reply(self, item: Pulled) -> tuple[pb.PullReply, Body]:
        reply, body = answer_of(self.rig.shard, item)
        return reply, Body(torch.frombuffer(bytearray(body) or bytearray(1), dtype=torch.uint8))


class Worker:
    """Its model."""

    def __init__(self, used: Plan) -> None:
        self.traffic = Traffic()
        self.flat = Flat(LAYOUT, [torch.zeros(60, 10)])
        self.values = Values(self.flat, used, traffic=self.traffic, trace=Trace(None, ""))
        self.version: int | None = None

    @property
    def model(self) -> torch.Tensor:
        return self.flat.value_of(BUCKET)

    def pull(self, server: Server, *, held: int | None = None) -> pb.PullReply:
        reply, body = server.reply(server.pulled(self.version if held is None else held))
        if not reply.unchanged:
            self.values.receive(BUCKET, reply, body)
        self.version = reply.version
        return reply


def begun(used: Plan, **more: Any) -> tuple[Server, Worker]:
    """A worker that has version 0."""
    server, worker = Server(used, **more), Worker(used)
    server.rig.fill(0, numbers(0))
    assert not worker.pull(server).HasField("delta"), "it has nothing that could be changed"
    assert torch.equal(worker.model, server.exact)
    return server, worker


@pytest.mark.parametrize("lossless", ["none", "zstd", "blosc"])
@pytest.mark.parametrize("values", LOSSY)
def test_a_worker_follows_with_few_bytes_and_one_that_comes_later_has_the_same_bits(
    values: str, lossless: str
) -> None:
    """The optimizer steps exact values, as in one process without deltas."""
    used = plan(values, lossless=lossless)
    server, worker = begun(used)
    alone = torch.nn.Parameter(numbers(0))
    optimizer = torch.optim.SGD([alone], lr=1.0, fused=True)
    before = worker.traffic.counts()
    for step in range(6):
        alone.grad = numbers(step + 1)
        optimizer.step()
        server.step(numbers(step + 1))
        assert worker.pull(server).delta == step + 1
        assert torch.equal(server.exact, alone.detach())
        assert torch.equal(worker.model, server.rig.values())
    after = worker.traffic.counts()
    assert after.pulled_plain_bytes - before.pulled_plain_bytes == 6 * BUCKET.nbytes
    assert after.pulled_bytes - before.pulled_bytes < 6 * BUCKET.nbytes / 2.5
    late = Worker(used)
    assert not late.pull(server).HasField("delta")
    assert torch.equal(late.model, worker.model)
    server.step(numbers(9))
    for each in (worker, late):
        assert each.pull(server).HasField("delta")
    assert torch.equal(late.model, worker.model)


@pytest.mark.parametrize("values", LOSSY)
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_what_a_delta_loses_is_in_a_later_one(values: str, seed: int, scale: float) -> None:
    """When the values do not change any more, workers come ever nearer to them."""
    codec = plan(values, valuesOptions={"ratio": 0.1} if values == "topk" else {})
    used = codec.of_deltas(LAYOUT, BUCKET)
    assert used is not None
    exact, held = numbers(seed) * scale, torch.zeros(600)
    lost = [float((exact - held).norm())]
    for version in range(1, 60):
        make_delta(used, held, exact, bucket=0, since=version - 1, version=version)
        lost.append(float((exact - held).norm()))
    assert lost[59] < (0.1 if values == "signsgd" else 1e-2) * lost[0]


@pytest.mark.parametrize("lossless", ["none", "zstd", "blosc"])
def test_a_worker_gets_the_elements_that_have_changed_bit_for_bit(lossless: str) -> None:
    """Also where values become infinite, and where nothing changes at all."""
    used = plan("changed", lossless=lossless)
    server, worker = begun(used)
    before = worker.traffic.counts()
    for step, value in enumerate([1.0, 3e38, 3e38, 0.0]):
        gradient = torch.zeros(600)
        gradient[::40] = value
        server.step(gradient)
        assert worker.pull(server).delta == step + 1
        assert torch.equal(worker.model, server.exact)
    assert worker.model.isinf().sum() == 15
    after = worker.traffic.counts()
    assert (
        after.pulled_bytes - before.pulled_bytes < (after.pulled_plain_bytes - before.pulled_plain_bytes) / 5
    )
    assert {stored.key for stored in server.rig.shard.stored(0)} == {VALUE}, "nothing is kept twice"


@pytest.mark.parametrize(("lossless", "less"), [("none", False), ("zstd", True)])
def test_where_most_elements_change_their_bits_are_sent_if_that_saves_anything(
    lossless: str, less: bool
) -> None:
    """Zstandard finds the signs and exponents that are as they were."""
    server, worker = begun(plan("changed", lossless=lossless))
    server.step(numbers(1) * 1e-3)
    before = worker.traffic.counts().pulled_bytes
    assert worker.pull(server).HasField("delta") is less
    assert torch.equal(worker.model, server.exact)
    pulled = worker.traffic.counts().pulled_bytes - before
    assert (pulled < 0.8 * BUCKET.nbytes) is less


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    changes=st.dictionaries(st.integers(0, 39), st.integers(-(2**31), 2**31 - 1)),
)
def test_any_bits_become_any_others(bits: list[int], changes: dict[int, int]) -> None:
    codec = Changed()
    held = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    exact = held.clone()
    for place, value in changes.items():
        exact.view(torch.int32)[place % len(bits)] = value
    encoded = codec.encode(difference(codec, held, exact), {}, torch.Generator())
    change = torch.full_like(held, 7.0)
    codec.decode(encoded, change)
    follow(codec, held, change, held)
    assert torch.equal(held.view(torch.int32), exact.view(torch.int32))


@pytest.mark.parametrize(
    ("bits", "places", "words"),
    [
        (torch.zeros(3, dtype=torch.int32), None, "'bits' has 3 elements of torch.int32; expected 4"),
        (torch.zeros(4), None, "'bits' has 4 elements of torch.float32"),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([1], dtype=torch.int16),
            "'bits' has 2 .* expected 1",
        ),
        (
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([4], dtype=torch.int16),
            "places are 4 to 4; expected 0 to 3",
        ),
        (torch.zeros(1, dtype=torch.int32), torch.tensor([-1], dtype=torch.int16), "places are 65535"),
        (torch.zeros(1, dtype=torch.int32), torch.tensor([1]), "places of torch.int64"),
    ],
)
def test_changed_elements_that_do_not_fit_are_refused(
    bits: torch.Tensor, places: torch.Tensor | None, words: str
) -> None:
    tensors = {"bits": bits} if places is None else {"bits": bits, "low": places}
    with pytest.raises(ValueError, match=words):
        Changed().decode(Encoded(tensors), torch.zeros(4))


def test_a_job_that_sends_changed_elements_continues_from_exact_values() -> None:
    """Also from a checkpoint of one whose deltas have lost something."""

    class Source:
        def value(self, *_: int) -> torch.Tensor:
            return numbers(1)

        def state(self, *_: int) -> dict[str, torch.Tensor]:
            return {PULLED: numbers(2)}

    server = Server(plan("changed"))
    server.rig.shard.load(Source(), 3)
    assert torch.equal(server.rig.values(), numbers(1))


@pytest.mark.parametrize("lossless", ["none", "zstd"])
@pytest.mark.parametrize("values", ["topk", "changed"])
def test_of_a_draft_that_changes_few_elements_only_these_are_kept(values: str, lossless: str) -> None:
    """They are made when the draft stands, though the memory that they came in has been used again."""
    server, worker = begun(plan(values, lossless=lossless))
    ahead = Drafts()
    before, memory = worker.model.clone(), ahead.memory(BUCKET).fill_(5.0)
    gradient = torch.zeros(600)
    gradient[7] = 1.0
    server.step(gradient)
    reply, body = server.reply(server.pulled(0))
    ahead.keep(0, worker.values.receive(BUCKET, reply, body, into=memory))
    assert memory.eq(5.0).all()
    with suppress(Malformed):
        worker.values.receive(BUCKET, reply, Body(torch.zeros(body.size, dtype=torch.uint8)), into=memory)
    assert torch.equal(worker.model, before)
    assert not worker.values.has(BUCKET, reply.version)
    ahead.take(BUCKET, worker.model)
    worker.values.arrived(BUCKET, reply.version)
    assert worker.values.has(BUCKET, reply.version)
    assert torch.equal(worker.model, server.rig.values())
    assert int((worker.model != before).sum()) == 1


def test_a_draft_of_all_elements_takes_the_place_of_one_of_few() -> None:
    ahead, values = Drafts(), torch.zeros(600)
    ahead.keep(0, FewChanges(Changed(), Sparse(torch.tensor([1]), torch.ones(1))))
    ahead.memory(BUCKET).fill_(3.0)
    ahead.keep(0, None)
    ahead.take(BUCKET, values)
    assert values.eq(3.0).all()


@pytest.mark.parametrize("values", ["topk", "changed"])
def test_elements_that_a_version_does_not_change_keep_their_bits(values: str) -> None:
    """Also the sign of a zero. `topk` sends six elements, so zeros are among them."""
    codec = plan(values).of_deltas(LAYOUT, BUCKET)
    assert codec is not None
    exact = torch.full((600,), -0.0)
    held = exact.clone()
    exact[9] = 1.0
    assert make_delta(codec, held, exact, bucket=0, since=0, version=1) is not None
    assert int((held.view(torch.int32) != exact.view(torch.int32)).sum()) <= 5
    assert held[9] == 1.0


def test_a_worker_that_has_missed_a_version_gets_all_of_the_values() -> None:
    server, worker = begun(plan())
    for step in range(2):
        server.step(numbers(step + 1))
    assert not worker.pull(server).HasField("delta")
    assert torch.equal(worker.model, server.rig.values())


def test_a_version_that_changed_nothing_is_no_version_that_is_missed() -> None:
    server, worker = begun(plan())
    server.step(numbers(1))
    worker.pull(server)
    for _ in range(2):
        server.rig.push(0, torch.empty(0), present=(False,))
        server.rig.commit(0, samples=1)
    assert worker.pull(server).unchanged
    server.step(numbers(2))
    assert worker.pull(server, held=1).delta == 4
    assert torch.equal(worker.model, server.rig.values())


def test_a_delta_is_added_once() -> None:
    """A worker may have newer values of some buckets than the version that it names."""
    server, worker = begun(plan())
    server.step(numbers(1))
    for _ in range(3):
        assert worker.pull(server, held=0).delta == 1
        assert torch.equal(worker.model, server.rig.values())


@pytest.mark.parametrize("stands", [True, False])
def test_a_draft_is_a_delta_of_the_version_before(stands: bool) -> None:
    server, worker = begun(plan())
    server.step(numbers(1))
    worker.pull(server)
    before = worker.model.clone()
    server.rig.push(0, numbers(2))
    items = ahead(server)
    draft = next(items)
    assert draft.delta is not None
    memory = torch.empty(600)
    worker.values.receive(BUCKET, *server.reply(draft), into=memory)
    assert torch.equal(worker.model, before)
    if not stands:
        server.rig.restart(0)
        server.rig.push(0, numbers(3))
    server.rig.commit(0, samples=1)
    if stands:
        assert next(items).stands
        worker.model.copy_(memory)
        worker.values.arrived(BUCKET, 2)
    else:
        assert worker.pull(server).delta == 2
    assert torch.equal(worker.model, server.rig.values())
    server.step(numbers(4))
    assert worker.pull(server, held=2).delta == 3
    assert torch.equal(worker.model, server.rig.values())


def ahead(server: Server) -> Iterator[Any]:
    rig = server.rig
    return rig.shard.pull(
        Pull(
            buckets=[0],
            version=rig.version + 1,
            term=TERM,
            attempt=rig.attempt,
            contributor=(0, 10),
            held=rig.version,
            groups=rig.settings.groups,
        )
    )


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_values_that_no_delta_can_reach_are_sent_as_they_are(value: float) -> None:
    """So that a diverged model looks as it does without a codec."""
    used = plan().of_deltas(LAYOUT, BUCKET)
    assert used is not None
    held, exact = ones(600, -3e38), ones(600, value)
    assert make_delta(used, held, exact, bucket=0, since=0, version=1) is None
    assert torch.equal(held.view(torch.int32), exact.view(torch.int32))


def test_what_a_version_changes_warms_up_by_its_number() -> None:
    codec = make("topk", {"ratio": 0.01, "warmup": 100})
    assert codec is not None
    changed = []
    for version in (1, 50, 100):
        held = torch.zeros(1000)
        make_delta(codec, held, torch.arange(1.0, 1001), bucket=0, since=version - 1, version=version)
        changed.append(int(held.count_nonzero()))
    assert changed == [243, 50, 10]


def test_where_a_codec_saves_nothing_the_values_are_sent() -> None:
    used = plan("topk", valuesOptions={"ratio": 1.0}).of_deltas(LAYOUT, BUCKET)
    assert used is not None
    held, exact = torch.zeros(600), numbers(1)
    assert make_delta(used, held, exact, bucket=0, since=0, version=1) is None
    assert torch.equal(held, exact)


def test_what_workers_have_is_kept_beside_the_exact_values() -> None:
    """By whoever takes the state over: a checkpoint, or a standby. So the next deltas are the same."""
    server, worker = begun(plan())
    for step in range(3):
        server.step(numbers(step + 1))
        worker.pull(server)
    kept = {s.key: s.value.clone() for s in server.rig.shard.stored(0)}
    assert torch.equal(kept[PULLED], worker.model)
    assert not torch.equal(kept[PULLED], kept[VALUE])

    class Source:
        def value(self, *_: int) -> torch.Tensor:
            return kept[VALUE].clone()

        def state(self, *_: int) -> dict[str, torch.Tensor]:
            return {PULLED: kept[PULLED].clone()}

    second = Server(plan())
    second.rig.shard.load(Source(), 3)
    second.rig.shard.advance(3, 0, second.rig.workers, None)
    second.rig.version = 3
    assert torch.equal(second.rig.values(), worker.model)
    assert torch.equal(second.exact, server.exact)
    assert Worker(plan()).pull(second, held=3).unchanged
    other = Server(plan("none"))
    other.rig.shard.load(Source(), 3)
    assert torch.equal(other.rig.values(), kept[VALUE]), "a job without deltas continues with exact values"


def test_only_trained_float32_parameters_have_deltas() -> None:
    tensors = [
        tensor("w", 4),
        tensor("wide", 4, dtype="float64"),
        tensor("half", 4, dtype="bfloat16"),
        tensor("mean", 4, rule=Rule.MEAN),
        replace(tensor("w2", 4), frozen=True),
    ]
    layout = partition(tensors, bucket_bytes=1024, shards=1)
    having = [
        layout.tensors[bucket.pieces[0].tensor].name
        for bucket in layout.buckets
        if plan().of_deltas(layout, bucket) is not None
    ]
    assert having == ["w"]


def test_workers_that_do_not_wait_get_copies_or_deltas() -> None:
    server, worker = begun(
        plan(), consistency=Consistency.model_validate({"mode": "bounded", "maxStaleness": 2})
    )
    server.step(numbers(1))
    assert worker.pull(server).delta == 1
    assert torch.equal(worker.model, server.rig.values())


def test_a_worker_without_the_jobs_codec_refuses_a_delta() -> None:
    server, _ = begun(plan())
    stranger = Worker(plan("none"))
    stranger.pull(server)
    server.step(numbers(1))
    with pytest.raises(Malformed, match=r"shard 0 .* as 'int8'; .* 'none'.*spec\.compression"):
        stranger.pull(server)


def test_a_delta_of_what_a_worker_does_not_have_is_refused() -> None:
    server, _ = begun(plan())
    server.step(numbers(1))
    with pytest.raises(Malformed, match="of which this worker has no values"):
        Worker(plan()).pull(server, held=0)
