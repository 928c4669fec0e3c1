"""A table beside a dictionary of rows, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.embedding import SGD, Adagrad, LazyAdam, RowwiseAdagrad, Table, TableSpec, normal, uniform
from elastic_ps.embedding.init import Ids, key_of
from elastic_ps.embedding.optimizers import RowOptimizer, Touched
from elastic_ps.embedding.table import WhenFull
from elastic_ps.errors import ModelMismatch, UsageError

DIM = 3
IDS = st.one_of(st.integers(-2, 12), st.sampled_from([2**63 - 1, -(2**63)]))
STEPS = st.lists(st.dictionaries(IDS, st.integers(1, 3), max_size=6), max_size=12)


def a_spec(**changes: Any) -> TableSpec:
    spec = TableSpec(
        name="a", dim=DIM, init=uniform(-1, 1), optimizer=RowwiseAdagrad(lr=0.1), dtype="float64"
    )
    return replace(spec, **changes)


def gradient_of(ids: Ids, version: int) -> torch.Tensor:
    return torch.from_numpy(np.sin(ids.astype(np.float64)[:, None] + version + np.arange(DIM)))


def update(table: Table, counts: dict[int, int], version: int, now: float = 0.0) -> None:
    ids = np.array(sorted(counts), dtype=np.int64)
    often = np.array([counts[i] for i in ids.tolist()])
    table.update(ids, gradient_of(ids, version), often, version, now=now)


@dataclass
class Row:
    """One row of the model that the table is compared with."""

    values: torch.Tensor
    slots: list[torch.Tensor]
    count: int
    seen: int


class Dictionary:
    """A table as a dictionary of rows, without a budget."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.rows, self.waiting = spec, dict[int, Row](), dict[int, tuple[int, int]]()
        self.version = self.steps = 0

    def alive(self, seen: int) -> bool:
        after = self.spec.expire_after
        return not isinstance(after, int) or seen >= self.version - after

    def lookup(self, id_: int) -> torch.Tensor:
        row = self.rows.get(id_)
        return self.first(id_) if row is None or not self.alive(row.seen) else row.values

    def first(self, id_: int) -> torch.Tensor:
        ids = np.array([id_], dtype=np.int64)
        return torch.from_numpy(
            self.spec.init.first_values(key_of(self.spec.seed, self.spec.name), ids, DIM)[0]
        )

    def update(self, counts: dict[int, int], version: int) -> None:
        self.steps += bool(counts)
        for id_, count in counts.items():
            if id_ in self.rows and not self.alive(self.rows[id_].seen):
                del self.rows[id_]
            if id_ not in self.rows:
                earlier, seen = self.waiting.pop(id_, (0, version))
                total = count + (earlier if self.alive(seen) else 0)
                if total < self.spec.admit_after:
                    self.waiting[id_] = total, version
                    continue
                slots = [torch.full((s.width or DIM,), s.first).double() for s in self.spec.optimizer.slots]
                self.rows[id_] = Row(self.first(id_).clone(), slots, earlier * self.alive(seen), version)
            row = self.rows[id_]
            row.count, row.seen = row.count + count, version
            gradient = gradient_of(np.array([id_]), version)
            views = [slot[None] for slot in row.slots]
            self.spec.optimizer.step(Touched(row.values[None], views, gradient, self.steps))
        self.version = version


@given(
    steps=STEPS,
    admit_after=st.integers(1, 3),
    expire_after=st.one_of(st.none(), st.integers(1, 4)),
    when_full=st.sampled_from([None, "refuse", "expire"]),
    split=st.integers(0, 12),
)
def test_rows_that_have_not_changed_are_as_they_were(
    steps: list[dict[int, int]], admit_after: int, expire_after: int | None, when_full: Any, split: int
) -> None:
    spec = a_spec(admit_after=admit_after, expire_after=expire_after)
    if when_full is not None:
        spec = replace(spec, table_bytes=4 * spec.row_bytes, when_full=when_full)
    table, ids = Table(spec), np.array([*range(-2, 13), 2**63 - 1, -(2**63)])
    for version, counts in enumerate(steps[:split], 1):
        update(table, counts, version)
    values, held = table.lookup(ids), table.version
    for version, counts in enumerate(steps[split:], split + 1):
        update(table, counts, version)
    places = table.changed(ids, held)
    values[torch.from_numpy(places)] = table.lookup(ids[places])
    assert torch.equal(values, table.lookup(ids))


@given(
    steps=STEPS,
    admit_after=st.integers(1, 3),
    expire_after=st.one_of(st.none(), st.integers(1, 4)),
    optimizer=st.sampled_from([SGD(lr=0.1), RowwiseAdagrad(lr=0.1), LazyAdam(lr=0.1)]),
    split=st.integers(0, 12),
)
def test_a_table_is_a_dictionary_of_rows(
    steps: list[dict[int, int]],
    admit_after: int,
    expire_after: int | None,
    optimizer: RowOptimizer,
    split: int,
) -> None:
    """Also if its rows are saved and loaded in between."""
    spec = a_spec(admit_after=admit_after, expire_after=expire_after, optimizer=optimizer)
    table, model = Table(spec), Dictionary(spec)
    for version, counts in enumerate(steps, start=1):
        update(table, counts, version)
        model.update(counts, version)
        if version == split:
            table = pickle.loads(pickle.dumps(table))
        asked = [*range(-3, 14), 2**63 - 1, -(2**63), 5, 5]
        found = table.lookup(np.array(asked, dtype=np.int64))
        expected = torch.stack([model.lookup(each) for each in asked])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    state = table.state()
    alive = {id_: row for id_, row in sorted(model.rows.items()) if model.alive(row.seen)}
    assert state["ids"].tolist() == list(alive)
    assert state["counts"].tolist() == [row.count for row in alive.values()]
    assert state["seen"].tolist() == [row.seen for row in alive.values()]
    waiting = {id_: count for id_, (count, seen) in sorted(model.waiting.items()) if model.alive(seen)}
    assert dict(zip(state["waiting_ids"].tolist(), state["waiting_counts"].tolist(), strict=True)) == waiting


@given(
    steps=STEPS,
    admit_after=st.integers(1, 2),
    expire_after=st.one_of(st.none(), st.integers(1, 4)),
    when_full=st.sampled_from(["refuse", "expire"]),
    block=st.integers(1, 4),
    since=st.integers(0, 12),
)
def test_a_table_is_followed_by_its_rows_in_blocks_and_its_changes(
    steps: list[dict[int, int]],
    admit_after: int,
    expire_after: int | None,
    when_full: WhenFull,
    block: int,
    since: int,
) -> None:
    """All rows at one version, in blocks, and the changes after it make an equal table."""
    spec = a_spec(admit_after=admit_after, expire_after=expire_after, when_full=when_full)
    spec = replace(spec, table_bytes=6 * spec.row_bytes)
    table, follower = Table(spec), Table(spec)
    for version, counts in enumerate(steps, start=1):
        update(table, counts, version)
        if version == since:
            for start in range(0, table.extent, block):
                part = table.changes(start=start, stop=start + block)
                assert part is not None
                follower.merge(part)
    if len(steps) >= since:
        changes = table.changes(table.version if since > len(steps) else since)
        assert changes is not None
        follower.merge(changes)
        for (name, given), (_, expected) in zip(follower.state().items(), table.state().items(), strict=True):
            assert torch.equal(torch.as_tensor(given), torch.as_tensor(expected)), name


@pytest.mark.parametrize("admit_after", [1, 2])
@pytest.mark.parametrize("when_full", ["refuse", "expire"])
def test_expired_rows_take_no_room(when_full: WhenFull, admit_after: int) -> None:
    """They are swept in parts, and not at the same time as in a table that follows."""
    spec = a_spec(when_full=when_full, expire_after=100, admit_after=admit_after, dim=1)
    table = Table(replace(spec, table_bytes=20_000 * spec.row_bytes))

    def add(to: Table, first: int, version: int) -> None:
        """Of half of the ids the first occurrence, of half the second."""
        ids = np.arange(first, first + 18_000)
        to.update(ids, torch.ones(len(ids), 1).double(), 1 + ids % 2, version)

    add(table, 0, 1)
    add(table, 20_000, 1)
    table.update(np.array([], dtype=np.int64), torch.ones(0, 1).double(), np.array([], dtype=np.int64), 149)
    follower = Table(table.spec)
    follower.load_state(table.state())
    assert len(follower) < len(table), "some are not swept yet"
    for each in (table, follower):
        add(each, 100_000, 150)
    for name, expected in table.state().items():
        assert torch.equal(torch.as_tensor(follower.state()[name]), torch.as_tensor(expected)), name
    assert len(table) == (18_000 if admit_after == 1 else 9_000)


def test_changes_are_not_known_after_many_rows_were_removed() -> None:
    """Those of the last version are."""
    spec = a_spec(when_full="expire", dim=1)
    spec = replace(spec, table_bytes=40_000 * spec.row_bytes)
    table = Table(spec)
    for version in range(1, 5):
        ids = np.arange(40_000) + 40_000 * version
        table.update(ids, torch.ones(len(ids), 1).double(), np.ones_like(ids), version)
    assert table.changes(1) is None
    last = table.changes(3)
    assert last is not None
    assert last["removed"].tolist() == list(range(120_000, 160_000))


def test_a_look_up_creates_nothing() -> None:
    table = Table(a_spec())
    table.lookup(np.arange(100))
    assert (len(table), table.waiting) == (0, 0)
    update(table, {7: 1}, 1)
    table.lookup(np.array([7, 8, 7]))
    assert (len(table), table.counts.looked_up, table.counts.hits) == (1, 103, 2)


def test_rows_that_have_expired_are_dropped_in_time() -> None:
    table = Table(a_spec(expire_after=8))
    for version in range(1, 40):
        update(table, {version: 1, 1000: 1}, version)
    assert len(table) <= 8 + 2 + 8
    assert table.counts.expired >= 40 - 18
    assert table.state()["ids"].tolist() == [*range(31, 40), 1000]


def test_rows_expire_by_time_as_those_of_a_table_that_was_loaded_do() -> None:
    spec = a_spec(expire_after="10m", admit_after=2)
    table, other = Table(spec), Table(spec)
    for number in range(40):
        for each in (table, other):
            update(each, {number: 2, 100 + number: 1, 1000: 1}, number + 1, now=18.0 * number)
        if number == 20:
            other.load_state(table.state())
    found = table.state()
    assert found["ids"].tolist() == [*range(4, 40), 1000]
    assert found["waiting_ids"].tolist() == [*range(104, 140)]
    for name, value in found.items():
        assert torch.equal(torch.as_tensor(other.state()[name]), torch.as_tensor(value)), name
    assert (len(table), table.waiting, table.counts.expired) == (37, 36, 4)
    assert torch.equal(table.lookup(np.arange(4)), Table(spec).lookup(np.arange(4)))
    update(table, {3: 2}, 41, now=18.0 * 40)
    assert table.state()["counts"].tolist()[0] == 2


def test_a_full_table_refuses_new_rows_and_trains_the_others() -> None:
    spec = a_spec()
    table = Table(replace(spec, table_bytes=spec.row_bytes * 3 + 1))
    update(table, {1: 1, 2: 1}, 1)
    update(table, {1: 1, 3: 1, 4: 1}, 2)
    assert table.state()["ids"].tolist() == [1, 2, 3]
    assert table.counts.refused == 1
    assert table.state()["counts"].tolist() == [2, 1, 1]


def test_a_full_table_drops_the_rows_that_are_least_recent() -> None:
    spec = a_spec(when_full="expire")
    table = Table(replace(spec, table_bytes=spec.row_bytes * 3))
    update(table, {5: 1, 9: 1}, 1)
    update(table, {1: 1, 9: 1}, 2)
    update(table, {2: 1}, 3)
    assert table.state()["ids"].tolist() == [1, 2, 9]
    update(table, {3: 1, 4: 1}, 4)  # 1 and 9 were both seen in version 2, and 2 in version 3
    assert table.state()["ids"].tolist() == [2, 3, 4]
    update(table, dict.fromkeys(range(10, 16), 1), 5)
    assert table.state()["ids"].tolist() == [10, 11, 12]
    assert (table.counts.expired, table.counts.refused) == (6, 3)


def test_ids_that_wait_are_in_the_budget() -> None:
    spec = a_spec(admit_after=2)
    table = Table(replace(spec, table_bytes=spec.row_bytes))
    update(table, dict.fromkeys(range(100), 1), 1)
    assert 0 < table.waiting < 5


def test_a_full_table_goes_on_admitting_ids_when_others_expire() -> None:
    spec = a_spec(admit_after=2, when_full="expire")
    spec = replace(spec, table_bytes=spec.row_bytes * 10)
    table = Table(spec)
    for version in range(1, 200):
        update(table, {version // 2: 1}, version)
        assert len(table) * spec.row_bytes + table.waiting * 24 <= spec.row_bytes * 10
    assert table.state()["ids"].tolist() == list(range(91, 100))


def test_the_memory_of_a_row_is_what_is_stated() -> None:
    spec = a_spec(dim=16, dtype="float32", optimizer=Adagrad(lr=0.1))
    assert spec.row_bytes == 16 * 4 * 2 + 24
    table = Table(spec)
    ids = np.arange(50_000)
    for version, part in enumerate(np.split(ids, 10), start=1):
        table.update(part, torch.ones(len(part), 16), np.ones(len(part), dtype=np.int64), version)
        assert table.nbytes <= len(table) * spec.row_bytes + 8192


def test_a_copy_is_a_table_of_its_own() -> None:
    table = Table(a_spec())
    update(table, {1: 1}, 1)
    copied = copy.deepcopy(table)
    update(copied, {1: 1, 2: 1}, 2)
    assert (len(table), len(copied), copied.steps) == (1, 2, 2)
    assert not torch.equal(table.lookup(np.array([1])), copied.lookup(np.array([1])))


def test_the_order_of_ids_does_not_matter_to_the_rows() -> None:
    one, other = Table(a_spec()), Table(a_spec())
    update(one, {1: 1, 2: 1, 3: 1}, 1)
    for version, ids in ((1, [3]), (1, [2, 1])):
        array = np.array(ids, dtype=np.int64)
        other.update(array, gradient_of(array, 1), np.ones(len(ids), dtype=np.int64), version)
    assert torch.equal(one.state()["values"], other.state()["values"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (a_spec(dim=4), r"values should be \(1, 4\)"),
        (a_spec(dtype="float32"), "values should be .* of float32"),
        (a_spec(optimizer=LazyAdam(lr=1)), "LazyAdam: exp_avg should be .* nothing"),
    ],
)
def test_rows_of_another_kind_are_not_loaded(other: TableSpec, said: str) -> None:
    table, target = Table(a_spec()), Table(other)
    update(table, {1: 1}, 1)
    with pytest.raises(ModelMismatch, match=said):
        target.load_state(table.state())
    assert not len(target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": ""}, "name=''; expected 1 to 200"),
        ({"dim": 0}, "dim=0; expected a whole number"),
        ({"init": 3}, "init=3; expected uniform"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"dtype": "float16"}, "dtype='float16'; expected torch.float32"),
        ({"admit_after": 0}, "admit_after=0"),
        ({"expire_after": "1w"}, "expire_after='1w'; expected a number of versions .* a time such as \"7d\""),
        ({"table_bytes": 10}, "table_bytes=10; expected None, or at least 56, the bytes of one row"),
        ({"when_full": "drop"}, "when_full='drop'; expected \"refuse\""),
        ({"optimizer": torch.optim.SGD}, "optimizer=SGD"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        a_spec(**changes)


def test_layers_that_share_a_table_describe_it_alike() -> None:
    a_spec().require_same(a_spec())
    with pytest.raises(ModelMismatch, match=r"the table 'a' has init=Uniform.* in one layer and Normal"):
        a_spec().require_same(a_spec(init=normal(0, 1)))
