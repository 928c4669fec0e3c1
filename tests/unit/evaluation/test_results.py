"""Which checkpoints an evaluator is to take, which are kept, and which is the best."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.evaluation.decisions import ATTEMPTS, MOST, Evaluations


def test_a_checkpoint_is_wanted_once_for_each_stretch_of_versions() -> None:
    work = Evaluations(every=50)
    wanted = []
    for version in (0, 10, 49, 53, 60, 99, 100, 101, 260):
        if work.wants(version):
            wanted.append(version)
            work.add(version)
    assert wanted == [53, 100, 260]


def test_without_every_each_checkpoint_but_the_first_is_wanted() -> None:
    work = Evaluations()
    assert not work.wants(0)
    work.add(3)
    assert not work.wants(3)
    assert work.wants(4)
    assert not work.asks(4, since=0)  # nothing is written for the evaluator alone


def test_a_checkpoint_is_asked_for_when_the_stretch_begins() -> None:
    work = Evaluations(every=50)
    assert next(version for version in range(1, 110) if work.asks(version, since=0)) == 50
    assert not work.asks(51, since=50)  # it has begun, and is not on disk yet
    assert work.asks(100, since=50)


def test_the_oldest_that_nobody_has_begun_is_given_up_when_too_many_wait() -> None:
    work = Evaluations(backlog=2)
    work.add(1)
    assert work.begin("a") == 1
    for version in (2, 3, 4):
        work.add(version)
    assert (work.waiting, work.missed) == ([1, 3, 4], [2])
    assert work.held == {1, 3, 4}


def test_they_are_taken_in_order_and_what_is_repeated_counts_once() -> None:
    work = Evaluations()
    work.add(1)
    work.add(2)
    assert (work.begin("a"), work.begin("a")) == (1, 1)  # the answer was lost
    assert work.finish(1, {"loss": 0.5}) is not None
    assert work.finish(1, {"loss": 0.5}) is None
    assert work.begin("a") == 2
    assert work.finish(2, {"loss": 0.4, "odd": math.nan}) is not None
    assert [(r.version, dict(r.metrics)) for r in work.results] == [(1, {"loss": 0.5}), (2, {"loss": 0.4})]
    assert work.begin("a") is None


def test_a_checkpoint_over_which_processes_die_does_not_block_the_others() -> None:
    work = Evaluations()
    work.add(1)
    work.add(2)
    assert [work.begin(f"process {n}") for n in range(ATTEMPTS + 1)] == [1] * ATTEMPTS + [2]
    assert work.missed == [1]


@pytest.mark.parametrize(("highest", "best"), [(False, 2), (True, 1)])
def test_the_best_is_kept(highest: bool, best: int) -> None:
    work = Evaluations(metric="loss", highest=highest)
    for version, loss in ((1, 0.9), (2, 0.1), (3, 0.1), (4, 0.5)):
        work.add(version)
        work.begin("a")
        work.finish(version, {"loss": loss})
    assert work.best is not None
    assert work.best.version == best  # of equal ones the first
    assert work.held == {best}
    assert (work.status().best_version, work.status().version) == (best, 4)


def test_what_nobody_reported_is_not_the_best() -> None:
    work = Evaluations(metric="accuracy")
    work.add(1)
    work.begin("a")
    work.finish(1, {"loss": 0.1})
    assert work.best is None


def test_the_last_version_is_added_once_whatever_every_says() -> None:
    work = Evaluations(every=100)
    for _ in range(2):
        work.add_last(130)
    assert work.waiting == [130]
    work.begin("a")
    work.finish(130, {})
    work.add_last(130)
    assert work.waiting == []
    work.add_last(0)  # nothing was trained
    assert work.waiting == []


def test_going_back_forgets_what_is_made_anew() -> None:
    work = Evaluations(every=10, metric="loss")
    for version in (10, 20, 30, 40):
        work.add(version)
    for loss in (0.5, 0.1):
        begun = work.begin("a")
        assert begun is not None
        work.finish(begun, {"loss": loss})
    work.go_back(15, [10])
    assert work.best is not None
    assert (work.waiting, work.best.version, work.newest) == ([], 10, 15)
    assert work.wants(20)


def test_a_checkpoint_that_was_deleted_is_not_the_best() -> None:
    """As after a resume with another metric, for which nothing was kept."""
    work = Evaluations(metric="loss")
    for version, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        work.add(version)
        work.begin("a")
        work.finish(version, {"loss": loss})
    work.go_back(3, [2, 3])
    assert work.best is not None
    assert (work.best.version, work.held) == (3, frozenset({3}))


def test_a_long_job_remembers_some_of_its_results_and_counts_all() -> None:
    """The best and the last are among them, and first and last show how the training went."""
    work = Evaluations(metric="loss")
    for version in range(1, 10_001):
        work.add(version)
        if version % 5 == 0:
            work.give_up(version)
        else:
            work.finish(version, {"loss": 0.0 if version == 1234 else 1.0})
    left, status = [each.version for each in work.results], work.status()
    assert len(left) <= MOST
    assert len(work.missed) <= MOST
    assert {1234, 9999} <= set(left)
    assert left == sorted(left)
    assert max(after - before for before, after in itertools.pairwise([0, *left])) <= 20
    assert (status.best_version, status.version) == (1234, 9999)
    assert (status.evaluated, status.missed) == (8000, 2000)
    again = Evaluations(metric="loss")
    again.restore(json.loads(json.dumps(work.to_json())))
    assert (again.status(), again.held) == (status, work.held)
    work.go_back(5000, [])
    assert 3950 <= work.status().evaluated <= 4000
    work.go_back(0, [])
    assert (work.status().evaluated, work.status().missed) == (0, 0)


@given(st.lists(st.sampled_from(["write", "begin", "finish", "die"]), max_size=60), st.integers(1, 3))
def test_every_checkpoint_is_evaluated_or_counted_as_missed(steps: list[str], backlog: int) -> None:
    work, version, process, current = Evaluations(backlog=backlog), 0, 0, None
    for step in steps:
        if step == "write":
            version += 1
            work.add(version)
        elif step == "begin":
            current = work.begin(str(process))
        elif step == "finish" and current is not None:
            work.finish(current, {})
            current = None
        elif step == "die":
            process, current = process + 1, None
        again = Evaluations(backlog=backlog)
        again.restore(json.loads(json.dumps(work.to_json())))
        assert again.to_json() == work.to_json()
        assert len(work.waiting) <= backlog + 1
        assert sorted([*work.waiting, *work.missed, *(r.version for r in work.results)]) == list(
            range(1, version + 1)
        )
