"""Which rows expire by time."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.embedding.ages import PARTS, Ages, lasting

AFTER = timedelta(hours=32)
PART = 3600.0


@given(
    pauses=st.lists(st.floats(-1.0, 2 * PART), max_size=200),
    stops=st.sets(st.integers(0, 199), max_size=3),
)
def test_rows_expire_when_their_time_has_passed_and_little_later(
    pauses: list[float], stops: set[int]
) -> None:
    """Also where somebody else goes on."""
    ages, now, clock = Ages(AFTER), 1000.0, 0.0
    made: list[float] = []  # when each version was made
    for version, pause in enumerate(pauses):
        now += pause
        if version:
            clock += min(max(pause, 0.0), PART)
        made.append(clock)
        ages.advance(version, now)
        if version in stops:
            following = Ages(AFTER)
            following.learn(ages.to_tensor())
            ages = following
        slack = 0.001 * (version + 1)  # times are rounded to milliseconds
        for seen, at in enumerate(made):
            if seen < ages.oldest:
                assert clock - at >= AFTER.total_seconds() - slack
            else:
                assert clock - at < AFTER.total_seconds() + 2 * PART + slack
    assert ages.to_tensor().numel() <= 2 * (PARTS + 4)


def test_those_who_know_of_more_time_keep_what_they_know() -> None:
    older, younger = Ages(AFTER), Ages(AFTER)
    for version in range(100):
        older.advance(version, PART * version)
        if version > 50:
            younger.advance(version, PART * version)
    with torch.device("meta"):  # a script's default
        known = older.to_tensor()
    older.learn(younger.to_tensor())
    assert torch.equal(older.to_tensor(), known)
    younger.learn(known)
    assert torch.equal(younger.to_tensor(), known)
    assert younger.oldest == 67


@pytest.mark.parametrize("known", [torch.zeros(3), torch.zeros(2)])
def test_what_is_no_ages_is_an_error(known: torch.Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        Ages(AFTER).learn(known)


def test_times_are_read() -> None:
    assert [lasting(text) for text in ("7d", "12h", "30m", "90s")] == [
        timedelta(days=7),
        timedelta(hours=12),
        timedelta(minutes=30),
        timedelta(seconds=90),
    ]
    assert [lasting(text) for text in ("", "7", "0d", "1w", "-1d", "1.5h", "7d ", "1h30m")] == [None] * 8
