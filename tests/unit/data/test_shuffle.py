"""The order of records is a permutation by formula."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.data.shuffle import MOST_RECORDS, Shuffled, permutation


@pytest.mark.parametrize("records", [*range(40), 97, 100, 256, 257, 1000, 1024, 4095, 4097, 65537, 70_001])
def test_every_record_has_one_position(records: int) -> None:
    order = Shuffled(records, seed=5, epoch=1)
    assert len(order) == records
    assert sorted(order) == list(range(records))


@given(st.integers(0, MOST_RECORDS), st.integers(0), st.integers(0, 1000), st.data())
def test_any_part_is_computed_by_itself(records: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = Shuffled(records, seed=seed, epoch=epoch)
    start = data.draw(st.integers(0, records))
    part = order[start : start + 20]
    assert part == [order[start + i] for i in range(len(part))]
    assert len(part) == min(20, records - start)
    assert len(set(part)) == len(part)
    assert all(0 <= index < records for index in part)
    assert order[start : start + 20 : 3] == part[::3]


def test_positions_count_as_those_of_a_list() -> None:
    order = Shuffled(10, seed=0, epoch=0)
    whole = list(order)
    assert order[-1] == whole[-1]
    assert order[::-1] == whole[::-1]
    assert order[7:99] == whole[7:]
    for position in (10, -11):
        with pytest.raises(IndexError):
            order[position]
    with pytest.raises(ValueError, match="expected 0 to"):
        Shuffled(MOST_RECORDS + 1, seed=0, epoch=0)


def test_the_default_device_is_not_for_the_order() -> None:
    """`meta` stands in for a GPU: its tensors have no values."""
    with torch.device("meta"):
        order = Shuffled(10, seed=0, epoch=0)
        assert sorted([order[0], *order[1:5], *order[:4:-1]]) == list(range(10))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(Shuffled(50, seed=s, epoch=e)) for s in range(20) for e in range(20)}
    assert len(orders) == 400
    assert permutation(5, 3, shuffle=False, seed=1)[1:4] == range(1, 4)
    assert list(permutation(50, 3, shuffle=True, seed=1)) == list(Shuffled(50, seed=1, epoch=3))


@pytest.mark.parametrize("records", [2, 3, 4])
def test_all_permutations_of_a_few_records_are_as_frequent(records: int) -> None:
    each = 40
    count = math.factorial(records)
    found = Counter(tuple(Shuffled(records, seed=seed, epoch=0)) for seed in range(each * count))
    assert len(found) == count
    assert max(found.values()) < each + 6 * math.sqrt(each)
    assert min(found.values()) > each - 6 * math.sqrt(each)


@pytest.mark.parametrize("records", [7, 16, 30])
def test_a_record_comes_anywhere_and_after_any_other(records: int) -> None:
    """Chi-square of where records come; how many neighbours stay neighbours; how many pairs change places."""
    epochs = 1500
    orders = [list(Shuffled(records, seed=3, epoch=epoch)) for epoch in range(epochs)]
    found = Counter((position, index) for order in orders for position, index in enumerate(order))
    expected = epochs / records
    places = [(position, index) for position in range(records) for index in range(records)]
    chi_square = sum((found[place] - expected) ** 2 / expected for place in places)
    freedom = (records - 1) ** 2
    assert abs(chi_square - freedom) < 6 * math.sqrt(2 * freedom)
    neighbours = sum(abs(a - b) == 1 for order in orders for a, b in pairwise(order)) / epochs
    assert neighbours == pytest.approx(2 * (records - 1) / records, abs=0.25)
    swapped = sum(
        order[i] > order[j] for order in orders for i in range(records) for j in range(i + 1, records)
    )
    pairs = records * (records - 1) / 2
    assert swapped / epochs == pytest.approx(pairs / 2, rel=0.05)


def test_the_order_of_many_records_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        order = permutation(10**9, 0, shuffle=True, seed=0)
        assert len(set(order[5 * 10**8 : 5 * 10**8 + 256])) == 256
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
