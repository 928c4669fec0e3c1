"""How the processes of a worker share batches, and what becomes of their parts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_ps.api.job import TrainingJobSpec, Worker
from elastic_ps.contract.env import ProcessEnvironment, read
from elastic_ps.core.ledger import Range
from elastic_ps.data.batches import Batches, Slices, slice_sizes
from elastic_ps.worker.local_group import add_gradients, add_means


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    exact = torch.stack(parts).double().mean(0)
    own, *others = (part.clone() for part in parts)
    add_gradients(own, 0.25, [(other, 0.25) for other in others])
    assert own.dtype is dtype
    bound = (1 if dtype is torch.bfloat16 else 4) * torch.finfo(dtype).eps
    assert float((own.double() - exact).abs().max()) <= bound


def test_what_has_no_weight_is_not_looked_at() -> None:
    own, other = torch.ones(3), torch.full((3,), math.nan)
    add_gradients(own, 1.0, [(other, 0.0)])
    add_means(own, [(other, 0.0)])
    assert own.tolist() == [1, 1, 1]


def test_equal_buffers_stay_as_they_are_to_the_bit() -> None:
    values = torch.rand(1000) * 1e3
    own = values.clone()
    add_means(own, [(values, 0.3), (values, 0.3)])
    assert torch.equal(own, values)


def test_the_environment_of_a_process_says_which_one_it_is() -> None:
    spec = TrainingJobSpec(entrypoint="script:main", worker=Worker(processes=3))
    given = ProcessEnvironment(
        job="j", spec=spec, role="worker", index=1, addresses=("h:1",), local_rank=2, links=((5, 6),)
    )
    assert read(given.to_variables()) == given
    named = replace(given, hostname="pod")
    assert read(named.to_variables()) == named
    seen = replace(given, joined=Path("/tmp/joined"))
    assert read(seen.to_variables()) == seen
    crowded = replace(given, role="ps", crowded=True)
    assert read(crowded.to_variables()) == crowded
