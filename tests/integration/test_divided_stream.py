"""The items of a stream by number, in the processes of a DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from elastic_ps.data.stream import ItemIndex
from tests.unit.data.test_stream import Stream, indexed


class Divided(Stream):
    """Shares its items out among the processes of a DataLoader, as torch's documentation shows."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        processes, process = (info.num_workers, info.id) if info is not None else (1, 0)
        return itertools.islice(super().__iter__(), process, None, processes)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_that_shares_itself_out_among_processes_is_whole(processes: int) -> None:
    batches = [[ItemIndex(0, n) for n in range(start, start + 4)] for start in range(0, 20, 4)]
    loader: DataLoader[Any] = DataLoader(
        indexed(Divided()), batch_sampler=batches, num_workers=processes, collate_fn=with_process
    )
    found = list(loader)
    assert [items for items, _ in found] == [list(range(start, start + 4)) for start in range(0, 20, 4)]
    there = [(k % processes, processes) if processes else None for k in range(5)]
    assert [process for _, process in found] == there, "others are told the truth"


def with_process(batch: list[int]) -> tuple[list[int], tuple[int, int] | None]:
    info = get_worker_info()
    return batch, None if info is None else (info.id, info.num_workers)
