"""What is read of tables at one version, while later ones are made."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ps.codec.state import Stored
from elastic_ps.embedding import Adagrad, Table, TableSpec, uniform
from elastic_ps.embedding.columns import NEVER
from elastic_ps.embedding.snapshot import TablesAt
from elastic_ps.embedding.stored import columns_to_part, exported, parts_in
from tests.testing.polling import LIMIT, eventually

SPEC = TableSpec(
    name="a", dim=3, init=uniform(-1, 1), optimizer=Adagrad(lr=0.1), admit_after=2, expire_after=6
)
FULL = replace(SPEC, name="b", admit_after=1, table_bytes=20 * SPEC.row_bytes, when_full="expire")


class Small(TablesAt):
    """With small blocks, and no room for copies."""

    BLOCK, SHARE, ROOM = 7 * SPEC.row_bytes, 0.0, 0


def update(tables: Sequence[Table], version: int) -> None:
    random = np.random.default_rng(version)
    for table in tables:
        ids = np.unique(random.integers(0, 40, 12))
        gradient = torch.from_numpy(random.normal(size=(len(ids), 3)).astype(np.float32))
        table.update(ids, gradient, random.integers(1, 3, len(ids)), version)


def taken(tables: Sequence[Table], since: int = NEVER) -> TablesAt:
    lock = threading.Condition()
    with lock:
        return Small(tables, lock, since=since, patience=timedelta(0))


def merged(tables: Sequence[Table], parts: Iterator[Stored]) -> None:
    columns = defaultdict[int, dict[str, torch.Tensor]](dict)
    for each in parts:
        columns[each.tensor][each.key] = each.value
    by_name = {table.spec.name: table for table in tables}
    for spec, part in parts_in(columns.values()):
        by_name[spec.name].merge(part)


def states(tables: Sequence[Table]) -> list[dict[str, Any]]:
    return [{name: torch.as_tensor(value) for name, value in table.state().items()} for table in tables]


def require_equal(found: Sequence[Table], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(states(found), expected, strict=True):
        for name, value in other.items():
            assert torch.equal(one[name], value), name


def test_what_is_read_is_of_one_version_while_others_are_made() -> None:
    tables = [Table(SPEC), Table(FULL)]
    for version in range(1, 15):
        update(tables, version)
    expected, snapshot = states(tables), taken(tables)
    read = []
    for number, each in enumerate(snapshot.read()):
        read.append(each)
        if number % 4 == 0:
            version += 1
            update(tables, version)
    assert [(each.name, each.dtype, each.value.shape) for each in read] == [
        (each.name, each.dtype, each.value.shape) for each in snapshot.described
    ]
    assert snapshot.nbytes == 0
    found = [Table(SPEC), Table(FULL)]
    merged(found, iter(read))
    require_equal(found, expected)


def test_all_rows_of_a_version_and_what_changed_since_are_those_of_a_later_one() -> None:
    tables, found = [Table(SPEC), Table(FULL)], [Table(SPEC), Table(FULL)]
    for version in range(1, 30):
        update(tables, version)
        if version == 8:
            merged(found, taken(tables).read())
    merged(found, taken(tables, since=8).read())
    require_equal(found, states(tables))


def test_the_rows_of_another_shard_are_not_read() -> None:
    """Only their ids are, to know whose they are."""
    table = Table(SPEC)
    update([table], 0)
    update([table], 1)

    first = next(taken([table]).read()).tensor
    stored = {each.key: each.value for each in taken([table]).read() if each.tensor == first}

    class Columns(Mapping[str, torch.Tensor]):
        def __init__(self) -> None:
            self.read: set[str] = set()

        def __getitem__(self, name: str) -> torch.Tensor:
            value = stored[name]
            self.read.add(name)
            return value

        def __iter__(self) -> Iterator[str]:
            return iter(stored)

        def __len__(self) -> int:
            return len(stored)

    def read(*, own: bool) -> tuple[set[str], dict[str, Any]]:
        columns, copied = Columns(), Table(SPEC)
        [(_, part)] = parts_in([columns], lambda ids: np.full(len(ids), own))
        copied.merge(part)
        return columns.read, copied.state()

    names, state = read(own=True)
    assert {"values", "counts", "waiting_counts"} <= names
    assert torch.equal(state["values"], stored["values"].view(-1, 3))
    names, state = read(own=False)
    assert names.isdisjoint({"values", "counts", "sum", "waiting_counts"})
    assert len(state["ids"]) == 0


@pytest.mark.parametrize(
    ("ids", "dense"), [([1, 5], 6), ([1, 6], None), ([-1, 0, 1], None), ([0, 2**63 - 1], None), ([], None)]
)
def test_a_small_table_is_exported_as_the_weight_of_a_layer_too(
    monkeypatch: pytest.MonkeyPatch, ids: list[int], dense: int | None
) -> None:
    """In which ids without a row have their first values."""
    monkeypatch.setattr("elastic_ps.embedding.stored.DENSE_BYTES", 6 * 3 * 4)
    table = Table(replace(SPEC, admit_after=1, padding_idx=3))
    table.update(np.array(ids, dtype=np.int64), torch.ones(len(ids), 3), np.ones(len(ids), dtype=np.int64), 0)
    found = exported([columns_to_part(table.spec, table.state())])
    if "a.weight" in found:
        assert not found["a.weight"][3].any(), "the padding"
    assert found["a.ids"].tolist() == ids
    weight = found.get("a.weight")
    assert (None if weight is None else len(weight)) == dense
    if weight is not None:
        assert torch.equal(weight, table.lookup(np.arange(len(weight))))
        assert torch.equal(weight[found["a.ids"]], found["a.values"])


class Noting(threading.Condition):
    """It notes that somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


def test_a_step_waits_for_the_reader_when_the_copies_take_too_much() -> None:
    table, lock = Table(SPEC), Noting()
    for version in range(1, 4):
        update([table], version)
    with lock:
        snapshot = Small([table], lock, since=NEVER, patience=timedelta(minutes=5))
        update([table], 4)
        update([table], 5)
    assert snapshot.nbytes > 0
    waited = threading.Event()

    def step() -> None:
        with lock:
            snapshot.wait()
            waited.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert lock.waits.wait(LIMIT)
    assert not waited.is_set()
    assert [*snapshot.read()]
    eventually(waited.is_set, "the step goes on")
    thread.join()
    assert snapshot.pause > timedelta(0)
