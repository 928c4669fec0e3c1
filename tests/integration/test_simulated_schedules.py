"""Some hundred schedules of the simulator: what real processes would need hours and much luck for.

`python -m tests.simulator` runs others, and says how one that broke a promise is run again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.testing.tiers import per_change

FIRST = 1_000
"""Of the seeds that are run here; always the same ones, so that a failure is one of the change under test."""


def simulate(*arguments: object, timeout: float = 600) -> str:
    """In a process of its own: the simulator changes what modules know of threads and of time."""
    command = [sys.executable, "-m", "tests.simulator", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("first", "schedules"), per_change([(0, 40), (40, 260)], keep=[(0, 40)]))
def test_no_schedule_breaks_a_promise(first: int, schedules: int) -> None:
    assert f"{schedules} schedules" in simulate(
        "--seed", FIRST + first, "--schedules", schedules, timeout=3600
    )


@pytest.mark.parametrize(("seed", "every"), per_change([(3, 41), (3, 1), (48, 3), (54, 3)], keep=[(3, 41)]))
def test_a_process_may_die_at_each_of_its_yields(seed: int, every: int) -> None:
    """Some of the yields with each change, and all of them each night."""
    simulate("--seed", seed, "--each-yield", every, timeout=3600)
