"""Rates and curves have bounded memory and say what happened."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.progress import Curve, Distribution, Rate


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(window=5)
    assert rate.per_second(0, 0) is None
    for tenth in range(101):  # 10 s at 100/s
        rate.add(10 * tenth, tenth / 10)
    assert rate.per_second(1000, 10) == pytest.approx(100)
    for tenth in range(1, 101):  # 10 s at 20/s
        rate.add(1000 + 2 * tenth, 10 + tenth / 10)
    assert rate.per_second(1200, 20) == pytest.approx(20)


def test_a_rate_looks_no_further_back_than_its_window() -> None:
    rate = Rate(window=5)
    for count, now in ((0, 0), (100, 1), (150, 6)):
        rate.add(count, now)
    assert rate.per_second(150, 6) == 10


def test_a_rate_falls_when_nothing_happens_any_more() -> None:
    rate = Rate(window=5)
    for second in range(10):
        rate.add(100 * second, second)
    later = rate.per_second(900, 100)
    assert later is not None
    assert later < 10


def test_a_stall_that_has_ended_does_not_change_a_rate() -> None:
    rate = Rate(window=60)
    for second in range(120):
        rate.add(100 * second, second)
    stalled = rate.per_second(11_900, 1000)
    assert stalled is not None
    assert stalled < 10
    rate.add(12_000, 1000)
    assert rate.per_second(12_000, 1000) == pytest.approx(100)
    rate.add(12_100, 1001)
    assert rate.per_second(12_100, 1001) == pytest.approx(100)


@given(st.sampled_from([5.0, 60.0]), st.lists(st.floats(0.05, 300), min_size=1, max_size=6))
def test_a_rate_is_right_a_window_after_steps_have_become_slower_or_faster(
    window: float, paces: list[float]
) -> None:
    rate, step, now = Rate(window), 0, 0.0
    for seconds in paces:
        for _ in range(math.ceil(1.02 * window / seconds) + 2):
            step, now = step + 1, now + seconds
            rate.add(step, now)
        assert rate.per_second(step, now) == pytest.approx(1 / seconds)


@pytest.mark.parametrize("window", [1.0, 5.0, 60.0])
def test_pauses_between_bursts_of_steps_are_no_stalls(window: float) -> None:
    rate, count = Rate(window), 0
    for second in range(0, 800, 8):
        for now in (second, second + 0.7):
            count += 8
            rate.add(count, now)
    assert rate.per_second(count, 792.7) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("seconds", [1, 30, 300])
def test_long_steps_are_no_stall(seconds: int) -> None:
    rate = Rate(window=60)
    for step in range(100):
        rate.add(step, step * seconds)
    assert rate.per_second(99, 99 * seconds) == pytest.approx(1 / seconds)


def test_a_rates_memory_does_not_grow_with_the_calls() -> None:
    rate = Rate(window=5)
    for call in range(100_000):
        rate.add(call, call / 10_000)
    assert len(pickle.dumps(rate)) < 10_000, "and not a million"


@given(st.integers(2, 50), st.integers(1, 1000))
def test_a_curve_is_bounded_keeps_its_beginning_and_its_order(limit: int, count: int) -> None:
    curve = Curve(limit=limit)
    for version in range(count):
        curve.add(version, version / 2)
    assert 1 <= len(curve.points) <= limit
    assert curve.points[0] == (0, 0.0)
    assert all(value == version / 2 for version, value in curve.points)
    versions = [version for version, _ in curve.points]
    assert versions == sorted(set(versions))
    assert count - versions[-1] <= 4 * (count // limit + 1), "the end of the curve is there, about"


def test_points_closer_than_a_hundredth_of_the_window_are_merged() -> None:
    rate = Rate(window=100)
    rate.add(0, 0)
    rate.add(5, 0.999)  # too close
    assert rate.per_second(10, 2) == 5
    rate.add(20, 1)  # a hundredth of the window, and the first point is old enough to be left behind
    rate.add(40, 100)
    rate.add(60, 101)
    assert rate.per_second(120, 201) == pytest.approx(100 / 200)


def test_the_oldest_point_is_the_last_one_outside_of_the_window() -> None:
    rate = Rate(window=10)
    for second in (0, 1, 10, 11):
        rate.add(second * second, second)
    # The point at 1 s is as old as the window when the one at 11 s comes.
    assert rate.per_second(121, 11) == pytest.approx((121 - 1) / (11 - 1))
    assert Rate().window == 5


def test_two_points_are_kept_however_old() -> None:
    rate = Rate(window=1)
    rate.add(0, 0)
    rate.add(10, 100)
    assert rate.per_second(10, 100) == pytest.approx(0.1)
    rate.add(20, 200)
    assert rate.per_second(20, 200) == pytest.approx(0.1)


def test_a_rate_over_no_time_is_none() -> None:
    rate = Rate()
    rate.add(3, 1.0)
    assert rate.per_second(4, 1.0) is None
    assert rate.per_second(4, 1.0 + 1e-3 / 2) is None
    assert rate.per_second(4, 1.5) == pytest.approx(2)


def test_a_curve_drops_every_second_point_when_it_is_full() -> None:
    curve = Curve(limit=4)
    for version in range(4):
        curve.add(version, 0.0)
    assert [version for version, _ in curve.points] == [0, 1, 2, 3]
    curve.add(4, 0.0)
    assert [version for version, _ in curve.points] == [0, 2, 4]
    for version in range(5, 11):
        curve.add(version, 0.0)
    assert [version for version, _ in curve.points] == [0, 4, 8]
    for version in range(11, 16):
        curve.add(version, 0.0)
    assert [version for version, _ in curve.points] == [0, 4, 8, 12]
    curve.add(16, 0.0)
    assert [version for version, _ in curve.points] == [0, 8, 16]
    assert Curve().limit == 1024


@given(st.lists(st.integers(0, 99), min_size=1), st.sampled_from([1, 50, 99, 100]))
def test_a_percentile_is_the_least_number_that_so_many_do_not_exceed(
    numbers: list[int], percent: int
) -> None:
    found = Distribution()
    found.add(numbers)
    least = found.percentile(percent)
    assert least in numbers
    assert 100 * sum(number <= least for number in numbers) >= percent * len(numbers)
    assert 100 * sum(number < least for number in numbers) < percent * len(numbers)
    assert found.largest == max(numbers)


def test_large_numbers_are_rounded_so_that_a_distribution_stays_small() -> None:
    found = Distribution()
    assert found.percentile(50) == 0
    found.add(range(100_000))
    assert len(found.counts) < 400
    assert (found.percentile(50), found.percentile(99)) == (49_000, 98_000)
    assert found.largest == 99_999
