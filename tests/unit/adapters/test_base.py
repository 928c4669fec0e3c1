"""What belongs to the base of a model."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ps.adapters.base import Base
from elastic_ps.core.partition import Rule
from elastic_ps.worker.model.description import ModelDescription


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.frozen.register_buffer("scales", torch.ones(4))
        self.packed = torch.nn.Module()
        self.packed.register_buffer("weight", torch.ones(4, dtype=torch.int32))
        self.normal = torch.nn.BatchNorm1d(4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 1)
        self.head.register_buffer("seen", torch.zeros(1))


def described(model: torch.nn.Module) -> ModelDescription:
    return ModelDescription(model, torch.optim.SGD(model.parameters(), lr=0.1), base="external")


def test_what_no_optimizer_trains_is_in_the_base() -> None:
    """Also the buffers of quantised layers, but not statistics that a forward changes."""
    told = described(Model())
    outside = {spec.name for spec in told.every if spec.rule is Rule.EXTERNAL}
    frozen = {
        "frozen.weight",
        "frozen.bias",
        "frozen.scales",
        "packed.weight",
        "normal.weight",
        "normal.bias",
    }
    statistics = {"normal.running_mean", "normal.running_var", "normal.num_batches_tracked"}
    assert outside == frozen
    assert {spec.name for spec in told.specs} == {"head.weight", "head.bias", "head.seen", *statistics}
    evaluated = Model()
    evaluated.normal.eval()
    found = {spec.name for spec in described(evaluated).every if spec.rule is Rule.EXTERNAL}
    assert found == frozen | statistics


class Quantised(torch.nn.Linear):
    """It saves scales beside its packed weight, as a 4-bit layer of bitsandbytes does."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 4)
        self.weight = torch.nn.Parameter(torch.ones(8, 1, dtype=torch.uint8), requires_grad=False)
        self.bias.requires_grad_(False)
        self.scale = torch.full((4,), scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale


def test_what_a_frozen_parameter_saves_is_in_the_base() -> None:
    head = torch.nn.Linear(4, 1)
    layers = (Quantised(1.0), Quantised(2.0))
    one, other = (set(described(torch.nn.Sequential(layer, head)).every) for layer in layers)
    (spec,) = (spec for spec in one - other if spec.name != "0.bias")
    assert (spec.name, spec.rule) == ("0.weight.absmax", Rule.EXTERNAL)


def test_a_digest_tells_values_of_any_dtype_apart() -> None:
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        contents = set()
        for value in (0, 1, 1):
            model = torch.nn.Module()
            model.register_buffer("values", torch.full((5, 3), value).to(dtype).t())
            (spec,) = Base(model, trained=(), besides=()).specs()
            contents.add(spec.content)
        assert len(contents) == 2, dtype
