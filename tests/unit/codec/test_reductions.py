"""Contributions of several processes become one, with the precision and the bits that they should have."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ps.codec.reductions import REDUCTIONS
from elastic_ps.core.partition import Rule


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    exact = torch.stack(parts).double().mean(0)
    own, *others = (part.clone() for part in parts)
    REDUCTIONS[Rule.GRADIENT].join(own, 0.25, [(other, 0.25) for other in others])
    assert own.dtype is dtype
    bound = (1 if dtype is torch.bfloat16 else 4) * torch.finfo(dtype).eps
    assert float((own.double() - exact).abs().max()) <= bound


@pytest.mark.parametrize("rule", REDUCTIONS)
def test_what_has_no_weight_is_not_looked_at(rule: Rule) -> None:
    own, other = torch.ones(3), torch.full((3,), math.nan)
    REDUCTIONS[rule].join(own, 1.0, [(other, 0.0)])
    assert own.tolist() == [1, 1, 1]


def test_equal_buffers_stay_as_they_are_to_the_bit() -> None:
    values = torch.rand(1000) * 1e3
    values[:2] = torch.tensor([math.inf, -math.inf])  # as a mask of attention has it
    own = values.clone()
    REDUCTIONS[Rule.MEAN].join(own, 0.4, [(values, 0.3), (values, 0.3)])
    assert torch.equal(own, values)


def test_what_has_no_weight_may_be_no_number() -> None:
    own = torch.tensor([math.nan, math.inf])
    REDUCTIONS[Rule.GRADIENT].join(own, 0.0, [(torch.tensor([1.0, 2.0]), 1.0), (own.clone(), 0.0)])
    assert torch.equal(own, torch.tensor([1.0, 2.0]))
