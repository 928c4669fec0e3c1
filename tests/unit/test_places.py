"""Which elements of a tensor are large, and which are not zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.codec.places import of_large, of_nonzero

NUMBERS = st.lists(st.floats(width=32, allow_nan=False), max_size=30)


@given(numbers=NUMBERS, limit=st.floats(min_value=0.0, width=32, allow_infinity=False))
def test_those_of_at_least_that_magnitude_are_large(numbers: list[float], limit: float) -> None:
    tensor = torch.tensor([*numbers, limit, -limit], dtype=torch.float32)
    expected = (tensor.abs() >= limit).nonzero().view(-1)
    assert torch.equal(of_large(tensor, limit), expected)


@pytest.mark.parametrize("value", [1.0, -0.0, math.nan])
@given(places=st.sets(st.integers(0, 99)))
def test_less_than_half_that_are_not_zero_are_found(value: float, places: set[int]) -> None:
    tensor = torch.zeros(100)
    tensor[sorted(places)] = value
    bits = tensor.view(torch.int32)  # -0.0 is not zero there
    found = of_nonzero(bits)
    assert found is None if len(places) >= 50 else found is not None and found.tolist() == sorted(places)
