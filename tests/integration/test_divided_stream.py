"""The items of a stream by number, in the processes of a DataLoader."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_ps.data.stream import IndexedStream, ItemIndex
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


class ShuffledBySeed(Stream):
    """All processes of a DataLoader take the same order from the seed that torch gives them."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        order = list(range(20))
        random.Random(info.seed - info.id).shuffle(order)
        return iter(order)


def test_a_stream_that_shuffles_by_torchs_seed_has_one_order_in_each_epoch() -> None:
    batches = [[ItemIndex(epoch, n) for n in range(s, s + 4)] for epoch in (0, 1) for s in range(0, 20, 4)]
    orders = []
    for _ in range(2):
        loader: DataLoader[Any] = DataLoader(
            indexed(ShuffledBySeed()), batch_sampler=batches, num_workers=2, collate_fn=list
        )
        orders.append(list(itertools.chain(*loader)))
    assert sorted(orders[0][:20]) == sorted(orders[0][20:]) == list(range(20))
    assert orders[0][:20] != orders[0][20:]
    assert orders[0] == orders[1], "whatever the script has drawn"


class Lines(IterableDataset[str]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        with self.path.open() as file:
            yield from file


def test_processes_do_not_share_the_place_in_a_file(tmp_path: Path) -> None:
    """Items were read before a DataLoader forks its processes, or pickles the stream for them."""
    (tmp_path / "lines").write_text("".join(f"{n:099}\n" for n in range(2_000)))
    given = IndexedStream(Lines(tmp_path / "lines"), records=2_000, said="records", ends=True, near=0)
    assert int(given[ItemIndex(0, 0)]) == 0
    batches = [[ItemIndex(0, n) for n in range(start, start + 10)] for start in range(10, 2_000, 10)]
    loader: DataLoader[Any] = DataLoader(given, batch_sampler=batches, num_workers=2, collate_fn=list)
    assert [int(line) for line in itertools.chain(*loader)] == list(range(10, 2_000))
    assert int(pickle.loads(pickle.dumps(given))[ItemIndex(0, 1)]) == 1


def with_process(batch: list[int]) -> tuple[list[int], tuple[int, int] | None]:
    info = get_worker_info()
    return batch, None if info is None else (info.id, info.num_workers)
