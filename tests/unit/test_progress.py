"""Rates and curves have bounded memory and say what happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.progress import Curve, Rate


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(window=5)
    assert rate.per_second(0, 0) is None
    for tenth in range(101):  # 10 s at 100/s
        rate.add(10 * tenth, tenth / 10)
    assert rate.per_second(1000, 10) == pytest.approx(100)
    for tenth in range(1, 101):  # 10 s at 20/s
        rate.add(1000 + 2 * tenth, 10 + tenth / 10)
    assert rate.per_second(1200, 20) == pytest.approx(20)


def test_a_rate_falls_when_nothing_happens_any_more() -> None:
    rate = Rate(window=5)
    for second in range(10):
        rate.add(100 * second, second)
    later = rate.per_second(900, 100)
    assert later is not None
    assert later < 10


def test_a_rates_memory_does_not_grow_with_the_calls() -> None:
    rate = Rate(window=5)
    for call in range(100_000):
        rate.add(call, call / 10_000)
    assert len(rate._points) < 210


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
