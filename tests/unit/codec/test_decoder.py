"""Gradients of which few elements are sent are added without being decoded, to the same sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec import decoder
from elastic_ps.codec.base import Codec, Encoded, Payload, Sparse
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.memory import dtype_of
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.shard import Rig, arrived, body_of

WEIGHT, BIAS = 2000, 20
BY_NAME = {"rules": [{"match": "bias", "codec": "none"}]}


def plan(**compression: Any) -> Plan:
    return Plan(Compression.model_validate(compression))


class Pushing:
    """Workers that encode, and the shard that they push to."""

    def __init__(self, codecs: Plan, *, workers: int = 3, dtype: str = "float32") -> None:
        tensors = [
            TensorSpec(name, (size,), dtype, Rule.GRADIENT, 0)
            for name, size in (("weight", WEIGHT), ("bias", BIAS))
        ]
        pieces = tuple(Piece(i, 0, t.elements) for i, t in enumerate(tensors))
        self.bucket = Bucket(0, 0, dtype, Rule.GRADIENT, pieces)
        self.layout = Layout(tuple(tensors), (self.bucket,), 1)
        self.rig = Rig(self.layout, workers=range(workers), codecs=codecs)
        self.decoder, self.auto = decoder.Decoder(codecs, self.layout), codecs.auto
        self.encoders = [
            Encoder(self.layout, codecs, worker=w, seed=0, traffic=Traffic()) for w in range(workers)
        ]

    def payload(self, worker: int, gradient: torch.Tensor, present: Sequence[bool] = ()) -> Payload:
        encoder, version = self.encoders[worker], self.rig.version
        encoder.begin(version)
        if self.auto is not None:
            self.auto.begin("topk")  # which it chooses after many steps
        return encoder.encode(self.bucket, gradient, present, step=version, version=version)

    def push(self, worker: int, payload: Payload, samples: int = 1) -> bool:
        key = self.rig.key(worker)
        return self.rig.shard.push(key, samples, payload, body_of(payload))

    def refused(self, worker: int, payload: Payload) -> Refused:
        """Refuses, and leaves the sum as it is."""
        before = self.sum
        with pytest.raises(Refused) as refusal:
            self.push(worker, payload)
        assert torch.equal(self.sum, before)
        assert f"worker {worker}" in str(refusal.value)
        return refusal.value

    def is_decoded(self, payload: Payload) -> bool:
        """Whether a shard decodes the gradient as a whole before it adds it."""
        opened = self.decoder.open(self.bucket, payload, body_of(payload), worker=0)
        assert opened is not None
        with opened as made:
            return isinstance(made, torch.Tensor) and len(made) == self.bucket.elements

    @property
    def sum(self) -> torch.Tensor:
        (found,) = self.rig.shard.sums()
        return found.sum.clone()


def gradients(count: int, seed: int = 0, dtype: str = "float32") -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(WEIGHT + BIAS, generator=random).to(dtype_of(dtype)) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "compression",
    [
        {"codec": "topk"},
        {"codec": "topk", **BY_NAME},
        {"codec": "topk", "rules": [{"match": "bias", "codec": "int8"}]},
        {"codec": "topk", "lossless": "zstd", **BY_NAME},
        {"codec": "topk", "lossless": "blosc"},
        {"codec": "auto", "maxError": 1},
    ],
    ids=["topk", "plain", "int8", "zstd", "blosc", "auto"],
)
def test_the_sum_is_that_of_the_decoded_gradients(compression: dict[str, Any], dtype: str) -> None:
    """Their mean, weighed by samples, for one round after the other."""
    pushing = Pushing(plan(**compression), dtype=dtype)
    for seed in (1, 2):
        expected = torch.zeros(WEIGHT + BIAS)
        for worker, gradient in enumerate(gradients(3, seed, dtype)):
            payload = pushing.payload(worker, gradient)
            assert pushing.push(worker, payload, samples=worker + 1)
            assert not pushing.push(worker, payload, samples=worker + 1)
            assert not pushing.is_decoded(payload)
            whole = whole_of(pushing, payload).to(torch.float32)
            assert 0 < int((whole != 0).sum()) <= 21 + BIAS
            expected += (worker + 1) * whole
            pushing.encoders[worker].applied()
        assert torch.allclose(pushing.sum, expected / 6, rtol=1e-5, atol=1e-6)
        pushing.rig.commit(0, 1, 2, samples=6)


def whole_of(pushing: Pushing, payload: Payload) -> torch.Tensor:
    """It is decoded, however few elements are sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "FEW", 1 << 40)
        return arrived(pushing.decoder, pushing.bucket, payload)


@pytest.mark.parametrize(
    "compression",
    [
        {"codec": "int8"},
        {"codec": "topk", "options": {"ratio": 0.2}},
        {"codec": "int8", "rules": [{"match": "bias", "codec": "topk"}]},
    ],
)
def test_what_is_not_sparse_is_decoded(compression: dict[str, Any]) -> None:
    pushing = Pushing(plan(**compression), workers=1)
    (gradient,) = gradients(1)
    payload = pushing.payload(0, gradient)
    pushing.push(0, payload)
    assert pushing.is_decoded(payload)
    assert torch.equal(pushing.sum, whole_of(pushing, payload))


class Own(Codec):
    """A user's own sparse codec, which says whatever it is told to."""

    said: Sparse

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        return Encoded({"first": tensor[:1]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        raise AssertionError("nothing is decoded")

    def sparse(self, encoded: Encoded, elements: int) -> Sparse:
        return self.said


def said(places: Any, values: Any, dtype: torch.dtype = torch.int64) -> Sparse:
    return Sparse(torch.tensor(places, dtype=dtype), torch.tensor(values))


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        (said([WEIGHT + BIAS], [1.0]), "places are 2020 to 2020; expected 0 to 2019"),
        (said([-1, 3], [1.0, 2.0]), "places are -1 to 3"),
        (said([1, 2], [1.0]), "(2,) places"),
        (said([[1, 2]], [[1.0, 2.0]]), "(1, 2) places"),
        (said([1], [1.0], torch.int32), "int32"),
    ],
)
def test_places_that_are_not_there_are_refused(sparse: Sparse, words: str) -> None:
    Own.said = sparse
    pushing = Pushing(plan(codec="tests.unit.codec.test_decoder:Own"), workers=2)
    Own.said = said([5], [2.0])
    pushing.push(0, pushing.payload(0, torch.ones(WEIGHT + BIAS)))
    Own.said = sparse
    refusal = pushing.refused(1, pushing.payload(1, torch.ones(WEIGHT + BIAS)))
    assert refusal.code is RefusalCode.MALFORMED
    assert words in str(refusal)


@pytest.mark.parametrize(
    ("places", "values"), [([3], [float("nan")]), ([3, 4], [1.0, float("inf")]), ([3, 3], [3e38, 3e38])]
)
def test_what_is_not_finite_or_overflows_is_refused(places: list[int], values: list[float]) -> None:
    pushing = Pushing(plan(codec="tests.unit.codec.test_decoder:Own"), workers=2)
    Own.said = said([3], [1.0])
    pushing.push(0, pushing.payload(0, torch.ones(WEIGHT + BIAS)))
    Own.said = said(places, values)
    refusal = pushing.refused(1, pushing.payload(1, torch.ones(WEIGHT + BIAS)))
    assert refusal.code is RefusalCode.NOT_FINITE


def test_a_place_that_is_there_twice_has_the_sum() -> None:
    pushing = Pushing(plan(codec="tests.unit.codec.test_decoder:Own"), workers=1)
    Own.said = said([7, 7, 9], [1.0, 2.0, 4.0])
    pushing.push(0, pushing.payload(0, torch.ones(WEIGHT + BIAS)), samples=2)
    expected = torch.zeros(WEIGHT + BIAS)
    expected[7], expected[9] = 3, 4
    assert torch.equal(pushing.sum, expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "compression",
    [
        {"codec": "signsgd"},
        {"codec": "signsgd", "lossless": "zstd"},
        {"codec": "int8"},
        {"codec": "topk", "options": {"ratio": 0.2}},
        {"codec": "topk"},
    ],
    ids=["signsgd", "zstd", "int8", "decoded", "sparse"],
)
def test_a_parameter_without_a_gradient_has_what_others_have_sent(
    compression: dict[str, Any], order: tuple[int, int]
) -> None:
    """Also where a codec makes something of its zeros, which share a block with a parameter that has one."""
    pushing = Pushing(plan(**compression), workers=2)
    mine, theirs = gradients(2)
    mine[WEIGHT:] = 0.0
    theirs[WEIGHT:] *= 10  # so that topk sends them
    payloads = [pushing.payload(0, mine, (True, False)), pushing.payload(1, theirs)]
    for worker in order:
        assert pushing.push(worker, payloads[worker])
    wholes = [whole_of(pushing, payload) for payload in payloads]
    assert wholes[0][:WEIGHT].any()
    assert wholes[1][WEIGHT:].any()
    assert torch.equal(2 * pushing.sum[WEIGHT:], wholes[1][WEIGHT:])


@pytest.mark.parametrize("absent", [0, 1])
def test_elements_of_a_parameter_without_a_gradient_are_not_added(absent: int) -> None:
    """Whatever a codec of the user's says of them."""
    pushing = Pushing(plan(codec="tests.unit.codec.test_decoder:Own"), workers=1)
    elements = said([0, WEIGHT - 1, WEIGHT, WEIGHT + BIAS - 1], [1.0, 2.0, 4.0, 8.0])
    Own.said = elements
    present = [index != absent for index in range(2)]
    pushing.push(0, pushing.payload(0, torch.ones(WEIGHT + BIAS), present))
    expected = torch.zeros(WEIGHT + BIAS)
    expected[elements.places] = elements.values
    expected[slice(WEIGHT) if absent == 0 else slice(WEIGHT, None)] = 0.0
    assert torch.equal(pushing.sum, expected)
