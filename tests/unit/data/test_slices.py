"""How the processes of a worker share batches."""

from __future__ import annotations

import pytest

from elastic_ps.core.ledger import Range
from elastic_ps.data.batches import Batches, Slices, slice_sizes


@pytest.mark.parametrize(("records", "processes"), [(8, 4), (9, 4), (3, 4), (1, 1), (0, 2)])
def test_each_record_is_in_one_slice(records: int, processes: int) -> None:
    batch = list(range(records))
    slices = [Slices(rank, processes).own(batch) for rank in range(processes)]
    sizes = slice_sizes(records, processes)
    own = [indexes for indexes, size in zip(slices, sizes, strict=True) if size]
    assert [index for indexes in own for index in indexes] == batch
    assert max(sizes) - min(sizes) <= 1
    assert all(indexes == slices[0] for indexes, size in zip(slices, sizes, strict=True) if not size)


def test_of_a_rest_no_process_has_a_single_record() -> None:
    assert [slice_sizes(records, 2, least=2) for records in (1, 2, 3, 5)] == [[1, 0], [2, 0], [3, 0], [3, 2]]
    slices = [Slices(rank, 2) for rank in range(2)]
    for each in slices:
        each.least = 2
        assert each.own([7, 8]) == [7, 8]
        assert each.weights([2]) == [1.0, 0.0]
    assert [each.has_none(2) for each in slices] == [False, True]


def test_weights_are_the_shares_of_the_batches_that_were_computed_on() -> None:
    slices, batches = Slices(0, 2), Batches()
    batches.add([Range(0, 0, 3), Range(0, 10, 14)])  # 7 records: 4 and 3
    batches.compute()
    batches.add([Range(0, 20, 21)])  # 1 and 0
    batches.compute()
    batches.add([Range(1, 0, 4)])
    assert slices.weights(batches.sizes) == pytest.approx([5 / 8, 3 / 8])
    batches.decide()
    batches.reopen()
    batches.compute()
    assert slices.weights(batches.sizes) == pytest.approx([5 / 8, 3 / 8]), "they are computed on again"
    assert slices.weights([4]) == [0.5, 0.5]
    assert slices.weights([]) == [0.0, 0.0]
