"""For whom the others have waited for too long."""

from __future__ import annotations

from datetime import timedelta

from elastic_ps.core.pace import Waiting

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
