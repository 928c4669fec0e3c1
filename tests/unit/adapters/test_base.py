"""What belongs to the base of a model."""

from __future__ import annotations

import torch

from elastic_ps.adapters.base import Base
from elastic_ps.core.partition import Rule
from elastic_ps.worker.model import ModelDescription


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


def test_a_digest_tells_values_of_any_dtype_apart() -> None:
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        contents = set()
        for value in (0, 1, 1):
            model = torch.nn.Module()
            model.register_buffer("values", torch.full((5, 3), value).to(dtype).t())
            (spec,) = Base(model, trained=(), besides=()).specs()
            contents.add(spec.content)
        assert len(contents) == 2, dtype
