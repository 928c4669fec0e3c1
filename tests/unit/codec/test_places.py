"""Which elements of a tensor are large, and which are not zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.codec.places import COUNTS, LOW, of_large, of_nonzero, packed, unpacked

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


@given(data=st.data(), elements=st.sampled_from([1, 2, 65535, 65536, 65537, 131072, 400_000]))
def test_places_come_back_as_they_were(data: st.DataObject, elements: int) -> None:
    edges = [place for place in (0, 65535, 65536, 65537, 131071, elements - 1) if place < elements]
    some = st.sampled_from(edges) | st.integers(0, elements - 1)
    places = torch.tensor(sorted(data.draw(st.lists(some, max_size=40))), dtype=torch.int64)
    parts = packed(places, elements)
    blocks = -(-elements // 65536)
    assert sum(part.nbytes for part in parts.values()) == 2 * len(places) + (4 * blocks if blocks > 1 else 0)
    found = unpacked(parts, elements)
    assert found.dtype is torch.int64
    assert torch.equal(found, places)


LOWS = torch.zeros(3, dtype=torch.int16)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({LOW: torch.zeros(3, dtype=torch.int32), COUNTS: [1, 2]}, "places of torch.int32"),
        ({LOW: LOWS, COUNTS: [3]}, "1 counts of torch.int32; expected 2"),
        ({LOW: LOWS, COUNTS: [1, 1, 1]}, "3 counts of torch.int32; expected 2"),
        ({LOW: LOWS, COUNTS: torch.tensor([1, 2])}, "2 counts of torch.int64; expected 2 of torch.int32"),
        ({LOW: LOWS, COUNTS: [4, -1]}, "have not 3 places"),
        ({LOW: LOWS, COUNTS: [1, 1]}, "have not 3 places"),
        ({LOW: LOWS, COUNTS: [2, 2]}, "have not 3 places"),
        ({LOW: LOWS, COUNTS: [2**31 - 1, 2**31 - 1]}, "have not 3 places"),
    ],
)
def test_places_that_cannot_be_are_refused(parts: dict[str, Any], words: str) -> None:
    parts = {
        name: torch.tensor(part, dtype=torch.int32) if isinstance(part, list) else part
        for name, part in parts.items()
    }
    with pytest.raises(ValueError, match=words):
        unpacked(parts, 65537)
