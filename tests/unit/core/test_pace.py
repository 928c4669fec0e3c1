"""Who is slow, and for whom the others have waited for too long."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.core.pace import Pace, Waiting

LIMIT = timedelta(seconds=10)


def test_time_is_counted_from_when_others_began_to_wait() -> None:
    waiting = Waiting()
    assert waiting.overdue((0, 0), [], 0, LIMIT) == {}
    assert waiting.overdue((0, 0), [7, 8], 100, LIMIT) == {}
    assert waiting.overdue((0, 0), [7], 105, LIMIT) == {}
    assert waiting.overdue((0, 0), [7, 8], 110, LIMIT) == {}
    assert waiting.overdue((0, 0), [7, 8], 111, LIMIT) == {7: 11}, "8 had been on time in between"
    assert waiting.overdue((0, 0), [8], 121, LIMIT) == {8: 11}


def test_a_round_that_starts_again_or_another_one_is_waited_for_anew() -> None:
    waiting = Waiting()
    for round_ in ((0, 0), (0, 1), (1, 0)):
        for second in range(10):
            assert waiting.overdue(round_, [7], second * 1.0, LIMIT) == {}


def test_without_a_limit_nobody_is_overdue() -> None:
    waiting = Waiting()
    waiting.overdue((0, 0), [7], 0, timedelta(0))
    assert waiting.overdue((0, 0), [7], 10**6, timedelta(0)) == {}
    assert waiting.overdue((0, 0), [7], 10**6, LIMIT) == {7: 10**6}


def rounds(pace: Pace, times: dict[int, list[float]]) -> None:
    """Rounds that open every 100 s; each worker's step is finished so many seconds later."""
    for number in range(max(map(len, times.values()))):
        pace.opened(times, number * 100, beginning=times)
        for who, took in times.items():
            if number < len(took):
                pace.finished(who, 0, number * 100 + took[number])


def test_the_mean_follows_without_the_first_step() -> None:
    pace = Pace()
    rounds(pace, {1: [90, 2, 2, 2], 2: [90, 10, 20]})
    assert pace.seconds == {1: 2, 2: pytest.approx(12)}
    assert pace.slowness(2) == pytest.approx(12 / 7)


def test_rounds_that_start_again_say_nothing() -> None:
    pace = Pace()
    rounds(pace, {1: [1, 1]})
    pace.finished(1, 1, 190)
    assert pace.seconds == {1: 1}


def test_who_has_gone_is_forgotten_and_warms_up_again() -> None:
    pace = Pace()
    rounds(pace, {1: [1, 1], 2: [3, 3]})
    pace.opened([1], 300, beginning=[1])
    assert (pace.seconds, pace.slowness(2), pace.slowness(1)) == ({1: 1}, None, 1)
    pace.opened([1, 2], 400, beginning=[1, 2])
    pace.finished(2, 0, 450)
    assert pace.slowness(2) is None


def test_who_comes_again_is_not_measured_from_when_it_was_here_before() -> None:
    pace = Pace()
    rounds(pace, {1: [1, 1], 2: [3, 3]})
    pace.opened([1], 300, beginning=[1])
    pace.opened([1, 2], 400, beginning=[1])
    for now in (450, 460):
        pace.finished(2, 0, now)
    assert pace.slowness(2) is None
