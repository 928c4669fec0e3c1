"""Whether there is NaN or Inf in what a worker has computed."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_ps.codec.finite import ALONE, is_finite, require_finite
from elastic_ps.errors import RefusalCode, Refused

SIZES = [1, ALONE, ALONE + 1]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_above_the_bound(size: int, dtype: torch.dtype) -> None:
    values = torch.zeros(size, dtype=dtype)
    values[size // 2] = -3.0
    assert 3.0 <= require_finite(values, "a gradient") < math.inf


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_refused(size: int, dtype: torch.dtype, value: float) -> None:
    values = torch.ones(size, dtype=dtype)
    values[size // 2] = value
    with pytest.raises(Refused, match=f"a gradient: 1 of {size} values") as refused:
        require_finite(values, "a gradient")
    assert refused.value.code is RefusalCode.NOT_FINITE


@pytest.mark.parametrize("size", SIZES)
def test_values_whose_squares_overflow_are_finite(size: int) -> None:
    assert require_finite(torch.full((size,), 1e30), "a gradient") >= 1e30


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_are_finite_and_inf_and_nan_are_not(size: int, dtype: torch.dtype) -> None:
    values = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(values)
    for value in (math.nan, math.inf, -math.inf):
        values[size // 2] = value
        assert not is_finite(values)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.ones(size, dtype=torch.int64))
