"""Which deaths count against backoffLimit, and what is said of them."""

from __future__ import annotations

import signal

import pytest

from elastic_ps.contract import exits
from elastic_ps.contract.deaths import Death, Kind, cause_of, counts, describe_exit, failures, kind_of

SEGFAULT = Death("crashed", "SIGSEGV", useful=False)


@pytest.mark.parametrize("useful", [False, True])
def test_a_script_that_fails_counts_each_time(useful: bool) -> None:
    assert counts(Death("failed", "exited with 1", useful), None)


@pytest.mark.parametrize("kind", ["killed", "crashed"])
def test_the_first_death_of_another_kind_does_not_count(kind: Kind) -> None:
    assert not counts(Death(kind, "SIGKILL", useful=False), None)


def test_a_crash_counts_when_the_one_before_was_alike_and_nothing_was_done_in_between() -> None:
    assert counts(SEGFAULT, "SIGSEGV")
    assert not counts(SEGFAULT, "SIGABRT")
    assert not counts(Death("crashed", "SIGSEGV", useful=True), "SIGSEGV")
    assert not counts(Death("killed", "SIGSEGV", useful=False), "SIGSEGV")


def test_what_is_not_known_to_be_useless_does_not_count_and_does_not_end_the_row() -> None:
    unknown = Death("crashed", "SIGSEGV", useful=None)
    assert failures([(0, SEGFAULT), (0, unknown), (0, SEGFAULT)]) == [False, False, True]
    killed = Death("killed", "SIGKILL", useful=None)
    assert failures([(0, SEGFAULT), (0, killed), (0, SEGFAULT)]) == [False, False, True]


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


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (1, "failed", "exited with 1"),
        (127, "failed", "exited with 127"),
        (exits.HUNG, "failed", "ended itself because it made no progress (exit status 124)"),
        (128, "failed", "exited with 128"),
        (-signal.SIGSEGV, "crashed", "was killed by SIGSEGV"),
        (128 + signal.SIGINT, "crashed", "was killed by SIGINT"),
        (255, "failed", "exited with 255"),
        (-signal.SIGKILL, "killed", "was killed by SIGKILL"),
        (128 + signal.SIGTERM, "killed", "was killed by SIGTERM"),
        (-signal.SIGHUP, "killed", "was killed by SIGHUP"),
        (exits.LEFT, "killed", "left because it was asked to"),
        (exits.FENCED, "killed", "exited with 250"),
        (
            exits.LOST,
            "killed",
            "ended because the parameter server has lost the model, and there is no checkpoint",
        ),
        (exits.SILENT, "killed", "ended because the parameter server has not answered for too long"),
    ],
)
def test_what_an_exit_status_says(status: int, kind: Kind, words: str) -> None:
    assert (kind_of(status), describe_exit(status)) == (kind, words)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("INFO joined\nerror: no such thing\nexpected that\nWARNING the script ends", "no such thing"),
        (
            "INFO joined\nTraceback (most recent call last):\n  File x\n    f()\nValueError: no\nWARNING bye",
            "ValueError: no",
        ),
        ("killed", ""),
    ],
)
def test_the_cause_of_a_failure_is_found_among_what_was_written_after_it(output: str, cause: str) -> None:
    assert cause_of(output).splitlines()[:1] == ([cause] if cause else [])
