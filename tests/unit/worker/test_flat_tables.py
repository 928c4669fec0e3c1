"""The memory of tables: which rows of a gradient a bucket gets, and which rows a model elsewhere gets."""

from __future__ import annotations

from dataclasses import replace

import torch

from elastic_ps.codec.rows import Rows
from elastic_ps.core.partition import partition
from elastic_ps.worker.model.flat import Flat
from tests.testing.shard import tensor

LAYOUT = partition([replace(tensor("table", 6, 2), sparse=True)], bucket_bytes=16, shards=2)


def rows(numbers: list[int], value: float) -> Rows:
    return Rows(torch.tensor(numbers), torch.full((len(numbers), 2), value))


def test_each_bucket_gets_its_rows() -> None:
    flat = Flat(LAYOUT, [torch.zeros(6, 2)])
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[5, 1, 5]]), torch.ones(3, 2), (6, 2), check_invariants=True
    )
    flat.put(0, gradient)
    found = [flat.rows_of(bucket) for bucket in LAYOUT.buckets]
    assert [each and each.numbers.tolist() for each in found] == [[1], [2]]
    assert found[1] is not None
    assert found[1].values.tolist() == [[2.0, 2.0]]
    flat.clear_contribution(0)
    assert flat.rows_of(LAYOUT.buckets[0]) is None


def test_a_dense_gradient_replaces_rows() -> None:
    flat = Flat(LAYOUT, [torch.zeros(6, 2)])
    flat.put(0, torch.eye(6, 2).to_sparse(1))
    flat.put(0, torch.full((6, 2), 3.0))
    assert flat.rows_of(LAYOUT.buckets[0]) is None
    assert flat.writable_contribution(0).eq(3).all()


def test_only_rows_that_have_arrived_are_copied_to_a_model_elsewhere() -> None:
    model = torch.arange(12.0).view(2, 6).t()  # permuted, so that it keeps its memory
    flat, first = Flat(LAYOUT, [model]), model.clone()
    flat.value(0)[0] = 7.0  # nobody has said that this row has arrived
    flat.take_rows(LAYOUT.buckets[1], rows([0, 2], 9.0))
    flat.publish()
    changed = (model != first).any(1)
    assert changed.tolist() == [False, False, False, True, False, True]
    assert model[3].tolist() == [9.0, 9.0]
    flat.take_rows(LAYOUT.buckets[0], None)
    flat.publish()
    assert torch.equal(model, flat.value(0))
