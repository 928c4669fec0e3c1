"""Which deaths count against backoffLimit."""

from __future__ import annotations

import pytest

from elastic_ps.core.deaths import Death, Kind, counts, failures

SEGFAULT = Death("crashed", "SIGSEGV", useful=False)


@pytest.mark.parametrize("useful", [False, True])
def test_a_script_that_fails_counts_each_time(useful: bool) -> None:
    assert counts(Death("failed", "exited with 1", useful), None)


@pytest.mark.parametrize("kind", ["killed", "crashed"])
def test_the_first_death_of_another_kind_does_not_count(kind: Kind) -> None:
    assert not counts(Death(kind, "SIGKILL", useful=False), None)


def test_a_crash_counts_when_the_one_before_was_alike_and_nothing_was_done_in_between() -> None:
    assert counts(SEGFAULT, SEGFAULT)
    assert counts(SEGFAULT, Death("crashed", "SIGSEGV", useful=True))
    assert not counts(SEGFAULT, Death("crashed", "SIGABRT", useful=False))
    assert not counts(Death("crashed", "SIGSEGV", useful=True), SEGFAULT)
    assert not counts(Death("killed", "SIGSEGV", useful=False), SEGFAULT)


def test_a_crash_again_and_again_counts_from_the_second_on() -> None:
    assert failures([(0, SEGFAULT)] * 4) == [False, True, True, True]


def test_crashes_in_several_places_have_nothing_to_do_with_each_other() -> None:
    assert failures([(0, SEGFAULT), (1, SEGFAULT), (0, SEGFAULT)]) == [False, False, True]


def test_being_killed_in_between_changes_nothing_and_progress_ends_the_row() -> None:
    killed = Death("killed", "SIGKILL", useful=False)
    assert failures([(0, SEGFAULT), (0, killed), (0, SEGFAULT)]) == [False, False, True]
    trained = Death("killed", "SIGKILL", useful=True)
    assert failures([(0, SEGFAULT), (0, trained), (0, SEGFAULT)]) == [False, False, False]


def test_a_crash_after_progress_is_the_first_of_a_row() -> None:
    late = Death("crashed", "SIGSEGV", useful=True)
    assert failures([(0, SEGFAULT), (0, late), (0, SEGFAULT)]) == [False, False, True]
    assert failures([(0, late), (0, late), (0, late)]) == [False, False, False]
