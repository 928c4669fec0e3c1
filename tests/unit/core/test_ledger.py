"""Each position of each epoch is in one place at any time, and in the model once at the end."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_ps.core.ledger import Ledger, LedgerError, Range

Position = tuple[int, int]


def positions(ranges: list[Range]) -> list[Position]:
    """(epoch, position) of each record."""
    return [(r.epoch, position) for r in ranges for position in range(r.start, r.stop)]


class Bookkeeping(RuleBasedStateMachine):
    """A ledger beside a model of it: a set of positions for each holder, and what is in the model."""

    @initialize(
        records=st.integers(1, 40),
        epochs=st.integers(1, 3),
        shard_records=st.integers(1, 50),
        run=st.integers(0, 30),
    )
    def begin(self, records: int, epochs: int, shard_records: int, run: int) -> None:
        self.run_end = (lambda _, position: min(records, (position // run + 1) * run)) if run else None
        self.ledger = Ledger(records, epochs, shard_records, run_end=self.run_end)
        self.everything = {(e, p) for e in range(epochs) for p in range(records)}
        self.free = set(self.everything)
        self.held: dict[int, set[Position]] = {}
        self.applied: Counter[Position] = Counter()
        self.holders = 0

    @rule()
    def join(self) -> None:
        self.held[self.holders] = set()
        self.holders += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), batch=st.integers(1, 16))
    def take(self, data: st.DataObject, batch: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        taken = positions(self.ledger.take(holder, batch=batch, workers=len(self.held)))
        assert self.free.issuperset(taken)
        assert len(set(taken)) == len(taken)
        assert len(taken) <= max(batch, self.ledger.shard_records)
        assert bool(taken) == bool(self.free), "records are refused only when there are none"
        self.free -= set(taken)
        self.held[holder] |= set(taken)

    def _part(self, data: st.DataObject, holder: int) -> list[Range]:
        """Some of what `holder` holds, in pieces that it might have made batches of."""
        chosen = []
        for r in self.ledger.held(holder):
            start = data.draw(st.integers(r.start, r.stop))
            stop = data.draw(st.integers(start, r.stop))
            middle = data.draw(st.integers(start, stop))
            parts = (r._replace(start=start, stop=middle), r._replace(start=middle, stop=stop))
            chosen += [part for part in parts if part.records]
        return chosen

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        part = self._part(data, holder)
        self.ledger.apply(holder, part)
        self.held[holder] -= set(positions(part))
        self.applied.update(positions(part))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """Records that are skipped are done with: nobody is handed them again."""
        holder = data.draw(st.sampled_from(sorted(self.held)))
        part = self._part(data, holder)
        skipped = self.ledger.skipped
        self.ledger.skip(holder, part)
        assert self.ledger.skipped == skipped + len(positions(part))
        self.held[holder] -= set(positions(part))
        self.everything -= set(positions(part))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), leaves=st.booleans())
    def give_back(self, data: st.DataObject, leaves: bool) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        keep = [] if leaves else self._part(data, holder)
        self.ledger.give_back(holder, keep=keep)
        self.free |= self.held[holder] - set(positions(keep))
        self.held[holder] = set(positions(keep))
        if leaves:
            del self.held[holder]

    @precondition(lambda self: self.everything)
    @rule(
        holder=st.integers(0, 8),
        epoch=st.integers(0, 3),
        start=st.integers(-2, 40),
        length=st.integers(-1, 9),
    )
    def steal(self, holder: int, epoch: int, start: int, length: int) -> None:
        """Whoever names records that it does not hold is refused, and nothing changes."""
        r = Range(epoch, start, start + length)
        if length < 1 or not self.held.get(holder, set()).issuperset(positions([r])):
            before = self.ledger.state()
            with pytest.raises(LedgerError):
                self.ledger.apply(holder, [r])
            with pytest.raises(LedgerError):
                self.ledger.skip(holder, [r])
            with pytest.raises(LedgerError):
                self.ledger.held(holder, besides=[r])
            with pytest.raises(LedgerError):
                self.ledger.give_back(holder, keep=[r])
            assert self.ledger.state() == before

    @rule()
    def restart(self) -> None:
        """The parameter server dies and goes on from a checkpoint: its workers are gone."""
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger = Ledger.from_state(state, shard_records=self.ledger.shard_records)
        self.ledger.run_end = self.run_end
        for held in self.held.values():
            self.free |= held
        self.held = {}

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for holder, held in self.held.items():
            found = positions(self.ledger.held(holder))
            assert len(found) == len(set(found))
            assert set(found) == held
        assert self.ledger.applied == self.applied.total() == len(self.applied)
        assert self.ledger.finished == (set(self.applied) == self.everything)
        missing = self.everything - set(self.applied)
        assert self.ledger.complete_epochs == min([e for e, _ in missing], default=self.ledger.epochs)

    def teardown(self) -> None:
        """Whatever has happened: two workers bring the job to its end, each record once."""
        if not hasattr(self, "ledger"):
            return
        for holder in self.held:
            self.ledger.give_back(holder)
        for turn in range(10 * len(self.everything) + 10):
            holder = 1000 + turn % 2
            taken = self.ledger.take(holder, batch=3, workers=2)
            self.ledger.apply(holder, taken)
            self.applied.update(positions(taken))
        assert self.ledger.finished
        assert self.applied == Counter(self.everything)


Bookkeeping.TestCase.settings = settings(stateful_step_count=30)
TestBookkeeping = Bookkeeping.TestCase


def test_ranges_become_smaller_near_the_end_so_that_workers_end_together() -> None:
    ledger = Ledger(records=1000, epochs=1, shard_records=256)
    sizes = []
    while taken := ledger.take(1, batch=10, workers=2):
        ledger.apply(1, taken)
        sizes.append(taken[0].records)
    assert sizes[0] == 250
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 10


def test_records_that_came_back_go_out_first() -> None:
    ledger = Ledger(records=100, epochs=1, shard_records=10)
    ledger.take(1, batch=10, workers=1)
    ledger.take(2, batch=10, workers=1)
    ledger.give_back(1)
    assert ledger.take(3, batch=10, workers=1) == [Range(0, 0, 10)]


def test_records_that_came_back_in_pieces_are_joined() -> None:
    """Or the ledger would end in crumbs, each of which costs a worker a call, as workers come and go."""
    ledger = Ledger(records=64, epochs=1, shard_records=64)
    for holder in range(64):
        ledger.take(holder, batch=1, workers=1000)
    for holder in range(64):
        ledger.give_back(holder)
    assert ledger.state()["returned"] == [[0, 0, 64]]


def test_records_of_different_epochs_are_not_joined() -> None:
    ledger = Ledger(records=4, epochs=2, shard_records=4)
    for holder in (1, 2):
        ledger.take(holder, batch=4, workers=1)
        ledger.give_back(holder, keep=ledger.held(holder))
    ledger.give_back(1)
    ledger.give_back(2)
    assert ledger.state()["returned"] == [[0, 0, 4], [1, 0, 4]]


def test_a_worker_that_is_alone_gets_half_of_what_is_left() -> None:
    ledger = Ledger(records=40, epochs=1, shard_records=100)
    assert [ledger.take(1, batch=1, workers=1)[0].records for _ in range(3)] == [20, 10, 5]


def described(*returned: list[int]) -> dict[str, Any]:
    """A ledger of 3 epochs of 10 records, all of epochs 0 and 1 handed out."""
    count = sum(stop - start for _, start, stop in returned)
    numbers = {"records": 10, "epochs": 3, "applied": 20 - count, "skipped": 0}
    return {**numbers, "next": [2, 0], "returned": list(returned)}


def test_a_description_is_taken_over() -> None:
    ledger = Ledger.from_state(described([1, 0, 3], [0, 8, 10]), shard_records=10)
    assert (ledger.applied, ledger.total) == (15, 30)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[0, 0, 5], [0, 4, 8]], "cannot have been given back"),
        ([[0, 4, 8], [0, 4, 8]], "cannot have been given back"),
        ([[0, 8, 11]], "cannot have been given back"),
        ([[0, -1, 4]], "cannot have been given back"),
        ([[0, 5, 5]], "cannot have been given back"),
        ([[-1, 0, 4]], "cannot have been given back"),
        ([[2, 0, 1]], "has not been handed out"),
        ([[1, 0, 4.0]], "impossible"),
    ],
)
def test_a_description_in_which_a_record_is_in_two_places_is_refused(
    returned: list[list[int]], message: str
) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger.from_state(described(*returned), shard_records=10)


@pytest.mark.parametrize("change", [{"applied": 21}, {"applied": 19}, {"skipped": 1}, {"next": [3, 1]}])
def test_a_description_whose_numbers_do_not_add_up_is_refused(change: dict[str, Any]) -> None:
    """It would be finished too early, or never."""
    with pytest.raises(LedgerError, match="records are in the model"):
        Ledger.from_state(described() | change, shard_records=10)
