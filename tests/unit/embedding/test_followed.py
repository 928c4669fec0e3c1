"""A standby's tables beside those of its shard."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from elastic_ps.core.settings import Application, Divisors, Settings
from elastic_ps.embedding import LazyAdam, Table, TableSpec, uniform
from elastic_ps.embedding.followed import FollowingTables, StandbyRows
from elastic_ps.embedding.module import Gradient
from elastic_ps.embedding.served import ShardTables, StepRows
from elastic_ps.embedding.stored import parts_in
from elastic_ps.embedding.table import State
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.job.standby import LEADER
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.shard import Body

SPEC = TableSpec(
    name="a", dim=2, init=uniform(-1, 1), optimizer=LazyAdam(lr=0.1), admit_after=2, expire_after=5
)
OTHER = replace(SPEC, name="b", dim=200_000, admit_after=1)  # two rows are more than a block


def order(version: int, attempt: int) -> Application:
    """The order for a version of a step of each worker, with a stale one among them."""
    steps = [(worker, 1, 10 * version + attempt) for worker in range(2)]
    return Application(
        attempt, steps, 3.0, Settings(({"lr": 0.1},)), divisors=Divisors(1.0 + version % 2, 1.0)
    )


def alone(given: Application) -> Application:
    """The order for a standby, whose only contribution is the mean of its shard."""
    return replace(given, contributors=[LEADER])


@dataclass
class Pair:
    """A shard and its standby, which applies each round when the next one comes."""

    shard: ShardTables = field(default_factory=lambda: ShardTables(0, 1))
    standby: FollowingTables = field(default_factory=lambda: FollowingTables(0, 1))
    rows: StandbyRows = field(default_factory=StandbyRows)
    before: Application | None = None
    version: int = 0

    def round_(self, version: int, *, slow: bool, attempt: int = 0) -> None:
        self.stage(version, slow=slow, attempt=attempt)
        self.shard.apply(version, order(version, attempt))

    def stage(self, version: int, *, slow: bool, attempt: int = 0) -> None:
        self.push(version, attempt)
        now = order(version, attempt)
        self.send(version, now, slow=slow)
        if self.before is not None and self.version < version:
            self.standby.apply(self.version, alone(self.before))
        self.before, self.version = now, version

    def send(self, version: int, now: Application, *, slow: bool = False) -> None:
        """What the standby gets before an order."""
        for request, body in self.rows.messages(self.shard, version, now, lambda: slow):
            data = torch.from_numpy(np.frombuffer(body, np.uint8).copy())
            self.standby.follow(pb.RowsRequest.FromString(request.SerializeToString()), Body(data))

    def push(self, version: int, attempt: int = 0) -> None:
        for worker in range(2):
            gradients = {}
            for spec in (SPEC, OTHER):
                ids = np.unique((np.arange(3) * version * (worker + 1)) % 7)
                values = torch.full((len(ids), spec.dim), 0.1 * version + attempt)
                gradients[spec.name] = Gradient(ids, values, np.ones_like(ids))
            self.shard.push(worker, StepRows(1, 10 * version + attempt, 1.5, gradients), [SPEC, OTHER])

    def require_equal(self, version: int) -> None:
        mine, its = (_states(tables, version) for tables in (self.shard, self.standby))
        assert mine.keys() == its.keys()
        for name, state in mine.items():
            for column, value in state.items():
                assert torch.equal(torch.as_tensor(its[name][column]), torch.as_tensor(value)), column


def _ones(ids: list[int]) -> Gradient:
    there = np.array(ids, dtype=np.int64)
    return Gradient(there, torch.ones(len(ids), SPEC.dim), np.ones_like(there))


def _states(tables: ShardTables, version: int) -> dict[str, State]:
    """The rows of each table, in order of the ids, as a checkpoint would have them."""
    parts = defaultdict[int, dict[str, torch.Tensor]](dict)
    for each in tables.snapshot(version).read():
        parts[each.tensor][each.key] = each.value
    found: dict[str, Table] = {}
    for spec, part in parts_in(parts.values()):
        found.setdefault(spec.name, Table(spec)).merge(part)
    return {name: table.state() for name, table in found.items()}


@pytest.mark.parametrize("slow", [True, False])
def test_a_standby_that_begins_late_gets_the_rows_and_makes_the_same_steps(slow: bool) -> None:
    pair = Pair()
    for version in range(1, 5):
        pair.push(version)
        pair.shard.apply(version, order(version, 0))
    began = []
    for version in range(5, 25):
        pair.round_(version, slow=slow)
        began.append(pair.standby.whole)
    assert began == sorted(began)
    assert began[-1]
    assert began[0] is not slow
    pair.standby.apply(24, alone(order(24, 0)))
    pair.require_equal(24)


def test_a_standby_makes_the_attempt_that_its_shard_has_made() -> None:
    pair = Pair()
    pair.round_(1, slow=False)
    pair.stage(2, slow=False)  # withdrawn
    pair.round_(2, slow=False, attempt=1)
    pair.standby.apply(2, alone(order(2, 1)))
    pair.standby.apply(2, alone(order(2, 1)))  # ordered again
    pair.require_equal(2)


def test_a_standby_drops_the_rows_that_its_shard_drops_by_time() -> None:
    spec = replace(SPEC, admit_after=1, expire_after="32m")
    pair = Pair()
    for version in range(1, 140):
        used = 3 < version < 60 or version > 110
        step = StepRows(1, version, 1.0, {"a": _ones([version, 1000] if used else [])})
        pair.shard.push(0, step, [spec])
        made = Application(0, [(0, 1, version)], 1.0, Settings(({"lr": 0.1},)), time=61.0 * version)
        # It begins with one without rows, and in other terms with one that has some, and has them no more.
        if version in (3, 20, 105):
            pair.standby, pair.rows = FollowingTables(0, 1), StandbyRows()
        pair.send(version, made)
        pair.shard.apply(version, made)
        pair.standby.apply(version, alone(made))
        pair.require_equal(version)
    (counts,) = pair.shard.counts()
    assert (counts.expired, counts.rows) == (57, 30)


def test_a_standby_without_the_rows_of_a_round_refuses_it() -> None:
    pair = Pair()
    pair.standby.require(1, alone(order(1, 0)))  # it knows of no tables
    pair.round_(1, slow=False)
    pair.standby.require(1, alone(order(1, 0)))
    for version, attempt in ((1, 1), (2, 0)):
        with pytest.raises(Refused, match="has no rows of version") as refused:
            pair.standby.require(version, order(version, attempt))
        assert refused.value.code is RefusalCode.INVALID


def test_a_standby_goes_on_when_a_table_appears_later() -> None:
    """It has the rows of the rounds before, which had none."""
    pair, without = Pair(), Application(0, [], 1.0, Settings(({"lr": 0.1},)))
    for version in (1, 2):
        pair.send(version, without)
        pair.standby.require(version - 1, alone(without))
        pair.standby.apply(version - 1, alone(without))
        pair.shard.apply(version, without)
    pair.push(3)
    pair.send(3, order(3, 0))
    pair.standby.require(2, alone(without))
    pair.standby.apply(2, alone(without))
    pair.shard.apply(3, order(3, 0))
    with pytest.raises(Refused, match="has no rows of version 3"):
        pair.standby.require(3, alone(order(3, 1)))
    pair.standby.require(3, alone(order(3, 0)))
    pair.standby.apply(3, alone(order(3, 0)))
    pair.require_equal(3)


def test_rows_that_have_arrived_are_not_taken_for_those_of_an_earlier_version() -> None:
    pair = Pair()
    pair.round_(1, slow=False)
    pair.round_(2, slow=False)
    with pytest.raises(Refused, match="are of version 1, not 2") as refused:
        pair.standby.snapshot(2)
    assert refused.value.code is RefusalCode.NOT_READY


def test_a_shard_follows_no_other_one() -> None:
    with pytest.raises(Refused, match="shard 0 is not a standby"):
        ShardTables(0, 1).follow(pb.RowsRequest(), Body(torch.empty(0)))
