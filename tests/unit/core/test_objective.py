"""The controller of `maxStalenessP99`: it keeps the objective, and does not go to and fro."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.objective import CALM, LONGEST, Objective, ways


def described(**desired: Any) -> list[dict[str, Any]]:
    found = ways(Consistency.model_validate(desired))
    return [each.model_dump(by_alias=True, exclude_defaults=True) for each in found]


def test_the_ways_of_a_job_that_begins_with_async() -> None:
    said = {"maxStalenessP99": 4}
    scale = {"stalenessScale": "inverse"}
    desired = {"mode": "async", "reads": "inconsistent", **said, **scale}
    assert described(**desired) == [said, {"mode": "bounded", "maxStaleness": 4, **said, **scale}, desired]


@pytest.mark.parametrize(
    ("desired", "expected"),
    [
        ({"maxStalenessP99": 4}, ["sync", "bounded 4", "async"]),
        ({"mode": "async", "maxStalenessP99": 0}, ["sync", "async"]),
        ({"mode": "bounded", "maxStaleness": 16, "maxStalenessP99": 4}, ["sync", "bounded 4", "bounded 16"]),
        ({"mode": "bounded", "maxStaleness": 4, "maxStalenessP99": 4}, ["sync", "bounded 4"]),
        ({"mode": "bounded", "maxStaleness": 2, "maxStalenessP99": 4}, ["sync", "bounded 2"]),
    ],
)
def test_a_bound_that_a_person_has_named_is_kept(desired: dict[str, Any], expected: list[str]) -> None:
    found = ways(Consistency.model_validate(desired))
    assert Consistency.model_validate(desired) in found
    assert [f"{w.mode} {w.max_staleness}" if w.max_staleness else w.mode for w in found] == expected


class Fleet:
    """Steps as they come, seen by a controller in windows: a step is as stale as the way lets it be.

    Attributes:
        at: the way that is taken, of `ways`.
        natural: the staleness of 99 of 100 steps where nothing bounds it.
    """

    def __init__(self, most: int) -> None:
        self.most, self.objective = most, Objective()
        self.bounds: list[float] = [0, *([most] if most else []), float("inf")]
        self.at = len(self.bounds) - 1
        self.moves = 0

    def window(self, natural: int) -> int:
        """A window of steps, and what is decided after it. Returns their staleness."""
        seen = int(min(natural, self.bounds[self.at]))
        step = self.objective.decide(seen, self.most)
        if step and 0 <= self.at + step < len(self.bounds):
            if step > 0:
                self.objective.tried()
            self.at, self.moves = self.at + step, self.moves + 1
        return seen


@given(
    most=st.integers(0, 20),
    phases=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300)), min_size=1, max_size=6),
)
def test_the_objective_is_missed_in_few_windows_whatever_comes(
    most: int, phases: list[tuple[int, int]]
) -> None:
    """As often as what comes changes, and then ever more rarely."""
    fleet = Fleet(most)
    for natural, windows in phases:
        before = fleet.moves
        missed = sum(fleet.window(natural) > most for _ in range(windows))
        assert missed <= 1, "a constant load lets it be missed once: a bound shows how stale steps want to be"
        assert fleet.moves - before <= 2 * len(fleet.bounds)
        if windows > len(fleet.bounds) * (LONGEST + 1):
            free = fleet.at == len(fleet.bounds) - 1
            assert free == (2 * natural <= most and most > 0) or natural <= most, (natural, most)


@given(st.lists(st.integers(0, 9), min_size=10, max_size=600))
def test_a_load_that_changes_all_the_time_does_not_move_a_job_all_the_time(naturals: list[int]) -> None:
    fleet = Fleet(4)
    for natural in naturals:
        fleet.window(natural)
    assert fleet.moves <= 2 + 2 * len(naturals) / CALM


def test_a_guess_that_was_wrong_makes_the_next_one_take_twice_as_long() -> None:
    fleet, tried = Fleet(4), list[int]()
    fleet.at = 1
    for _ in range(9):
        windows = 0
        while fleet.at == 1:
            fleet.window(0)
            windows += 1
        tried.append(windows)
        fleet.window(9)
    assert tried == [3, 6, 12, 24, 48, 96, 96, 96, 96]


def test_a_guess_that_stood_the_test_is_forgiven() -> None:
    fleet = Fleet(4)
    fleet.at = 1
    for _ in range(CALM):
        fleet.window(0)
    fleet.window(9)
    assert (fleet.at, fleet.objective.needed) == (1, 2 * CALM)
    for _ in range(2 * CALM):
        fleet.window(0)
    assert fleet.at == 2
    for _ in range(2 * CALM):
        fleet.window(1)
    assert fleet.objective.needed == CALM
    fleet.window(9)
    assert (fleet.at, fleet.objective.needed) == (1, CALM)
