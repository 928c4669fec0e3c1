"""A worker encodes each step once, and what it leaves over belongs to steps that are in the model."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec.base import Codec, Encoded, Payload, Sparse
from elastic_ps.codec.builtin import SignSGD
from elastic_ps.codec.decoder import AT_A_TIME, Decoder
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.memory import as_bytes, as_tensor, dtype_of
from elastic_ps.codec.plan import BUILT_IN, Plan
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.worker.wire.measuring import Traffic
from tests.testing.defaults import defaults
from tests.testing.shard import arrived, body_of
from tests.unit.codec.test_codecs import Negative

TENSORS = tuple(TensorSpec(name, (4,), "float32", Rule.GRADIENT, 0) for name in ("weight", "bias"))
BUCKET = Bucket(0, 0, "float32", Rule.GRADIENT, tuple(Piece(tensor=i, start=0, length=4) for i in range(2)))
LAYOUT = Layout(TENSORS, (BUCKET,), 1)
LARGEST = {"codec": "topk", "options": {"ratio": 1 / 8}}


def plan(**compression: Any) -> Plan:
    return Plan(Compression.model_validate(compression or LARGEST))


class Worker:
    """Pushes, and a parameter server that decodes."""

    def __init__(self, used: Plan | None = None, *, server: Plan | None = None, **options: Any) -> None:
        used = used or plan()
        self.traffic = Traffic()
        self.encoder = Encoder(LAYOUT, used, worker=3, seed=0, traffic=self.traffic)
        self.decoder = Decoder(server or used, LAYOUT, **options)

    def push(
        self, values: Sequence[float], step: int, present: Sequence[bool] = (), version: int = 0
    ) -> tuple[list[float], Payload]:
        """What the shard gets, and what was sent."""
        gradient = torch.tensor(values)
        payload = self.encoder.encode(BUCKET, gradient, present, step=step, version=version)
        return self.decoded(payload), payload

    def decoded(self, payload: Payload) -> list[float]:
        return arrived(self.decoder, BUCKET, payload).tolist()


class FirstHalf(Codec):
    """Sends a part of what it gets, in the same memory."""

    feedback = True

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        return Encoded({"values": tensor[: len(tensor) // 2]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.zero_()
        out[: len(out) // 2] = encoded.tensors["values"]


def test_a_codec_may_send_the_memory_that_it_gets() -> None:
    worker = Worker(plan(codec="tests.unit.codec.test_encoder:FirstHalf"))
    for step in range(2):
        worker.encoder.begin(step)
        assert worker.push([1, 2, 3, 4, 5, 6, 7, 8], step)[0] == [1, 2, 3, 4, 0, 0, 0, 0]
        worker.encoder.applied()
    (rest,) = worker.encoder.left_over.values()
    assert rest.tolist() == [0, 0, 0, 0, 10, 12, 14, 16]


ALMOST_ONE = 1.0 + 2.0**-10
"""bfloat16 rounds it to 1."""


class OneElement(Codec):
    """Sends one element, in the memory that it gets; never a zero. On every second version it is another."""

    feedback, momentum = True, 0.5

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        place = 5 * (state["version"] % 2)
        own = tensor[place : place + 1]
        return Encoded({"value": own if own.item() else torch.full((1,), ALMOST_ONE)}, {"place": place})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.zero_()[encoded.values["place"]] = encoded.tensors["value"]

    def sparse(self, encoded: Encoded, elements: int) -> Sparse:
        return Sparse(torch.tensor([encoded.values["place"]]), encoded.tensors["value"])


@pytest.mark.parametrize(("dtype", "left"), [("float32", -ALMOST_ONE), ("bfloat16", -1.0)])
def test_a_codec_of_few_elements_may_send_the_memory_that_it_gets(dtype: str, left: float) -> None:
    """What the model's dtype rounds away of them is left over."""
    bucket = replace(BUCKET, dtype=dtype)
    layout, used = replace(LAYOUT, buckets=(bucket,)), plan(codec=f"{__name__}:OneElement")
    encoder, gradient = (
        Encoder(layout, used, worker=3, seed=0, traffic=Traffic()),
        torch.ones(8, dtype=dtype_of(dtype)),
    )
    for step, (first, arrives) in enumerate([(1.0, 1.0), (1.0, 1.0), (0.0, ALMOST_ONE)]):
        encoder.begin(step)
        gradient[0] = first
        payload = encoder.encode(bucket, gradient, (), step=step, version=2 * step)
        assert torch.frombuffer(payload.body, dtype=torch.float32).item() == arrives
        encoder.applied()
    assert encoder.left_over[0].tolist() == [left] + [1 + 1.5 + 1.75] * 7


class Keeping(OneElement):
    """Sends the element that it has sent in the step before, too."""

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        encoded = super().encode(tensor, state, random)
        before, state["before"] = state.get("before", torch.zeros(1)), tensor[:1]
        return Encoded({**encoded.tensors, "before": before}, encoded.values)


def test_a_codec_of_few_elements_may_keep_the_memory_that_it_gets() -> None:
    worker = Worker(plan(codec=f"{__name__}:Keeping"))
    for step, before in enumerate([0.0, 4.0]):
        worker.encoder.begin(step)
        _, payload = worker.push([4.0] + 7 * [0.0], step)
        assert torch.frombuffer(payload.body, dtype=torch.float32).tolist() == [4.0, before]
        worker.encoder.applied()


def test_what_is_not_sent_comes_with_the_next_step() -> None:
    worker = Worker()
    worker.encoder.begin(0)
    assert worker.push([5, 0, 0, 0, 0, 3, 0, 0], 0)[0] == [5, 0, 0, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    worker.encoder.begin(1)
    assert worker.push([1, 0, 0, 0, 0, 1, 0, 0], 1)[0] == [0, 0, 0, 0, 0, 4, 0, 0]
    worker.encoder.applied()
    worker.encoder.begin(2)
    assert worker.push([0.0] * 8, 2)[0] == [1, 0, 0, 0, 0, 0, 0, 0]


def test_what_is_sent_is_counted_also_if_it_is_sent_again() -> None:
    worker = Worker(plan(codec="bf16"))
    worker.encoder.begin(0)
    for _ in range(2):
        worker.push([1.0] * 8, 0)
    worker.encoder.begin(1)
    worker.push([math.nan] * 8, 1)  # it is sent as it is
    counts = worker.traffic.counts()
    assert (counts.pushed_bytes, counts.pushed_plain_bytes) == (16 + 16 + 32, 3 * 32)
    assert counts.encode_seconds > 0
    worker.traffic.reset()
    assert worker.traffic.counts() == pb.Traffic()


def test_a_step_is_encoded_once() -> None:
    """If the round starts again, the same bytes are sent, whatever the codec keeps or draws."""
    worker = Worker(plan(codec="int8"))
    worker.encoder.begin(0)
    gradient = torch.randn(8).tolist()
    first = worker.push(gradient, 0)[1]
    assert worker.push([0.0] * 8, 0)[1] is first
    worker.encoder.begin(1)
    assert worker.push([0.0] * 8, 1)[0] == [0.0] * 8


def test_each_step_draws_numbers_of_its_own() -> None:
    """Of several steps on one version, in mode accumulate, the errors would add up with the same numbers."""

    def bodies(*applied: bool, version: int = 7) -> list[bytes]:
        worker, made = Worker(plan(codec="int4")), []
        for step, counts in enumerate(applied):
            worker.encoder.begin(step)
            made.append(
                bytes(worker.push([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], step, version=version)[1].body)
            )
            if counts:
                worker.encoder.applied()
        return made

    first, second, third = bodies(True, True, True)
    assert len({first, second, third}) == 3
    assert bodies(False, False, True, True) == [first, first, first, second]  # computed again: the same
    assert bodies(True, version=8) != [first]


def test_a_version_that_is_made_once_more_in_a_new_term_draws_the_same_numbers() -> None:
    """Else a job with a fixed schedule had another result if its parameter server was lost."""
    worker, made = Worker(plan(codec="int4")), []
    for step, term in enumerate((1, 2, 2)):
        worker.encoder.begin(step, term)
        gradient = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
        made.append(bytes(worker.push(gradient, step, version=7)[1].body))
        worker.encoder.applied()
    assert made[0] == made[1] != made[2]


class Counted(Negative):
    """It notes which of its calls each is, by its state."""

    calls: ClassVar[list[int]] = []

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        encoded = super().encode(tensor, state, random)
        self.calls.append(state["calls"])
        return encoded


def test_a_step_that_is_not_made_changes_no_state() -> None:
    worker = Worker(plan(codec="tests.unit.codec.test_encoder:Counted"))
    Counted.calls.clear()
    for step, counts in enumerate([True, False, False, True, True]):
        worker.encoder.begin(step)
        worker.push([1.0] * 8, step)
        if counts:
            worker.encoder.applied()
    assert Counted.calls == [1, 2, 2, 2, 3]


def test_topk_warms_up_by_the_jobs_version() -> None:
    """Also in a worker that comes later, whose first step this is, and after `lossless`."""
    options = {"ratio": 1 / 64, "warmup": 4}
    for more in ({}, {"lossless": "zstd"}):
        worker, sent = Worker(plan(codec="topk", options=options, **more)), []
        for step, version in enumerate((0, 2, 4, 1000, 0)):
            worker.encoder.begin(step)
            sent.append(8 - worker.push([1.0, 2, 3, 4, 5, 6, 7, 8], step, version=version)[0].count(0))
        assert sent == [2, 1, 1, 1, 2]


def test_a_step_that_is_not_made_leaves_nothing_over() -> None:
    """Its records go to others; what was left over before stays."""
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([5, 0, 0, 0, 0, 3, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.begin(1)
    worker.push([9, 9, 9, 9, 9, 9, 9, 9], 1)
    worker.encoder.begin(2)
    assert worker.push([0.0] * 8, 2)[0] == [0, 0, 0, 0, 0, 3, 0, 0]


MOMENTUM = {"codec": "topk", "options": {"ratio": 1 / 8, "momentum": 0.5, "dtype": "float32"}}


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_momentum_is_that_of_deep_gradient_compression(lossless: str) -> None:
    """Algorithm 1 of Lin et al. 2018 with momentum factor masking. Steps that are void are not in it."""
    worker = Worker(plan(**MOMENTUM, lossless=lossless))
    random = torch.Generator().manual_seed(3)
    velocity, waiting = torch.zeros(8), torch.zeros(8)
    for step in range(40):
        gradient = torch.randn(8, generator=random)
        worker.encoder.begin(step)
        sent, _ = worker.push(gradient.tolist(), step, version=step)
        if step % 3 == 1:
            continue  # it is void
        worker.encoder.applied()
        velocity = 0.5 * velocity + gradient
        waiting += velocity
        place = int(waiting.abs().argmax())
        expected = torch.zeros(8)
        expected[place] = waiting[place]
        velocity[place] = waiting[place] = 0.0
        torch.testing.assert_close(torch.tensor(sent), expected)
        left = worker.encoder.left_over.get(0, torch.zeros(8))
        torch.testing.assert_close(left, waiting)


def test_the_momentum_of_a_step_that_becomes_void_is_taken_back() -> None:
    """It was in the sums of a round that starts again, so its records go to others."""
    worker = Worker(plan(**MOMENTUM))
    worker.encoder.begin(0)
    worker.push([8, 4, 0, 0, 0, 0, 0, 0], 0)
    worker.encoder.applied(in_sums=True)
    worker.encoder.settle(made=0, term=1, version=0)
    worker.encoder.begin(1, term=1)
    assert worker.push([0, 0, 1, 0, 0, 0, 0, 0], 1)[0] == [0, 0, 1, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    assert not worker.encoder.left_over[0].any()


def test_the_momentum_of_a_parameter_without_a_gradient_stays() -> None:
    worker = Worker(plan(**MOMENTUM))
    worker.encoder.begin(0)
    worker.push([8, 0, 0, 0, 0, 4, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.begin(1)
    assert worker.push([1, 0, 0, 0, 7, 7, 7, 7], 1, [True, False])[0] == [1, 0, 0, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    worker.encoder.begin(2)
    assert worker.push([0.0] * 8, 2)[0] == [0, 0, 0, 0, 0, 6, 0, 0], "4 and half of that"


class EverySecond(Codec):
    """Sends a sign of each element, also of zeros, on every second version."""

    feedback, momentum = True, 0.5

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        signs = torch.where(tensor < 0, -1.0, 1.0)
        return Encoded({"signs": signs * (state["version"] % 2)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(encoded.tensors["signs"])


@pytest.mark.parametrize("codec", [EverySecond, OneElement])
def test_the_momentum_of_a_parameter_without_a_gradient_stays_whatever_is_sent_of_it(
    codec: type[Codec],
) -> None:
    worker = Worker(plan(codec=f"{__name__}:{codec.__name__}"))
    for version, (gradient, present) in enumerate(
        [([0, 0, 0, 0, 0, 4, 0, 0], ()), ([0] * 8, [True, False]), ([0] * 8, ())]
    ):
        worker.encoder.begin(version)
        worker.push(torch.tensor(gradient, dtype=torch.float32).tolist(), version, present, version)
        worker.encoder.applied()
    assert worker.encoder.left_over[0][5] == 6, "4 and half of that"


def test_momentum_begins_anew_with_another_codec() -> None:
    """What waits does not."""
    worker = Worker(plan(**MOMENTUM))
    worker.encoder.begin(0)
    worker.push([8, 4, 0, 0, 0, 0, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.adopt(plan(**MOMENTUM))
    worker.encoder.begin(1)
    assert worker.push([0.0] * 8, 1)[0] == [0, 4, 0, 0, 0, 0, 0, 0]


def test_a_thread_that_is_late_changes_nothing() -> None:
    worker = Worker()
    worker.encoder.begin(1)
    worker.push([1, 2, 0, 0, 0, 0, 0, 0], 1)
    worker.push([0, 0, 7, 6, 0, 0, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.begin(2)
    assert worker.push([0.0] * 8, 2)[0] == [1, 0, 0, 0, 0, 0, 0, 0]


def test_a_parameter_without_a_gradient_waits() -> None:
    """What is left over of it is not sent while the parameter server would not step it."""
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([5, 0, 0, 0, 0, 3, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.begin(1)
    assert worker.push([1, 0, 0, 0, 0, 0, 0, 0], 1, [True, False])[0] == [1, 0, 0, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    worker.encoder.begin(2)
    assert worker.push([0.0] * 8, 2)[0] == [0, 0, 0, 0, 0, 3, 0, 0]


def test_the_same_step_gives_the_same_bytes_in_another_process() -> None:
    gradient = torch.randn(8).tolist()
    bodies = []
    for _ in range(2):
        worker = Worker(plan(codec="int4"))
        worker.encoder.begin(0)
        bodies.append(bytes(worker.push(gradient, 0, version=7)[1].body))
    others = set()
    for step in range(1, 9):  # two of them may happen to be alike
        worker.encoder.begin(step)
        others.add(bytes(worker.push(gradient, step, version=7 + step)[1].body))
    assert bodies[0] == bodies[1]
    assert len(others) > 1


def test_rules_leave_some_as_they_are() -> None:
    worker = Worker(plan(codec="topk", options={"ratio": 0.25}, rules=[{"match": "bias", "codec": "none"}]))
    worker.encoder.begin(0)
    values, payload = worker.push([1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert values == [0, 0, 0, 4, 5, 6, 7, 8]
    assert [run.codec for run in payload.runs] == ["topk version 2", "none"]


def refused(worker: Worker, payload: Payload) -> str:
    with pytest.raises(Refused) as refusal:
        worker.decoded(payload)
    assert refusal.value.code is RefusalCode.MALFORMED
    assert "worker 3" in str(refusal.value)
    return str(refusal.value)


def test_another_codec_than_the_jobs_is_refused() -> None:
    worker = Worker(plan(codec="bf16"), server=plan(codec="int8"))
    worker.encoder.begin(0)
    gradient = torch.ones(8)
    payload = worker.encoder.encode(BUCKET, gradient, (), step=0, version=0)
    assert "'bf16'" in refused(worker, payload)
    assert "same spec.compression" in refused(worker, payload)


@pytest.mark.parametrize("rules", [[], [{"match": "bias", "codec": "int8"}]], ids=["all", "of a rule"])
def test_a_gradient_without_a_codec_is_refused_where_the_job_has_one(rules: list[dict[str, str]]) -> None:
    job = plan(codec="none", rules=rules) if rules else plan(codec="int8")
    worker = Worker(plan(codec="none"), server=job)
    worker.encoder.begin(0)
    gradient = torch.ones(8)
    payload = worker.encoder.encode(BUCKET, gradient, (), step=0, version=0)
    said = refused(worker, payload)
    assert "codec 'none' (none)" in said
    assert "int8" in said
    assert "same spec.compression" in said


class Renewed(Codec):
    """A user's own, whose version says what it sends."""

    version = "1"

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        return Encoded({"all": tensor})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(encoded.tensors["all"])


def test_another_version_of_the_users_codec_is_refused() -> None:
    name = "tests.unit.codec.test_encoder:Renewed"
    Renewed.version = "1"
    older = plan(codec=name)
    Renewed.version = "2"
    worker = Worker(older, server=plan(codec="int8", rules=[{"match": "*", "codec": name}]))
    worker.encoder.begin(0)
    gradient = torch.ones(8)
    payload = worker.encoder.encode(BUCKET, gradient, (), step=0, version=0)
    said = refused(worker, payload)
    assert f"{name} version 1" in said
    assert f"{name} version 2" in said


def test_what_does_not_fit_is_refused_with_the_workers_name() -> None:
    worker = Worker()
    worker.encoder.begin(0)
    _, payload = worker.push([1.0] * 8, 0)
    [run] = payload.runs
    body = bytes(payload.body)
    for wrong in (
        Payload(memoryview(body + b"1234"), payload.codec, [run]),
        Payload(memoryview(body[:-1]), payload.codec, [run]),
        Payload(memoryview(body[:4] + b"\xff" * 4), payload.codec, [run]),
        Payload(memoryview(body), payload.codec, [run._replace(values="{")]),
        Payload(memoryview(body), payload.codec, [run._replace(parts=run.parts[:1])]),
        Payload(memoryview(body), payload.codec, [run, run]),
        Payload(memoryview(bytes(1 << 16)), payload.codec, [run]),
    ):
        refused(worker, wrong)


class Failing(Codec):
    """A user's own, with a mistake."""

    feedback = True

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        return Encoded({"all": [tensor][self._fails == "encode"]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_([encoded.tensors["all"]][self._fails == "decode"])


FAILING = "tests.unit.codec.test_encoder:Failing"


def failing(where: str) -> Plan:
    return plan(codec=FAILING, options={"fails": where})


@pytest.mark.parametrize("where", ["encode", "decode"])
def test_an_error_of_the_users_codec_names_it(where: str) -> None:
    worker = Worker(failing(where))
    worker.encoder.begin(0)
    with pytest.raises(IndexError) as error:
        worker.push([1.0] * 8, 0)
    assert any(FAILING in note for note in error.value.__notes__)


def test_an_error_in_decode_on_the_server_names_the_worker() -> None:
    worker = Worker(failing("never"), server=failing("decode"))
    worker.encoder.begin(0)
    gradient = torch.ones(8)
    payload = worker.encoder.encode(BUCKET, gradient, (), step=0, version=0)
    assert "IndexError" in refused(worker, payload)


def test_a_number_that_is_too_large_is_refused_with_the_workers_name() -> None:
    worker = Worker(plan(codec="fp16"))
    worker.encoder.begin(0)
    _, payload = worker.push([1.0] * 8, 0)
    [run] = payload.runs
    values = f'{{"scale": 1{"0" * 400}}}'
    refused(worker, Payload(payload.body, payload.codec, [run._replace(values=values)]))


@pytest.mark.parametrize("codec", sorted(BUILT_IN))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_arrives_as_it_is(codec: str, bad: float) -> None:
    """The parameter server refuses it by that, and later steps know nothing of it."""
    worker = Worker(plan(codec=codec))
    worker.encoder.begin(0)
    assert str(worker.push([1.0, bad] * 4, 0)[0]) == str([1.0, bad] * 4)
    worker.encoder.begin(1)
    assert all(math.isfinite(value) for value in worker.push([1.0] * 8, 1)[0])


@pytest.mark.parametrize("codec", sorted(BUILT_IN))
def test_what_float32_cannot_hold_arrives_as_it_is(codec: str) -> None:
    bucket = replace(BUCKET, dtype="float64")
    encoder = Encoder(
        replace(LAYOUT, buckets=(bucket,)), plan(codec=codec), worker=3, seed=0, traffic=Traffic()
    )
    gradient = torch.full((8,), 1e300, dtype=torch.float64)
    payload = encoder.encode(bucket, gradient, (), step=0, version=0)
    assert (payload.codec, bytes(payload.body)) == ("none", bytes(as_bytes(gradient)))


def test_what_a_half_precision_model_rounds_away_waits_too() -> None:
    """The mean magnitude of each step lies between two numbers of bfloat16."""
    bucket = replace(BUCKET, dtype="bfloat16")
    layout, used = replace(LAYOUT, buckets=(bucket,)), plan(codec="signsgd")
    encoder, decoder = Encoder(layout, used, worker=3, seed=0, traffic=Traffic()), Decoder(used, layout)
    gradient = torch.tensor([1.0, 1.0 + 2.0**-7] * 4, dtype=torch.bfloat16)
    sent, steps = torch.zeros(8, dtype=torch.float64), 800
    for step in range(steps):
        encoder.begin(step)
        payload = encoder.encode(bucket, gradient, (), step=step, version=step)
        sent += arrived(decoder, bucket, payload)
        encoder.applied()
    assert torch.allclose(sent, gradient.double() * steps, rtol=0, atol=2)


@pytest.mark.parametrize("codec", ["int8", "topk", "signsgd"])
def test_a_half_precision_script_may_set_that_dtype_as_default(codec: str) -> None:
    """Also in the parameter server's process, which imports the module of a codec of the user's own."""
    bucket, used = replace(BUCKET, dtype="bfloat16"), plan(codec=codec)
    layout = replace(LAYOUT, buckets=(bucket,))
    encoder, decoder = Encoder(layout, used, worker=3, seed=0, traffic=Traffic()), Decoder(used, layout)
    gradient = torch.ones(8, dtype=torch.bfloat16)
    with defaults(torch.bfloat16):
        encoder.begin(0)
        payload = encoder.encode(bucket, gradient, (), step=0, version=0)
        sent = arrived(decoder, bucket, payload)
        encoder.applied()
    left = encoder.left_over.get(bucket.index, torch.zeros(8))
    assert left.dtype is torch.float32
    assert torch.allclose(sent.float() + left, torch.ones(8), rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("dtype", "codec", "options"),
    [
        ("bfloat16", "topk", {"ratio": 1.0}),
        ("float16", "topk", {"ratio": 1.0}),
        ("float32", "int4", {"block": 1 << 14}),
        ("float32", "int8", {"block": 1 << 16}),
        ("float32", "signsgd", {"block": 1 << 20}),
        ("float64", "topk", {"ratio": 1.0}),
    ],
)
def test_what_a_codec_makes_is_never_too_long(dtype: str, codec: str, options: dict[str, Any]) -> None:
    elements = 1 << 12 if codec == "topk" else 8
    tensors = (TensorSpec("weight", (elements,), dtype, Rule.GRADIENT, 0),)
    bucket = Bucket(0, 0, dtype, Rule.GRADIENT, (Piece(tensor=0, start=0, length=elements),))
    layout, used = Layout(tensors, (bucket,), 1), plan(codec=codec, options=options)
    gradient = torch.ones(elements, dtype=dtype_of(dtype))
    if (
        codec == "signsgd"
    ):  # a sum or difference of all, and no other one: its sign and magnitude is all of it
        signs = SignSGD(**options)
        signs.decode(signs.encode(torch.ones(elements), {}, torch.Generator()), gradient)
    encoder = Encoder(layout, used, worker=3, seed=0, traffic=Traffic())
    payload = encoder.encode(bucket, gradient, (), step=0, version=0)
    assert torch.allclose(arrived(Decoder(used, layout), bucket, payload), gradient)


def test_pushes_that_wait_for_their_turn_keep_no_place_from_others() -> None:
    """With `deterministic` all but one of the workers may wait, and that one is decoded at once."""
    worker = Worker(patience=timedelta(0))
    worker.encoder.begin(0)
    expected, payload = worker.push([float(n) for n in range(8)], 0)
    waiting = [worker.decoder.open(BUCKET, payload, body_of(payload), worker=3) for _ in range(AT_A_TIME)]
    assert worker.decoded(payload) == expected
    assert None not in waiting


def test_no_more_than_some_are_decoded_at_a_time() -> None:
    worker = Worker(patience=timedelta(0))
    worker.encoder.begin(0)
    expected, payload = worker.push([float(n) for n in range(8)], 0)
    with ExitStack() as decoding:
        for _ in range(AT_A_TIME):
            opened = worker.decoder.open(BUCKET, payload, body_of(payload), worker=3)
            assert opened is not None
            decoding.enter_context(opened)
        with pytest.raises(Refused) as refusal:
            worker.decoded(payload)
        assert refusal.value.code is RefusalCode.NOT_READY
        decoding.close()
        assert worker.decoded(payload) == expected


def test_values_that_a_script_assigns_are_sent_as_they_are() -> None:
    worker = Worker()
    values = torch.arange(8.0)
    assert worker.decoded(Payload(as_bytes(values), plain=True)) == values.tolist()


class Slow(Codec):
    """A user's own, which takes its time with the first gradient, and counts in its state."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        state["steps"] = state.get("steps", 0) + 1
        if not self.began.is_set():
            self.began.set()
            assert self.may_end.wait(10)
        return Encoded({"all": tensor * state["steps"]})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(encoded.tensors["all"])


def test_two_threads_that_push_a_bucket_of_a_step_encode_it_once(threads: ThreadPoolExecutor) -> None:
    """The round starts again while the first is at it."""
    used = plan(codec="tests.unit.codec.test_encoder:Slow")
    (run,) = used.runs(LAYOUT, BUCKET)
    assert isinstance(run.codec, Slow)
    worker = Worker(used)
    worker.encoder.begin(0)
    first = threads.submit(worker.push, [1.0] * 8, 0)
    assert run.codec.began.wait(10)
    second = threads.submit(worker.push, [1.0] * 8, 0)
    assert not any_done_within(0.2, second)
    run.codec.may_end.set()
    assert first.result(10)[1] is second.result(10)[1]


def any_done_within(seconds: float, *futures: Future[Any]) -> bool:
    return bool(wait(futures, timeout=seconds).done)


def test_what_is_left_over_is_sent_with_another_codec() -> None:
    """Also without any: then the gradient, with what waits, is sent as it is. All of it arrives once."""
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([5, 1, 2, 3, 0, 4, 0, 0], 0)
    worker.encoder.applied()
    worker.encoder.adopt(plan(codec="none"))
    worker.decoder = Decoder(plan(codec="none"), LAYOUT)
    worker.encoder.begin(1)
    values, payload = worker.push([1.0] * 8, 1, [True, False], version=1)
    assert (payload.codec, values[:4]) == ("none", [1, 2, 3, 4])
    assert worker.push([9.0] * 8, 1, [True, False], version=1)[1] is payload, "it is encoded once"
    worker.encoder.applied()
    assert worker.encoder.left_over[0].tolist() == [0, 0, 0, 0, 0, 4, 0, 0], "the bias had no gradient"
    worker.encoder.begin(2)
    assert worker.push([1.0] * 8, 2, version=2)[0] == [1, 1, 1, 1, 1, 5, 1, 1]
    worker.encoder.applied()
    assert not worker.encoder.left_over
    worker.encoder.begin(3)
    gradient = torch.ones(8)
    body = worker.encoder.encode(BUCKET, gradient, (), step=3, version=3).body
    assert as_tensor(body).data_ptr() == gradient.data_ptr(), "it is not copied"


@pytest.mark.parametrize("codec", [*sorted(BUILT_IN), "auto"])
def test_each_codec_sends_what_another_one_has_left_over(codec: str) -> None:
    """On average, for those that draw numbers."""
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([8.0] + [7.0] * 7, 0)
    worker.encoder.applied()
    used = plan(codec=codec, **({"options": {"ratio": 1.0}} if codec == "topk" else {}))
    worker.encoder.adopt(used)
    worker.decoder = Decoder(used, LAYOUT)
    worker.encoder.begin(1)
    values, _ = worker.push([0.0] * 8, 1, version=1)
    worker.encoder.applied()
    rest = worker.encoder.left_over.get(0, torch.zeros(8))
    torch.testing.assert_close(torch.tensor(values) + rest, torch.tensor([0.0] + [7.0] * 7), atol=1.1, rtol=0)


@pytest.mark.parametrize(
    "later",
    [
        {"codec": "none"},
        {"codec": "none", "lossless": "zstd"},
        {"codec": "bf16"},
        {"codec": "auto"},
        {"codec": "int8"},
        {"codec": "topk", "options": {"ratio": 1.0}, "rules": [{"match": "bias", "codec": "none"}]},
    ],
)
def test_what_float16_cannot_hold_goes_on_waiting_with_another_codec(later: dict[str, Any]) -> None:
    """All of it arrives in the end, but for what the codec rounds away."""
    bucket = replace(BUCKET, dtype="float16")
    layout, used = replace(LAYOUT, buckets=(bucket,)), plan()
    encoder = Encoder(layout, used, worker=3, seed=0, traffic=Traffic())
    got = torch.zeros(8, dtype=torch.float64)
    for step in range(10):
        if step == 2:
            used = plan(**later)
            encoder.adopt(used)
        gradient = torch.full((8,), 60_000.0 if step < 3 else 0.0, dtype=torch.float16)
        encoder.begin(step)
        payload = encoder.encode(bucket, gradient, (), step=step, version=step)
        there = arrived(Decoder(used, layout), bucket, payload)
        assert bool(there.isfinite().all())
        got += there
        encoder.applied()
    torch.testing.assert_close(got, torch.full_like(got, 180_000.0), rtol=0.01, atol=0)
    assert not encoder.left_over.get(0, torch.zeros(8)).any()


def test_rules_that_change_move_nothing_of_what_is_left_over() -> None:
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([9, 1, 2, 3, 5, 6, 7, 8], 0)
    worker.encoder.applied()
    other = plan(codec="topk", options={"ratio": 0.25}, rules=[{"match": "bias", "codec": "none"}])
    worker.encoder.adopt(other)
    worker.decoder = Decoder(other, LAYOUT)
    worker.encoder.begin(1)
    assert worker.push([0.0] * 8, 1)[0] == [0, 0, 0, 3, 5, 6, 7, 8]


def test_a_step_in_the_sums_of_a_round_that_starts_again_leaves_nothing_over() -> None:
    """Of the step that is pushed again the same bytes are sent; they had some of that in them."""
    worker = Worker()
    worker.encoder.begin(0)
    worker.push([9, 5, 0, 0, 0, 0, 0, 0], 0)
    worker.encoder.applied(in_sums=True)
    worker.encoder.begin(1)
    gradient = torch.tensor([0.0, 1, 2, 0, 0, 0, 0, 0])
    payloads = [
        worker.encoder.encode(BUCKET, gradient, (), step=1, version=0, into=(0, attempt))
        for attempt in (0, 1)
    ]
    assert payloads[0] is payloads[1]
    assert worker.decoded(payloads[0]) == [0, 6, 0, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    assert worker.encoder.left_over[0].tolist() == [0, -5, 2, 0, 0, 0, 0, 0]
