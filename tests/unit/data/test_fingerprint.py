"""What identifies the records of a data set, and what of two data sets differs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from elastic_ps.core.fingerprint import MOST, ORDER, SHUFFLE, differing, other_records
from elastic_ps.data.fingerprint import fingerprint

RECORDS = 40


class Unreadable(Dataset[Any]):
    """Has attributes, and must not be read."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a record was read")


class Stream(IterableDataset[Any]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a record was read")


class Options(dict[str, Any]):
    """Its items are its attributes, as of many a configuration."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Column:
    """As an Arrow table of one column."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def column(self, number: int) -> list[int]:
        return self.values if number == 0 else []


class Frame:
    """As a data frame of pandas."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.iloc = rows, self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: list[int]) -> Any:
        chosen = np.array([self.rows[place] for place in places], dtype=object)
        return SimpleNamespace(to_numpy=lambda dtype: chosen.astype(dtype))


def shuffled(given: Sequence[Any]) -> list[Any]:
    return random.sample(given, len(given))


NAMES = [f"image-{number}.jpg" for number in range(RECORDS)]
BASE = TensorDataset(torch.arange(2 * RECORDS))


def between(dataset: Any, other: Any) -> list[str]:
    return differing(*(fingerprint(each, RECORDS) for each in (dataset, other)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: random_split(BASE, [RECORDS, RECORDS])[0], "Subset.indices"),
        (lambda: Unreadable(part=random_split(BASE, [RECORDS, RECORDS])[0]), "Unreadable.part.indices"),
        (lambda: Subset(Subset(BASE, shuffled(range(RECORDS))), range(RECORDS)), "Subset.dataset.indices"),
        (
            lambda: ConcatDataset([BASE, Subset(BASE, shuffled(range(9)))]),
            "ConcatDataset.datasets.1.indices",
        ),
        (lambda: TensorDataset(torch.randn(RECORDS, 3)), "TensorDataset.tensors.0"),
        (lambda: torch.randn(RECORDS, 2, 2, dtype=torch.bfloat16), "Tensor"),
        (lambda: torch.randperm(RECORDS), "Tensor"),
        (lambda: np.random.permutation(RECORDS), "ndarray"),
        (lambda: shuffled(NAMES), "list"),
        (lambda: Unreadable(samples=[(each, 1) for each in shuffled(NAMES)]), "Unreadable.samples"),
        (lambda: Unreadable(paths=[Path(each) for each in shuffled(NAMES)]), "Unreadable.paths"),
        (lambda: Unreadable(rows=[{"x": random.random()} for _ in NAMES]), "Unreadable.rows"),
        (lambda: Unreadable(columns={"y": torch.randperm(RECORDS)}), "Unreadable.columns.y"),
        (lambda: Unreadable(_indices=Column(shuffled(range(RECORDS)))), "Unreadable._indices"),
        (lambda: Unreadable(frame=Frame([[each, 1.0] for each in shuffled(NAMES)])), "Unreadable.frame"),
        (lambda: Stream(shuffled(NAMES)), "Stream.files"),
    ],
)
def test_what_was_drawn_differs_and_is_named(make: Any, name: str) -> None:
    assert between(make(), make()) == [name]
    same = make()
    assert between(same, same) == []
    assert name in fingerprint(same, RECORDS)


@dataclass
class Cached:
    """What a script may have looked at already, or not."""

    image: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Unreadable(), Unreadable()),
        (Unreadable(samples=[f"/a/b/{n}" for n in NAMES]), Unreadable(samples=[f"/c/{n}" for n in NAMES])),
        (Unreadable(cache=[None] * RECORDS), Unreadable(cache=[Cached(1)] * RECORDS)),
        (Unreadable(cache=[None] * RECORDS), Unreadable(cache=[torch.ones(2)] * RECORDS)),
        (Unreadable(cache=[1, 3, *[None] * (RECORDS - 2)]), Unreadable(cache=[*[None] * (RECORDS - 1), 2])),
        (Unreadable(options=Options(size=3)), Unreadable(options=Options(size=4))),
        (Unreadable(x={"k" * 900 + str(i): range(RECORDS) for i in range(60)}), Unreadable()),
        (Unreadable(noise=torch.rand(7)), Unreadable(noise=torch.rand(7))),
        (Unreadable(seed=random.random()), Unreadable(seed=random.random())),
        (Unreadable(x=torch.ones(RECORDS, 0)), Unreadable(x=torch.ones(RECORDS, 0))),
        (Unreadable(x=torch.eye(RECORDS).to_sparse()), Unreadable(x=torch.zeros(RECORDS, 2).to_sparse())),
        (Stream(["/a/1", "/a/2"]), Stream(["/b/1", "/b/2"])),
    ],
)
def test_what_may_differ(one: Any, other: Any) -> None:
    """Where files lie, what is cached, and what is not of the records."""
    assert between(one, other) == []


def test_what_comes_after_an_object_that_raises_is_compared() -> None:
    one, other = (Unreadable(options=Options(a=1), order=shuffled(range(RECORDS))) for _ in range(2))
    assert between(one, other) == ["Unreadable.order"]


def test_an_array_in_a_file_is_compared(tmp_path: Path) -> None:
    arrays = []
    for number in range(2):
        array = np.memmap(tmp_path / str(number), np.int64, "w+", shape=(RECORDS,))
        array[:] = np.arange(RECORDS) * (number + 1)
        arrays.append(Unreadable(tokens=array))
    assert between(*arrays) == ["Unreadable.tokens"]


def test_objects_that_refer_to_each_other_are_looked_at_once() -> None:
    nodes: list[Any] = [[] for _ in range(30)]
    for node in nodes:
        node += nodes
    assert fingerprint(Unreadable(graph=nodes, x=range(RECORDS)), RECORDS)


def test_rounding_makes_no_difference_and_order_does() -> None:
    """The same code rounds differently on another processor, or with other threads."""
    values = torch.randn(RECORDS, 5, dtype=torch.float64) * 1e-3
    assert between(values, values * (1 + 1e-6) + 1e-9) == []
    assert between(values, values.flip(0)) == ["Tensor"]
    values[3] = torch.inf
    values[4] = torch.nan
    assert between(values, values.clone()) == []


def test_large_data_sets_are_looked_at_in_part() -> None:
    large = np.broadcast_to(np.zeros(1), (100_000, 1000, 1000))
    assert fingerprint(large, len(large))
    names = Unreadable(samples=["x" * 5000] * RECORDS, columns={"y" * 5000: torch.ones(RECORDS)})
    assert len(fingerprint(names, RECORDS)) < MOST


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 1}', '{"x": ["a", [1]]}', "[" * 60_000, " " * (MOST + 1)])
def test_what_is_no_fingerprint(text: str) -> None:
    with pytest.raises(ValueError, match=r"fingerprint"):
        differing("{}", text)


def test_other_blocks_are_noticed_also_where_there_were_none() -> None:
    """Records would be at other positions, so some would be trained twice and others never."""
    dataset = TensorDataset(torch.arange(RECORDS))
    plain, blocks, others = (fingerprint(dataset, RECORDS, order) for order in ("", "[5]", "[4]"))
    for one, other in [(plain, blocks), (blocks, plain), (blocks, others)]:
        assert differing(one, other) == [ORDER]
    assert differing(blocks, blocks) == differing(plain, plain) == []
    assert "data.order" in other_records([ORDER])


def test_another_shuffle_is_noticed_also_where_nothing_else_identifies_the_records() -> None:
    """A job that continues from a checkpoint would train some records twice and others never."""
    nothing = Unreadable()
    one, other = (fingerprint(nothing, RECORDS, shuffle=shuffle) for shuffle in (False, True))
    assert differing(one, other) == [SHUFFLE]
    assert differing(one, fingerprint(nothing, RECORDS)) == [], "an older checkpoint"
    blocks = fingerprint(nothing, RECORDS, "[5]", shuffle=True)
    assert differing(other, blocks) == [ORDER]
    assert "shuffle of the DataLoader" in other_records([SHUFFLE])


def test_a_data_set_of_other_files_is_noticed_by_their_digests() -> None:
    one, other = (Unreadable(block_digests=lambda digest=digest: ["a", digest]) for digest in "bc")
    assert differing(fingerprint(one, RECORDS), fingerprint(other, RECORDS)) == ["Unreadable.block_digests()"]
