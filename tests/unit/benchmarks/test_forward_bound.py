"""How much earlier a forward would end if each module waited for its own parameters."""

from __future__ import annotations

from benchmarks.forward import Forward, could_save

NONE: frozenset[int] = frozenset()


def test_a_module_begins_when_its_own_bucket_is_there() -> None:
    # It was decided at 0, all was there at 10; two modules computed for 4 each.
    forward = Forward([(10.0, frozenset({0})), (14.0, frozenset({1}))], end=18.0)
    assert could_save(0.0, {0: 2.0, 1: 10.0}, forward) == 4.0  # 2 to 6, then 10 to 14
    assert could_save(0.0, {0: 2.0, 1: 3.0, 2: 10.0}, forward) == 8.0  # 2 to 6, then 6 to 10
    assert could_save(0.0, {0: 10.0, 1: 2.0}, forward) == 0.0


def test_what_the_script_does_before_the_forward_takes_as_long_as_it_did() -> None:
    forward = Forward([(13.0, frozenset({0}))], end=15.0)
    assert could_save(0.0, {0: 2.0, 1: 10.0}, forward) == 10.0  # 3 to 5
    assert could_save(0.0, {0: 4.0, 1: 10.0}, forward) == 9.0  # 4 to 6


def test_nothing_is_saved_where_all_values_come_with_the_decision() -> None:
    forward = Forward([(10.0, frozenset({0})), (14.0, NONE)], end=18.0)
    assert could_save(9.0, {0: 9.0}, forward) == 0.0
    assert could_save(9.0, {}, forward) == 0.0
