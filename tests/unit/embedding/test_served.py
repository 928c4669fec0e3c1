"""A shard's tables: the rows of steps, the versions made of them, and their columns in checkpoints."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
import pytest
import torch

from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec.state import Stored
from elastic_ps.core.settings import Application, Divisors, Settings
from elastic_ps.embedding import SGD, Adagrad, Table, TableSpec, normal, uniform
from elastic_ps.embedding.module import Gradient
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.served import Contributor, ShardTables, StepRows, read_body
from elastic_ps.embedding.stored import part_of, parts_in, spec_from_text, spec_to_text
from elastic_ps.embedding.table import WhenFull
from elastic_ps.errors import CheckpointCorrupt, ConnectionLost, InvalidModel, Malformed, RefusalCode, Refused
from elastic_ps.transport.base import Incoming

DIM = 2
SPEC = TableSpec(
    name="a", dim=DIM, init=uniform(-1, 1), optimizer=SGD(lr=1.0), dtype="float64", admit_after=2
)


def gradient(ids: Sequence[int], value: float = 1.0, count: int = 2) -> Gradient:
    values = torch.full((len(ids), DIM), value, dtype=torch.float64)
    return Gradient(np.array(ids, dtype=np.int64), values, np.full(len(ids), count))


def push(
    tables: ShardTables, worker: int, number: int, rows: Gradient, *, samples: int = 1, incarnation: int = 1
) -> bool:
    return tables.push(worker, StepRows(incarnation, number, samples, {"a": rows}), [SPEC])


def order(steps: Collection[Contributor], weight: float) -> Application:
    return Application(0, steps, weight, Settings(({"lr": 0.1},)))


def lookup(tables: ShardTables, ids: Iterable[int], spec: TableSpec = SPEC) -> torch.Tensor:
    """The values of rows for a worker that has none of them."""
    return tables.lookup_since(spec, np.array([*ids]), held=0, version=0)[2]


def change(tables: ShardTables, id_: int) -> float:
    """How far the row has come from its first values."""
    return float((lookup(tables, [id_]) - lookup(ShardTables(0, 1), [id_]))[0, 0])


def test_a_version_has_the_mean_over_all_records_of_its_steps() -> None:
    tables = ShardTables(0, 1)
    push(tables, 1, 0, gradient([5, 7], 4.0), samples=3)
    push(tables, 0, 0, gradient([5], 8.0), samples=1)
    steps = {(0, 1, 0), (1, 1, 0)}
    tables.require(1, order(steps, 4))
    tables.apply(1, order(steps, 4))
    assert [change(tables, 5), change(tables, 7)] == pytest.approx([-5.0, -3.0])


def test_a_step_counts_once_and_only_if_it_is_chosen() -> None:
    tables = ShardTables(0, 1)
    assert push(tables, 0, 0, gradient([1]))
    assert not push(tables, 0, 0, gradient([1], 100.0))
    tables.apply(1, order({(0, 1, 0)}, 1))
    assert not push(tables, 0, 0, gradient([1], 100.0))  # a late copy
    tables.apply(2, order((), 0))
    assert change(tables, 1) == pytest.approx(-1.0)
    push(tables, 0, 1, gradient([1]))
    assert push(tables, 0, 0, gradient([1], 3.0), incarnation=2)  # the worker has joined again
    tables.apply(3, order({(0, 2, 0)}, 1))
    assert change(tables, 1) == pytest.approx(-4.0)


def test_several_steps_of_a_worker_may_be_in_a_version() -> None:
    tables = ShardTables(0, 1)
    for number in range(3):
        push(tables, 0, number, gradient([number]), samples=number + 1)
    assert not push(tables, 0, 1, gradient([1], 100.0), samples=2)
    tables.require(1, order({(0, 1, 0), (0, 1, 1)}, 3))
    tables.apply(1, order({(0, 1, 0), (0, 1, 1)}, 3))
    tables.apply(2, order({(0, 1, 2)}, 3))
    assert [change(tables, i) for i in range(3)] == pytest.approx([-1 / 3, -2 / 3, -1.0])


def test_rows_have_the_learning_rate_of_a_stale_step_and_of_a_scheduler_if_they_are_to() -> None:
    specs = [replace(SPEC, name=name, optimizer=SGD(lr=1.0, scheduled=name == "b")) for name in "ab"]
    specs.append(replace(SPEC, name="c", optimizer=Adagrad(lr=1.0, eps=1.0)))
    tables = ShardTables(0, 1)
    tables.push(0, StepRows(1, 0, 1, {spec.name: gradient([1]) for spec in specs}), specs)
    settings = Settings(({"lr": 0.05},), first=({"lr": 0.8},))  # the scheduler has made 0.2 of 0.8
    tables.apply(1, Application(0, [(0, 1, 0)], 1, settings, divisors=Divisors(4.0, 2.0)))
    first = [lookup(ShardTables(0, 1), [1], spec) for spec in specs]
    now = [lookup(tables, [1], spec) for spec in specs]
    moved = [float((before - after)[0, 0]) for before, after in zip(first, now, strict=True)]
    assert moved == pytest.approx([1 / 4, 1 / 16, 1 / 4])


@pytest.mark.parametrize(("optimizer", "rate"), [(SGD, 1 / 4), (Adagrad, 1 / 2)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_rows_are_slowed_as_their_own_optimizer_is_not_as_that_of_the_model(
    optimizer: type[SGD | Adagrad], rate: float, scheduled: bool
) -> None:
    """The model's Adam has half of its rate of 0.8, since the step is stale."""
    groups, first = [{"lr": 0.4, "eps": 1e-8}], [{"lr": 0.8, "eps": 1e-8}]
    rows = optimizer(lr=1.0, scheduled=scheduled)
    assert rows.rate_of(groups, first, Divisors(4.0, 2.0)) == pytest.approx(rate)


def test_the_largest_rate_of_one_cycle_is_that_of_the_rows() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    model = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    first = [dict(group) for group in model.param_groups]
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(model, max_lr=0.1, total_steps=10)
    rates = []
    for _ in range(10):
        rates.append(SGD(lr=1.0, scheduled=True).rate_of(model.param_groups, first))
        model.step()
        one_cycle.step()
    assert max(rates) == pytest.approx(1.0)
    assert rates[0] == pytest.approx(1 / 25)


def test_the_steps_of_a_table_are_the_same_on_each_shard() -> None:
    """Lazy Adam corrects its bias by their number."""
    tables = ShardTables(0, 2)
    for number, ids in enumerate(([1], [], [])):
        push(tables, 0, number, gradient(ids))
        tables.apply(number + 1, order({(0, 1, number)}, 1))
    (steps,) = [each.value.item() for each in tables.snapshot(3).read() if each.key == "steps"]
    assert steps == 3


def test_the_rows_of_a_lost_step_are_not_kept() -> None:
    tables = ShardTables(0, 1)
    for number in range(3):
        push(tables, 0, number, gradient([1]))
    push(tables, 1, 0, gradient([1]))
    tables.push(0, StepRows(1, 3, 1, {"a": gradient([1])}), [SPEC], lost=[0, 2, 9])
    assert tables.waiting_steps == 3
    with pytest.raises(Refused):
        tables.require(1, order({(0, 1, 2)}, 1))
    tables.require(1, order({(0, 1, 1), (0, 1, 3), (1, 1, 0)}, 3))


def test_the_rows_of_a_step_are_not_kept_when_it_was_made() -> None:
    tables, rows = ShardTables(0, 1), gradient([1])
    kept = weakref.ref(rows.values)
    push(tables, 0, 0, rows)
    del rows
    assert kept() is not None
    tables.apply(1, order({(0, 1, 0)}, 1))
    assert kept() is None


def test_a_version_needs_the_rows_of_all_its_steps() -> None:
    tables = ShardTables(0, 1)
    tables.require(1, order({(0, 1, 0)}, 1))  # a model without tables
    push(tables, 0, 1, gradient([1]), samples=2)
    for steps, samples in (({(0, 1, 0)}, 2), ({(0, 1, 1), (1, 1, 1)}, 2), ({(0, 1, 1)}, 3)):
        with pytest.raises(Refused) as refused:
            tables.require(1, order(steps, samples))
        assert refused.value.code is RefusalCode.INVALID
    tables.require(1, order({(0, 1, 1)}, 2))


def test_look_ups_and_rows_are_counted() -> None:
    tables = ShardTables(0, 1)
    assert tables.counts() == ()
    push(tables, 0, 0, gradient([1, 2]))
    push(tables, 1, 0, gradient([3], count=1))
    tables.apply(1, order({(0, 1, 0), (1, 1, 0)}, 2))
    lookup(tables, [1, 1, 3, 4])
    (found,) = tables.counts()
    assert (found.name, found.rows, found.waiting, found.admitted) == ("a", 2, 1, 2)
    assert (found.looked_up, found.hits, found.expired, found.refused) == (4, 2, 0, 0)
    assert found.size_bytes >= 2 * SPEC.row_bytes - 24


def test_a_worker_gets_again_only_the_rows_that_have_changed() -> None:
    tables, ids = ShardTables(0, 1), np.array([1, 2, 3, 4])
    push(tables, 0, 0, gradient([1, 2]))
    tables.apply(7, order({(0, 1, 0)}, 1))
    version, places, before = tables.lookup_since(SPEC, ids, held=0, version=0)
    assert (version, places.tolist()) == (7, [0, 1, 2, 3])
    push(tables, 0, 1, gradient([2, 3]))
    tables.apply(8, order({(0, 1, 1)}, 1))
    version, places, values = tables.lookup_since(SPEC, ids, held=3, version=7)
    assert (version, places.tolist()) == (8, [1, 2, 3])
    before[torch.from_numpy(places)] = values
    assert torch.equal(before, lookup(tables, ids))
    assert tables.life != ShardTables(0, 1).life


def test_rows_that_are_not_finite_or_of_another_table_are_refused() -> None:
    tables = ShardTables(0, 1)
    with pytest.raises(Refused, match="the table 'a' of worker 3 holds NaN or Inf") as refused:
        push(tables, 3, 0, gradient([1], float("nan")))
    assert refused.value.code is RefusalCode.NOT_FINITE
    push(tables, 0, 0, gradient([1]))
    said = (
        r"has init=Uniform.* in the job, or in the checkpoint that it began with, and Normal.* in this worker"
    )
    with pytest.raises(Refused, match=said) as refused:
        lookup(tables, [1], replace(SPEC, init=normal(0, 1)))
    assert refused.value.code is RefusalCode.MODEL_MISMATCH


def parts_of(stored: Iterable[Stored]) -> list[dict[str, torch.Tensor]]:
    """The columns of each table as a reader of their file gives them."""
    found: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for each in stored:
        assert each.value.numel()
        found[each.tensor][each.key] = each.value.reshape(-1)
    return list(found.values())


class Merged(NamedTuple):
    """A reader of a checkpoint with these parts."""

    rows: Callable[[], list[dict[str, torch.Tensor]]]


def test_all_rows_are_in_the_columns_of_two_shards_once() -> None:
    other = replace(SPEC, name="b", optimizer=Adagrad(lr=1.0))
    parts: list[dict[str, torch.Tensor]] = []
    for shard in range(2):
        tables = ShardTables(shard, 2)
        ids = np.arange(50)[shard_of(np.arange(50), 2) == shard]
        new, old = gradient(ids[::2].tolist(), count=1), gradient(ids[1::2].tolist())
        tables.push(0, StepRows(1, 0, 1, {"a": new, "b": old}), [SPEC, other])
        tables.apply(1, order({(0, 1, 0)}, 1))
        parts += parts_of(tables.snapshot(1).read())
    found: dict[str, Table] = {}
    for spec, part in parts_in(parts, lambda ids: ids % 5 != 0):
        found.setdefault(spec.name, Table(spec)).merge(part)
    assert {name: table.spec for name, table in found.items()} == {"a": SPEC, "b": other}
    a, b = (found[name].state() for name in "ab")
    assert (len(a["ids"]), a["version"], a["steps"]) == (0, 1, 1)
    assert sorted([*a["waiting_ids"].tolist(), *b["ids"].tolist()]) == [i for i in range(50) if i % 5]
    assert b["sum"].tolist() == [[1.0, 1.0]] * len(b["ids"])
    with pytest.raises(CheckpointCorrupt, match="a table in the checkpoint is incomplete"):
        part_of({**parts[1], "counts": parts[1]["counts"][1:]})
    with pytest.raises(CheckpointCorrupt, match="a table in the checkpoint is incomplete"):
        part_of({**parts[1], "spec": parts[1]["spec"][1:]})


def test_a_table_is_as_it_was_when_it_is_loaded_by_as_many_servers() -> None:
    """Though ids that wait may take more than is left by rows that were admitted after them."""
    spec = replace(SPEC, table_bytes=3 * SPEC.row_bytes)
    tables = ShardTables(0, 1)
    for number, (ids, count) in enumerate([([1, 2, 3, 4], 1), ([5, 6, 7], 2)]):
        tables.push(0, StepRows(1, number, 1, {"a": gradient(ids, count=count)}), [spec])
        tables.apply(number + 1, order({(0, 1, number)}, 1))
    parts, again = parts_of(tables.snapshot(2).read()), ShardTables(0, 1)
    again.load(cast("Reader", Merged(lambda: parts)))
    (before,), (after,) = tables.counts(), again.counts()
    assert (after.rows, after.waiting) == (before.rows, before.waiting) == (3, 4)


def test_rows_that_later_parts_remove_are_in_no_budget() -> None:
    spec = replace(SPEC, admit_after=1, table_bytes=4 * SPEC.row_bytes, expire_after=2)
    every: list[list[dict[str, torch.Tensor]]] = [[], []]
    for shard in range(2):
        tables = ShardTables(shard, 2)
        old, new = (np.arange(first, 40)[shard_of(np.arange(first, 40), 2) == shard] for first in (0, 20))
        for number, ids in enumerate([old[:3], new[:1], new[:1], new[:1], new[:1]]):
            tables.push(0, StepRows(1, number, 1, {"a": gradient(ids.tolist())}), [spec])
            tables.apply(number + 1, order({(0, 1, number)}, 1))
            if number == 0:
                every[0] += parts_of(tables.snapshot(1).read())
        every[1] += parts_of(tables.snapshot(5, since=1).read())
    again = ShardTables(0, 1)
    again.load(cast("Reader", Merged(lambda: [*every[0], *every[1]])))
    assert again.counts()[0].rows == 2


@pytest.mark.parametrize("when_full", ["refuse", "expire"])
def test_full_tables_of_several_shards_are_no_more_than_full_on_one(when_full: WhenFull) -> None:
    spec = replace(SPEC, admit_after=1, table_bytes=10 * SPEC.row_bytes, when_full=when_full)
    parts: list[dict[str, torch.Tensor]] = []
    for shard in range(3):
        tables = ShardTables(shard, 3)
        ids = np.arange(60)[shard_of(np.arange(60), 3) == shard]
        for number, id_ in enumerate(ids.tolist()):
            tables.push(0, StepRows(1, number, 1, {"a": gradient([id_])}), [spec])
            tables.apply(id_ + 1, order({(0, 1, number)}, 1))
        assert tables.counts()[0].rows == 10
        parts += parts_of(tables.snapshot(60).read())

    merged, reader = ShardTables(0, 1), cast("Reader", Merged(lambda: parts))
    if when_full == "refuse":
        with pytest.raises(InvalidModel, match=r"'a' for one parameter server, but .* is enough for 10"):
            merged.load(reader)
    else:
        merged.load(reader)
        assert merged.counts()[0].rows == 10
        assert torch.equal(lookup(merged, range(50), spec), lookup(ShardTables(0, 1), range(50), spec))


def test_a_body_takes_memory_only_as_it_arrives() -> None:
    """Nothing says how many rows a step may have, so whoever can call could announce any number."""
    taken: list[int] = []

    class Announced:
        size = 1 << 29

        def read_into(self, _: memoryview) -> None:
            taken.append(psutil.Process().memory_info().rss - before)
            raise ConnectionLost("nothing of it comes")

    before = psutil.Process().memory_info().rss
    with pytest.raises(ConnectionLost):
        read_body(cast("Incoming", Announced()))
    assert taken[0] < Announced.size // 8


def test_a_description_survives_the_way() -> None:
    third: Any = np.float32(1 / 3)  # which JSON does not have
    text = spec_to_text(replace(SPEC, optimizer=SGD(lr=1.0)))
    assert spec_to_text(replace(SPEC, optimizer=SGD(lr=1))) == text, "descriptions are compared"
    for spec in (SPEC, replace(SPEC, init=uniform(0, third), optimizer=SGD(lr=third))):
        assert spec_from_text(spec_to_text(spec)) == spec
    for text in (
        "{}",
        "[",
        "x" * 5000,
        spec_to_text(SPEC).replace("SGD", "Adam"),
        spec_to_text(SPEC).replace('"dim": 2', '"dim": 0'),
    ):
        with pytest.raises(Malformed, match="this describes no table"):
            spec_from_text(text)
