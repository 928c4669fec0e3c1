"""The momentum that a version is made with, where the job leaves it to the parameter server."""

from __future__ import annotations

import pytest

from elastic_ps.core import damping


def test_a_stale_step_has_a_momentum_that_remembers_less() -> None:
    found = [damping.when_stale(0.9, staleness) for staleness in (0, 1, 3, 8)]
    assert [m / (1 - m) for m in found] == pytest.approx([9, 9 / 2, 9 / 4, 1])
    assert damping.when_stale(0.0, 5) == 0
    assert damping.when_stale(0.9, 10**6) > 0, "torch makes and keeps no state where it is 0"


def test_the_outer_momentum_rises_with_the_exchanges_that_were_made() -> None:
    found = [damping.of_exchange(0.9, number) for number in (0, 19, 179, 10**6)]
    assert found == pytest.approx([1 / 21, 0.5, 0.9, 0.9])
    assert damping.of_exchange(0.3, 50) == 0.3
    assert damping.of_exchange(0.0, 50) == 0
