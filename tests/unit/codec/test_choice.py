"""The codec `auto`: what is chosen by which measurements, and what it may lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ps.api.compression import Compression
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec.auto import CANDIDATES, Auto
from elastic_ps.codec.base import Encoded
from elastic_ps.codec.plan import Plan
from elastic_ps.core.choice import AGAIN, MARGIN, SETTLED, TRIES, Choice, Tried, choose
from tests.unit.codec.test_encoder import Worker, plan

ERRORS = {"none": 0.0, "bf16": 0.002, "int8": 0.01, "int4": 0.2, "signsgd": 0.6, "topk": 0.95}
SHARES = {"none": 1.0, "bf16": 0.5, "int8": 0.26, "int4": 0.13, "signsgd": 0.05, "topk": 0.02}
ENCODE = {"none": 0.0, "bf16": 0.01, "int8": 0.05, "int4": 0.06, "signsgd": 0.05, "topk": 0.03}


@pytest.mark.parametrize(
    ("tried", "present", "most", "chosen", "why"),
    [
        ({"none": (1, 0), "int8": (0.5, 0.01)}, "none", 0.02, "int8", "int8 takes 0.5 s, none 1 s"),
        ({"none": (1, 0), "int8": (0.5, 0.01)}, "none", 0.001, "none", "none is the fastest"),
        ({"none": (1, 0), "int8": (0.9, 0.01)}, "none", 0.02, "none", "int8 is hardly faster than none"),
        ({"none": (1, 0), "int8": (1 - MARGIN, 0.01)}, "none", 0.02, "int8", "int8 takes 0.85 s"),
        ({"none": (0.9, 0), "int8": (1, 0.01)}, "int8", 0.02, "int8", "none is hardly faster than int8"),
        ({"none": (0.5, 0), "int8": (1, 0.01)}, "int8", 0.02, "none", "none takes 0.5 s, int8 1 s"),
        (
            {"none": (2, 0), "bf16": (1, 0.002), "topk": (0.1, 0.9)},
            "topk",
            0.1,
            "bf16",
            "topk loses more than 0.1",
        ),
        ({"none": (2, 0), "bf16": (1, 0.002), "topk": (0.1, 0.9)}, "none", 1.0, "topk", "topk takes 0.1 s"),
    ],
)
def test_the_fastest_that_loses_no_more_than_allowed(
    tried: Mapping[str, tuple[float, float]], present: str, most: float, chosen: str, why: str
) -> None:
    found, reason = choose({name: Tried(*each) for name, each in tried.items()}, present, most)
    assert found == chosen
    assert why in reason


def seconds(name: str, gbit: float, *, plain: float = 0.336) -> float:
    """Of a step that sends 42 MB in float32."""
    return ENCODE[name] + SHARES[name] * plain / gbit


def run(choice: Choice, steps: int, gbit: float) -> list[str]:
    used = []
    for _ in range(steps):
        used.append(choice.now)
        choice.note(seconds(choice.now, gbit), ERRORS[choice.now])
    return used


@pytest.mark.parametrize(
    ("gbit", "most", "chosen"),
    [
        (100, 0.02, "none"),
        (1, 0.02, "int8"),
        (1, 0.005, "bf16"),
        (1, 0.0, "none"),
        (1, 0.3, "int4"),
        (0.1, 1.0, "topk"),
        (20, 1.0, "none"),
    ],
)
def test_what_is_chosen_on_which_network(gbit: float, most: float, chosen: str) -> None:
    choice = Choice(tuple(CANDIDATES), most)
    used = run(choice, 60, gbit)
    assert choice.present == chosen
    assert set(used[TRIES * len(CANDIDATES) :]) == {chosen}
    assert all(used.count(name) == 1 for name in CANDIDATES if ERRORS[name] > most), "tried once"


def test_another_network_is_noticed_and_a_hiccup_is_not() -> None:
    choice = Choice(tuple(CANDIDATES), 0.02)
    run(choice, 60, 1)
    assert choice.present == "int8"
    assert set(run(choice, 1, 0.5)) | set(run(choice, 30, 1)) == {"int8"}
    run(choice, 60, 100)
    assert choice.present == "none"
    run(choice, 60, 1)
    assert choice.present == "int8"


def test_now_and_then_the_second_fastest_is_tried_again() -> None:
    choice = Choice(tuple(CANDIDATES), 0.02)
    run(choice, 60, 1)
    used = run(choice, AGAIN, 1)
    assert (used.count("int8"), used.count("bf16")) == (AGAIN - TRIES, TRIES)
    assert choice.present == "int8"


def test_one_that_begins_to_lose_too_much_is_left() -> None:
    choice = Choice(tuple(CANDIDATES), 0.02)
    run(choice, 60, 1)
    choice.note(seconds("int8", 1), 0.03)
    assert choice.present == "bf16"
    assert "int8 loses more than 0.02" in choice.reason
    assert SETTLED > 0


GRADIENTS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.005),
    "zero": lambda n, g: torch.zeros(n),
    "huge": lambda n, g: torch.randn(n, generator=g) * 1e30,
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-40,
}


CODEC = Auto(1.0)


@pytest.mark.parametrize("candidate", CANDIDATES)
@settings(max_examples=25)
@given(
    kind=st.sampled_from(list(GRADIENTS)),
    elements=st.integers(1, 3000),
    seed=st.integers(0, 1 << 30),
    most=st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.3, 0.7, 1.0]),
)
def test_no_tensor_is_sent_with_a_larger_error(
    candidate: str, kind: str, elements: int, seed: int, most: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    tensor = GRADIENTS[kind](elements, random)
    CODEC.max_error = most
    CODEC.begin(candidate)
    encoded = CODEC.encode(tensor, {}, random)
    decoded = torch.full_like(tensor, math.nan)
    CODEC.decode(encoded, decoded)
    lost, whole = (float(t.double().norm()) for t in (decoded.double() - tensor.double(), tensor))
    assert lost <= most * whole * (1 + 1e-6)
    names = list(CANDIDATES)
    assert names.index(encoded.values["auto"]) <= names.index(candidate)
    if whole:
        assert (CODEC.error <= most) == (encoded.values["auto"] == candidate)


def test_what_is_encoded_by_nothing_that_is_known_is_refused() -> None:
    for values in ({"auto": "powersgd"}, {"auto": ["int8"]}, {}):
        with pytest.raises((ValueError, TypeError)):
            Auto(1.0).decode(Encoded({"values": torch.zeros(4)}, values), torch.empty(4))


def test_what_one_codec_leaves_over_is_sent_by_the_next() -> None:
    used = plan(codec="auto", maxError=1.0)
    assert used.auto is not None
    worker = Worker(used)
    worker.encoder.begin(0)
    used.auto.begin("topk")
    gradient = [5.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert worker.push(gradient, 0)[0] == [5, 0, 0, 0, 0, 0, 0, 0]
    worker.encoder.applied()
    worker.encoder.begin(1)
    used.auto.begin("none")
    assert worker.push([1.0] * 8, 1)[0] == [1, 2, 3, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"compression": {"codec": "int8", "maxError": 0.1}}, "maxError 0.1 has no meaning with codec int8"),
        ({"compression": {"codec": "auto", "maxError": 1.5}}, "less than or equal to 1"),
        ({"compression": {"codec": "auto", "options": {"block": 8}}}, "auto takes no options; given"),
        ({"compression": {"rules": [{"match": "*", "codec": "auto"}]}}, "there is no codec 'auto'"),
        (
            {"compression": {"codec": "auto"}, "consistency": {"deterministic": True}},
            "auto cannot be combined with consistency.deterministic",
        ),
    ],
)
def test_what_means_nothing_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingJobSpec.model_validate({"entrypoint": "train:main", **spec})


def test_the_error_that_is_allowed_if_nothing_is_said() -> None:
    auto = Plan(Compression.model_validate({"codec": "auto"})).auto
    assert auto is not None
    assert auto.max_error == 0.02
