"""Values on their way to the workers: encoded once, the same for all, and refused if they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec import as_bytes
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import ConnectionLost, Malformed
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.shard_service import answer_of
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.shards.pulls import Pull, Pulled
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.values import Values
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.shard import Body, Rig

KINDS = {
    "weight": ("float32", Rule.GRADIENT, False),
    "base": ("float32", Rule.GRADIENT, True),
    "half": ("bfloat16", Rule.GRADIENT, False),
    "wide": ("float64", Rule.GRADIENT, False),
    "mean": ("float32", Rule.MEAN, False),
    "table": ("float32", Rule.CONSTANT, False),
}
TENSORS = tuple(
    TensorSpec(name, (4,), dtype, rule, 0 if rule is Rule.GRADIENT else -1, (), frozen)
    for name, (dtype, rule, frozen) in KINDS.items()
)
LAYOUT = Layout(
    TENSORS,
    tuple(Bucket(i, 0, t.dtype, t.rule, (Piece(i, 0, 4),)) for i, t in enumerate(TENSORS)),
    1,
)
BF16 = Plan(Compression(values="bf16"))
THIRDS = torch.tensor([1, 2, 4, 5]) / 3


def shard_of(codecs: Plan = BF16, limits: ServerLimits = USUAL) -> Rig:
    rig = Rig(LAYOUT, workers=(0,), codecs=codecs, limits=limits)
    for bucket in LAYOUT.buckets:
        rig.fill(bucket.index, THIRDS.to(getattr(torch, bucket.dtype)))
    return rig


def pulled(rig: Rig, bucket: int = 0, *, contributor: bool = True, held: int | None = None) -> Pulled:
    who = (0, rig.workers[0]) if contributor else None
    answers = rig.shard.pull(Pull(buckets=[bucket], version=rig.version, term=3, contributor=who, held=held))
    answer = next(iter(answers))
    assert isinstance(answer, Pulled)
    return answer


class Model:
    """A worker's, that receives values."""

    def __init__(self, plan: Plan = BF16) -> None:
        self.tensors = [torch.zeros(4, dtype=getattr(torch, t.dtype)) for t in TENSORS]
        self.traffic = Traffic()
        self._values = Values(Flat(LAYOUT, self.tensors), plan, traffic=self.traffic, trace=Trace(None, ""))

    def receive(self, reply: pb.PullReply, body: Body) -> torch.Tensor:
        self._values.receive(LAYOUT.buckets[reply.bucket], reply, body)
        return self.tensors[reply.bucket]


def body_of(data: memoryview, **more: Any) -> Body:
    return Body(torch.frombuffer(bytearray(data), dtype=torch.uint8), **more)


def test_float32_values_that_are_trained_take_half_the_bytes() -> None:
    """All else arrives as it is; the parameter server's own values are not rounded."""
    rig, model = shard_of(), Model()
    for index, (name, (dtype, _, _)) in enumerate(KINDS.items()):
        reply, body = answer_of(rig.shard, pulled(rig, index))
        exact = THIRDS.to(getattr(torch, dtype))
        received = model.receive(reply, body_of(body))
        assert torch.equal(rig.values(index), exact)
        assert torch.equal(BF16.as_pulled(LAYOUT, LAYOUT.buckets[index], exact), received)
        if name == "weight":
            assert len(body) == exact.nbytes / 2
            assert torch.equal(received, exact.bfloat16().float())
        else:
            assert not reply.HasField("encoded")
            assert torch.equal(received, exact)
    counts = model.traffic.counts()
    assert counts.pulled_plain_bytes - counts.pulled_bytes == THIRDS.nbytes / 2
    assert counts.decode_seconds > 0


@pytest.mark.parametrize("contributor", [True, False])
def test_all_workers_get_what_was_encoded_once(contributor: bool) -> None:
    rig = shard_of()
    sent = [answer_of(rig.shard, pulled(rig, contributor=contributor))[1] for _ in range(3)]
    assert sent[0] is sent[1] is sent[2]
    before = bytes(sent[0])
    rig.push(0, torch.ones(4))
    for index in (1, 2, 3, 4):
        rig.push(0, torch.ones(4, dtype=getattr(torch, TENSORS[index].dtype)), bucket=index)
    rig.commit(0, samples=1)
    after, body = answer_of(rig.shard, pulled(rig, contributor=contributor))
    assert bytes(sent[0]) == before  # a worker that is slow to read still gets its version
    assert torch.equal(Model().receive(after, body_of(body)), (THIRDS - 1).bfloat16().float())
    same, body = answer_of(rig.shard, pulled(rig, contributor=contributor, held=1))
    assert (same.HasField("encoded"), len(body)) == (False, 0)


def test_what_is_made_while_the_values_may_change_is_for_nobody_else() -> None:
    """A worker that has lost its part may read values of two versions; it is refused at the end."""
    rig = shard_of(limits=ServerLimits(small_pull=0))
    torn = pulled(rig)
    copy = pulled(rig, contributor=False)
    as_of_now = torch.frombuffer(torn.data, dtype=torch.float32)
    as_of_now.fill_(7.0)
    answer_of(rig.shard, torn)
    reply, body = answer_of(rig.shard, copy)
    assert torch.equal(Model().receive(reply, body_of(body)), THIRDS.bfloat16().float())


@pytest.mark.parametrize(("server", "worker"), [("none", "bf16"), ("bf16", "none")])
def test_mixed_codecs_are_refused(server: Any, worker: Any) -> None:
    rig = shard_of(Plan(Compression(values=server)))
    reply, body = answer_of(rig.shard, pulled(rig))
    model = Model(Plan(Compression(values=worker)))
    with pytest.raises(Malformed, match=f"shard 0 .* as '{server}'; .* '{worker}'.*spec.compression"):
        model.receive(reply, body_of(body))
    assert not model.tensors[0].any()


@pytest.mark.parametrize(
    "part",
    [
        pb.Part(name="values", dtype="bfloat16", elements=3),
        pb.Part(name="values", dtype="bfloat16", elements=5),
        pb.Part(name="values", dtype="float16", elements=4),
        pb.Part(name="other", dtype="bfloat16", elements=4),
        pb.Part(name="values", dtype="object", elements=1),
    ],
)
def test_values_that_do_not_fit_are_refused(part: pb.Part) -> None:
    reply = pb.PullReply(bucket=0, encoded=pb.Run(codec="bf16", parts=[part]))
    with pytest.raises(Malformed, match="values of bucket 0 from shard 0 cannot be decoded"):
        Model().receive(reply, Body(torch.zeros(4, dtype=torch.bfloat16)))


def test_a_body_that_is_cut_off_is_asked_for_again() -> None:
    rig, model = shard_of(), Model()
    reply, body = answer_of(rig.shard, pulled(rig))
    with pytest.raises(ConnectionLost):
        model.receive(reply, body_of(body, cut_off=True))
    assert not model.tensors[0].any()
    assert torch.equal(model.receive(reply, body_of(body)), THIRDS.bfloat16().float())


def test_values_in_shared_memory_are_decoded_where_they_are() -> None:
    class Shared(Body):
        def view(self) -> memoryview:
            return as_bytes(THIRDS.bfloat16())

        def read_into(self, target: memoryview) -> None:
            raise AssertionError("copied")

    rig, model = shard_of(), Model()
    reply, _ = answer_of(rig.shard, pulled(rig))
    received = model.receive(reply, Shared(THIRDS.bfloat16()))
    assert torch.equal(received, THIRDS.bfloat16().float())
