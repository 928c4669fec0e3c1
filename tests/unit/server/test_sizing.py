"""The size of buckets: what is measured, what follows from it, and who is asked."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.api.compression import Compression
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.sizing import (
    BUCKET_SECONDS,
    CROWDED,
    LARGEST,
    NEAR,
    SHARE,
    SMALLEST,
    TURN,
    Link,
    bucket_bytes,
)
from elastic_ps.errors import Malformed
from elastic_ps.server.calls.members import PROBE
from elastic_ps.server.limits import ServerLimits
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Limits
from elastic_ps.transport.convert import layout_from_message
from elastic_ps.transport.measuring import BODIES, BODY_CALLS, EMPTY_CALLS, LONG, measure
from tests.testing.coordinator import SOON, AskedShardZero, Notes, waits
from tests.testing.service import Worker, environment, serving
from tests.unit.server.test_shard_zero import leading

KIB = 1024


@pytest.mark.parametrize(
    ("mbit", "seconds", "kib"),
    [
        (10, 0.0, 64),
        (100, 0.0, 64),
        (200, 0.0, 128),
        (1_000, 0.0, 640),
        (10_000, 0.0, 4096),
        (100_000, 0.0, 4096),
        (1_000, 0.0001, 640),  # a switch
        (1_000, 0.02, 1280),  # another city: two buckets fill the network until an answer comes
        (1_000, 0.1, 4096),
        (0, 0.0, 64),
    ],
)
def test_the_size_follows_from_the_network(mbit: float, seconds: float, kib: int) -> None:
    size, why = bucket_bytes(Link(mbit * 1e6 / 8, seconds))
    assert size == kib * KIB
    assert f"{mbit / 8:.1f} MB/s, an empty call takes {seconds * 1e3:.1f} ms" in why


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [
        ({}, 1, 1),
        ({"codec": "int8"}, 0.6, 0.65),
        ({"codec": "int8", "values": "int8"}, 0.25, 0.27),
        ({"codec": "bf16", "values": "bf16"}, 0.5, 0.5),
        ({"codec": "bf16", "values": "bf16", "lossless": "zstd"}, 0.3, 0.4),
        ({"codec": "topk", "options": {"warmup": 100}, "values": "topk"}, 0.01, 0.0105),
        ({"codec": "topk", "options": {"momentum": 0.9}, "values": "changed"}, 0.01, 0.013),
        ({"codec": "powersgd"}, 0.5, 0.52),
        ({"codec": "auto"}, 1, 1),
        ({"codec": "tests.unit.codec.test_codecs:Negative"}, 1, 1),
    ],
)
def test_what_codecs_leave_of_the_bytes_counts(
    compression: dict[str, Any], least: float, most: float
) -> None:
    sent = Plan(Compression.model_validate(compression)).sent
    assert least <= sent <= most
    link = Link(1.25e7, 0.02)
    size, why = bucket_bytes(link, sent=sent)
    assert abs(size - min(LARGEST, 125_000 / sent)) <= SMALLEST
    assert f"{sent:.0%} of the bytes" in why


@given(rate=st.floats(0, 1e300), seconds=st.floats(0, 1e300))
def test_the_size_is_within_bounds_and_costs_little(rate: float, seconds: float) -> None:
    size, _ = bucket_bytes(Link(rate, seconds))
    assert size % SMALLEST == 0
    assert SMALLEST <= size <= LARGEST
    if size < LARGEST:
        assert BUCKET_SECONDS * rate <= SHARE * size * (1 + 1e-9)


def network(rate: float, seconds: float, *, at_once: int = 0) -> Callable[[memoryview], float]:
    """Calls over a network that lets so many bytes pass without delay."""
    return lambda body: seconds + max(0, len(body) - at_once) / rate


@pytest.mark.parametrize("rate", [1e6, 12.5e6, 125e6, 1.25e9])
def test_the_rate_is_that_of_a_body_that_takes_long(rate: float) -> None:
    sent: list[int] = []

    def call(body: memoryview) -> float:
        sent.append(len(body))
        return network(rate, 0.001)(body)

    found = measure(call)
    assert found.rate == pytest.approx(rate)
    assert found.seconds == pytest.approx(0.001)
    bodies = sent[EMPTY_CALLS:]
    assert sent[:EMPTY_CALLS] == [0] * EMPTY_CALLS
    sizes = list(dict.fromkeys(bodies))
    assert bodies == [nbytes for nbytes in BODIES[: len(sizes)] for _ in range(BODY_CALLS)]
    assert all(nbytes / rate < LONG for nbytes in sizes[:-1])
    assert bodies[-1] / rate >= LONG or bodies[-1] == BODIES[-1]


@pytest.mark.parametrize("rate", [12.5e6, 1.25e9])
@pytest.mark.parametrize("late", range(EMPTY_CALLS + BODY_CALLS * len(BODIES)))
def test_one_call_that_comes_late_changes_nothing(rate: float, late: int) -> None:
    """Many processes start at the same time as the one that measures, and a call may open a connection."""
    calls = itertools.count()

    def call(body: memoryview) -> float:
        return network(rate, 0.001)(body) + (0.5 if next(calls) == late else 0.0)

    assert measure(call) == pytest.approx(Link(rate, 0.001))


def test_what_passes_at_once_and_a_clock_that_stands_still_do_no_harm() -> None:
    found = measure(network(12.5e6, 0.001, at_once=256 * KIB))
    assert 12.5e6 <= found.rate < 20e6
    assert bucket_bytes(found)[0] <= 128 * KIB
    assert bucket_bytes(measure(lambda _: 0.0))[0] == LARGEST


def test_a_tunnel_that_compresses_takes_as_long() -> None:
    found = measure(lambda body: 0.001 + len(zlib.compress(body, 1)) / 12.5e6)
    assert found.rate == pytest.approx(12.5e6, rel=0.01)


def test_bodies_are_not_larger_than_the_server_takes() -> None:
    assert max(BODIES) <= PROBE


# --- shard 0

TENSORS = (TensorSpec("w", (1024, 1024), "float32", Rule.GRADIENT, 0),)
LR = Settings(({"lr": 0.1},))
SLOW = Link(12.5e6, 0.0)


@contextmanager
def choosing(**server: Any) -> Iterator[AskedShardZero]:
    with leading([Notes()], parameterServer=server) as zero:
        yield zero


def joining(zero: AskedShardZero, worker: int = 0, *, settings: Settings = LR, **said: Any) -> pb.JoinReply:
    join = zero.coordinator.join
    return join(worker, pid=1, host="here", tensors=TENSORS, optimizer="SGD", settings=settings, **said)


def sizes(joined: pb.JoinReply) -> set[int]:
    assert not joined.pending
    return {bucket.nbytes for bucket in layout_from_message(joined.layout).buckets}


def test_the_first_worker_measures_and_the_others_are_not_asked() -> None:
    with choosing() as zero:
        assert joining(zero, measures=True).measure
        assert zero.status().bucket_bytes == 0
        first = joining(zero, measures=True, link=SLOW)
        assert sizes(first) == {64 * KIB}
        assert zero.status().bucket_bytes == 64 * KIB
        assert not first.pending
        zero.coordinator.initialised(0, first.incarnation)
        assert sizes(joining(zero, 1, measures=True)) == {64 * KIB}


def test_buckets_are_large_where_nothing_goes_on_beside_backward() -> None:
    """Not if bodies go through a network, where they travel without a core."""
    found = {
        (link, crowded): bucket_bytes(link, crowded=crowded)[0]
        for link in (NEAR, SLOW)
        for crowded in (False, True)
    }
    assert found == {
        (NEAR, False): LARGEST,
        (NEAR, True): CROWDED,
        (SLOW, False): 64 * KIB,
        (SLOW, True): 64 * KIB,
    }


def test_a_job_on_a_crowded_host_gets_few_buckets() -> None:
    wide = (TensorSpec("w", (6 * 1024, 1024), "float32", Rule.GRADIENT, 0),)
    join: dict[str, Any] = {"pid": 1, "host": "here", "tensors": wide, "optimizer": "SGD", "settings": LR}
    with leading([Notes()], crowded=True) as zero:
        joined = zero.coordinator.join(0, **join, measures=True, link=NEAR)
        assert sizes(joined) == {24 * 1024 * KIB}
        assert joined.crowded
        assert zero.status().bucket_bytes == CROWDED
    with leading([Notes()], crowded=True, parameterServer={"overlap": "always"}) as zero:
        joined = zero.coordinator.join(0, **join, measures=True, link=NEAR)
        assert len(sizes(joined)) == 1
        assert max(sizes(joined)) <= LARGEST
        assert not joined.crowded


def test_one_worker_measures_at_a_time() -> None:
    """Else each finds what its share of shard 0's link is like."""
    now = 100.0
    with leading([Notes()], clock=lambda: now, limits=SOON) as zero:
        assert joining(zero, 0, measures=True).measure
        assert waits(joining(zero, 1, measures=True))
        assert joining(zero, 0, measures=True).measure, "its answer was lost, or its process"
        now += TURN
        assert joining(zero, 1, measures=True).measure, "nobody has heard from the other one"
        assert waits(joining(zero, 0, measures=True))
        assert sizes(joining(zero, 0, measures=True, link=SLOW)) == {64 * KIB}, "it has measured, though late"


def test_another_one_measures_at_once_if_the_first_is_lost_while_it_brings_the_model() -> None:
    with leading([Notes()], clock=lambda: 100.0) as zero:
        assert joining(zero, 0, measures=True).measure
        assert not joining(zero, 0, measures=True, link=SLOW).pending
        zero.coordinator.gone(0, "")
        assert joining(zero, 1, measures=True).measure


def test_a_worker_that_waits_for_another_ones_measurement_gets_the_model_at_once() -> None:
    limits = ServerLimits(answer=timedelta(minutes=2))
    with leading([Notes()], clock=lambda: 0.0, limits=limits) as zero, ThreadPoolExecutor() as pool:
        assert joining(zero, 0, measures=True).measure
        other = pool.submit(joining, zero, 1, measures=True)
        first = joining(zero, 0, measures=True, link=SLOW)
        if not first.pending:  # else the other one was admitted first, and brings the model
            zero.coordinator.initialised(0, first.incarnation)
        joined = other.result(timeout=60)
        assert sizes(joined) == {64 * KIB}
        assert joined.initialise == first.pending


def test_a_worker_that_cannot_measure_gets_buckets_of_the_usual_size() -> None:
    with choosing() as zero:
        assert sizes(joining(zero)) == {512 * KIB}, "an eighth of the model"
        assert zero.status().bucket_bytes == 0


def test_a_size_that_is_given_stays() -> None:
    with choosing(bucketBytes=256 * KIB) as zero:
        assert sizes(joining(zero, measures=True, link=SLOW)) == {256 * KIB}
        assert zero.status().bucket_bytes == 0


def test_rows_whose_norm_is_limited_are_not_divided_by_a_size_that_is_chosen() -> None:
    wide = (TensorSpec("e", (8, 32 * KIB), "float32", Rule.GRADIENT, 0),)
    with choosing() as zero:
        joined = zero.coordinator.join(
            0,
            pid=1,
            host="here",
            tensors=wide,
            optimizer="SGD",
            settings=Settings(({"lr": 0.1, "max_norm": 1.0},)),
            measures=True,
            link=SLOW,
        )
        assert sizes(joined) == {256 * KIB}
        assert zero.status().bucket_bytes == 0


def test_a_tensor_that_is_not_cut_fits_into_a_body() -> None:
    """However large it is: an embedding of 150,000 words may have half a GB."""
    join: dict[str, Any] = {"pid": 1, "host": "here", "optimizer": "Adafactor", "settings": LR}
    wide = (TensorSpec("e", (1 << 26, 32), "float32", Rule.GRADIENT, 0),)
    with choosing() as zero:
        (size,) = sizes(zero.coordinator.join(0, **join, tensors=wide))
    assert size == 1 << 33
    assert size <= Limits().body_bytes


def test_what_is_no_network_and_a_body_that_is_too_large_are_refused() -> None:
    with serving(environment()) as (listener, _):
        worker = Worker(listener)
        probe = pb.ProbeRequest(caller=worker.caller())
        worker.ask(probe)
        worker.ask(probe, torch.zeros(PROBE // 4))
        with pytest.raises(Malformed, match="the limit is 4194304"):
            worker.ask(probe, torch.zeros(PROBE // 4 + 1))
        for rate, seconds in ((math.nan, 0.0), (-1.0, 0.0), (math.inf, 0.0), (1.0, -1.0)):
            link = pb.Link(rate=rate, seconds=seconds)
            with pytest.raises(Malformed, match="are impossible"):
                worker.ask(pb.JoinRequest(caller=worker.caller(), link=link))


def spec_of(**said: Any) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate({"entrypoint": "train:main", **said})


@pytest.mark.parametrize(
    ("said", "chooses"),
    [
        ({}, True),
        ({"parameterServer": {"bucketBytes": 0}}, True),
        ({"parameterServer": {"bucketBytes": 4 * 1024 * KIB}}, False),
        ({"consistency": {"deterministic": True}}, False),
        ({"strategy": "all-reduce"}, False),
        ({"compression": {"codec": "topk"}}, True),
        ({"compression": {"codec": "powersgd"}}, False),
        ({"compression": {"rules": [{"match": "*.weight", "codec": "powersgd"}]}}, False),
    ],
)
def test_the_size_is_chosen_unless_one_is_given_or_it_would_do_harm(
    said: dict[str, Any], chooses: bool
) -> None:
    assert spec_of(**said).chooses_buckets == chooses


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"parameterServer": {"bucketBytes": 512}}, "bucketBytes is 512; expected at least 1024, or 0"),
        ({"parameterServer": {"bucketBytes": -1}}, "greater than or equal to 0"),
    ],
)
def test_what_means_nothing_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec_of(**spec)
