"""What the arguments of `session.loader` mean, without a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from elastic_ps.api.job import BlockOrder, Data
from elastic_ps.data.source import Source, read_source
from elastic_ps.errors import InvalidModel, UsageError

RECORDS = TensorDataset(torch.arange(10.0))
JOB = Data()


def read(
    given: Any, batch_size: int | None = None, records: int | None = None, data: Data = JOB, **options: Any
) -> Source:
    return read_source(given, batch_size=batch_size, records=records, data=data, late=False, options=options)


class InBlocks(TensorDataset):
    """Says which of its records are a block."""

    def block_sizes(self) -> list[int]:
        return [4, 6]


class ManyBlocks(TensorDataset):
    """Their sizes are more text than a request has."""

    def block_sizes(self) -> list[int]:
        return [1] * len(self)


def test_a_dataloader_of_a_torch_without_in_order_keeps_the_order() -> None:
    loader = DataLoader(RECORDS, batch_size=4, shuffle=True, drop_last=True)
    vars(loader).pop("in_order", None)
    source = read(loader)
    assert (source.batch_size, source.shuffle, source.drop_last) == (4, True, True)
    assert source.records == 10


def test_an_empty_data_set_says_what_was_expected() -> None:
    with pytest.raises(InvalidModel, match="TensorDataset is empty; expected at least one record"):
        read(TensorDataset(torch.empty(0)), batch_size=4)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("data/train.tar", "TextDataset or TarDataset"),
        ({"train": RECORDS, "test": RECORDS}, "pass the value of one of its keys: train, test"),
        ((torch.zeros(9, 2), torch.zeros(9)), r"TensorDataset\(\*tensors\)"),
    ],
)
def test_what_has_a_length_but_no_records_is_refused(given: Any, instead: str) -> None:
    with pytest.raises(UsageError, match=f"session.loader got a .*, which is not a data set: .*{instead}"):
        read(given, batch_size=2)


@pytest.mark.parametrize(
    "given",
    [
        [torch.zeros(9)] * 2,
        {0: 1.0, 1: 2.0},
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.zeros(2),) * 5,
        (torch.zeros(3, 4, 4), torch.ones(3, 4, 4)),
        ("a", "b"),
    ],
)
def test_any_object_with_a_length_and_an_index_is_a_data_set(given: Any) -> None:
    assert read(given, batch_size=2).records == len(given)


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
def test_a_sampler_of_some_of_the_records_is_refused(kind: type[Any]) -> None:
    dataset = TensorDataset(torch.ones(8))
    read(DataLoader(dataset, batch_size=2, sampler=kind(range(8))))
    with pytest.raises(UsageError, match="which chooses records itself"):
        read(DataLoader(dataset, batch_size=2, sampler=kind(range(5))))
    with pytest.raises(InvalidModel, match="no length"):
        read(DataLoader(Dataset[Any](), batch_size=2, sampler=kind(range(5))))


def test_a_dataloader_has_its_options_already() -> None:
    with pytest.raises(UsageError, match=r"and batch_size, num_workers, but takes its options from the D"):
        read(DataLoader(RECORDS, batch_size=4), batch_size=2, num_workers=1)


def blocks_of(given: Any, **order: int) -> tuple[Any, int, bool] | None:
    """The blocks, how many of them are shuffled together, and whether they are."""
    found = read(given, data=Data(order=BlockOrder(**order)), batch_size=2).order
    return None if found is None else (found.blocks, found.buffer, found.shuffle)


def test_blocks_are_those_of_the_job_or_else_of_the_data_set() -> None:
    own = InBlocks(torch.arange(10.0))
    assert blocks_of(RECORDS) is None
    assert blocks_of(RECORDS, blocks=3, buffer=2) == (3, 2, True)
    assert blocks_of(own, buffer=2) == ([4, 6], 2, True)
    assert blocks_of(own, blocks=3) == (3, 1, True)
    assert blocks_of(own, blocks=1) is None


def test_the_items_of_a_stream_keep_their_order_and_are_handed_out_in_blocks() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

        def __len__(self) -> int:
            return 10

    assert blocks_of(Stream(), blocks=3) == (3, 1, False)


def test_impossible_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"nothing says which records are a block: TensorDataset has no"):
        blocks_of(RECORDS, buffer=2)
    with pytest.raises(
        UsageError, match=r"block_sizes\(\): the blocks have 10 records together, but the data"
    ):
        blocks_of(InBlocks(torch.arange(11.0)))
    with pytest.raises(UsageError, match=r"the sizes of 700000 blocks take \d+ bytes .* Make larger blocks"):
        blocks_of(ManyBlocks(torch.arange(700_000.0)))
