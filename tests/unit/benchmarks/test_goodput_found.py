"""What the benchmark of the speed under faults finds out: costs, standstills, and who was there."""

from __future__ import annotations

import pytest

from benchmarks.goodput import schedule
from benchmarks.goodput_found import (
    Between,
    Fault,
    Mark,
    Measured,
    costs,
    measured,
    presence,
    rows,
    standstill,
)
from benchmarks.goodput_systems import CLEAN
from benchmarks.goodput_there import Presence, Span, merged


def kill(worker: int, at: float) -> Mark:
    return Mark(Fault(at, "kill", worker, 1.0), at, 0)


def freeze(worker: int, at: float, lasting: float) -> Mark:
    return Mark(Fault(at, "freeze", worker, lasting), at, 0)


def test_the_longest_standstill_is_between_samples_that_are_new() -> None:
    assert standstill([(0.0, 10), (1.0, 20), (2.0, 20), (4.0, 30), (5.0, 30)]) == 3.0
    assert standstill([(0.0, 10), (1.0, 20), (2.0, 15), (3.0, 18), (4.0, 21), (5.0, 22)]) == 3.0
    assert standstill([(0.0, 10), (9.0, 10)]) == 9.0


def test_what_a_fault_costs_is_the_training_that_is_missing_until_the_next_one() -> None:
    quiet = Measured(100.0, 60.0, 0, [], CLEAN)
    between = [Between("kill", 10.0, 900), Between("freeze", 5.0, 500), Between("kill", 10.0, 700)]
    disturbed = Measured(80.0, 30.0, 3, between, CLEAN)
    assert costs(quiet, disturbed) == {"kill": pytest.approx(2.0), "freeze": pytest.approx(0.0)}
    assert "kill 2.0 s (2.0 s), freeze 0.0 s (0.0 s)" in rows("sync", quiet, disturbed, 20.0)
    assert " 0.80         4.00 " in rows("sync", quiet, disturbed, 20.0)


def test_a_machine_that_is_away_costs_its_share_whatever_the_system_does() -> None:
    """Three machines; one is away for 20 of 60 s, and what the others do counts at once."""
    quiet = Measured(90.0, 60.0, 0, [], CLEAN)
    marks = [Mark(Fault(10.0, "kill", 0, 1.0), 10.0, 900), Mark(None, 60.0, 4800)]
    disturbed = measured(
        [(0.0, 0), (10.0, 900), (30.0, 2100), (60.0, 4800)], marks, CLEAN, workers=3, gone=20.0
    )
    assert disturbed.there == pytest.approx(8 / 9)
    assert costs(quiet, disturbed) == {"kill": pytest.approx(20 / 3)}
    assert costs(quiet, disturbed, beside_absence=True) == {"kill": pytest.approx(0.0)}
    said = rows("bounded", quiet, disturbed, None)
    assert "kill 6.7 s (0.0 s)" in said
    assert "there for 0.89 of the time, and did 1.00 of what they can in it" in said


def test_a_standstill_while_nobody_is_there_is_not_the_systems() -> None:
    """All three machines are away for 10 s; the one that is back first needs 1.5 s to train again."""
    marks = [kill(0, 0.0), kill(2, 4.0), kill(1, 10.0), Mark(None, 24.0, 0)]
    seen = [
        (0.0, 190),
        (2.0, 192),
        (4.0, 194),
        (6.0, 196),
        (8.0, 198),
        (10.0, 200),
        (16.0, 200),
        (21.5, 210),
        (24.0, 220),
    ]
    quiet = Measured(90.0, 60.0, 0, [], CLEAN)
    found = measured(seen, marks, CLEAN, workers=3, gone=20.0)
    assert (found.standstill, found.nobody, found.stalled) == (11.5, 10.0, 2.5)
    said = rows("bounded", quiet, found, None)
    assert "the longest standstill: 11.5 s (2.5 s)" in said
    assert "nobody was there for up to 10.0 s" in said


def test_the_documented_schedule_takes_all_machines_away_for_ten_seconds() -> None:
    marks = [Mark(fault, fault.at, 0) for fault in schedule(0, 600.0, 3, 10.0)]
    there = presence(marks, 3, 20.0)
    assert there.longest_without(600.0) == pytest.approx(9.9, abs=0.05)
    assert there.share(0.0, 600.0) == pytest.approx(0.82, abs=0.01)
    without_machines = presence(marks, 3, 0.0)
    assert without_machines.nobody == []


def test_a_worker_that_is_frozen_is_not_there_until_it_thaws_or_is_killed() -> None:
    marks = [freeze(0, 0.0, 8.0), freeze(0, 2.0, 4.0), freeze(1, 6.0, 8.0), kill(1, 10.0)]
    there = presence(marks, 2, 0.0)
    assert there.nobody == [Span(6.0, 8.0)]
    assert there.share(0.0, 12.0) == 0.5
    assert there.seconds(0.0, 7.0) == 6.0
    slow = Mark(Fault(1.0, "slow", 0, 5.0), 1.0, 0)
    killed_server = Mark(Fault(2.0, "kill-ps", 0, 5.0), 2.0, 0)
    assert presence([slow, killed_server], 1, 20.0).share(0.0, 10.0) == 1.0


def test_spans_that_meet_are_one() -> None:
    spans = [Span(5.0, 6.0), Span(0.0, 4.0), Span(1.0, 2.0), Span(4.0, 5.0), Span(9.0, 9.0)]
    assert merged(spans) == [Span(0.0, 6.0)]
    assert Presence([spans, [Span(3.0, 12.0)]]).nobody == [Span(3.0, 6.0)]
    assert Presence([spans]).share(2.0, 2.0) == 1.0


def test_nobody_is_missed_before_the_end_of_what_was_measured() -> None:
    assert Presence([[Span(1.0, 30.0)]]).longest_without(11.0) == 10.0
    assert Presence([[]]).longest_without(11.0) == 0.0
