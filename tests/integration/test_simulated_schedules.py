"""Some hundred schedules of the simulator: what real processes would need hours and much luck for.

`python -m tests.simulator` runs others, and says how one that broke a promise is run again.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.testing.tiers import per_change

FIRST = 1_000
"""Of the seeds that each change runs; always the same ones, so that a failure is one of that change."""

SCHEDULES = [(first, 6) for first in range(0, 300, 6)]
"""The first one, and how many. Each part is a test of its own, so that none takes long on a busy machine."""

FOUND = {
    "a worker is asked to leave, and no parameter server comes for longer than it waits": 1795713117,
    "a change cannot be written because a shard is lost": 771201996,
}
"""Seeds of single schedules, each with its event, which no other test has."""


def simulate(*arguments: object) -> str:
    """In a process of its own: the simulator changes what modules know of threads and of time."""
    command = [sys.executable, "-m", "tests.simulator", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("first", "schedules"), per_change(SCHEDULES, keep=SCHEDULES[:1]))
def test_no_schedule_breaks_a_promise(first: int, schedules: int) -> None:
    assert f"{schedules} schedules" in simulate("--seed", FIRST + first, "--schedules", schedules)


@pytest.mark.nightly
def test_no_new_schedule_breaks_a_promise() -> None:
    """Others each night. A failure prints the seed of the schedule that has broken one."""
    simulate("--seed", random.SystemRandom().randrange(1 << 30), "--schedules", 50)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_a_schedule_that_has_broken_a_promise(seed: int) -> None:
    simulate("--seed", seed, "--schedules", 1)


DEATHS = [
    (3, 1, 151),
    *((3, first, 32) for first in range(1, 33)),
    *((seed, first, 36) for seed in (48, 54) for first in range(1, 37, 3)),
]
"""A seed, the first yield at which a process dies, and how many yields later the next schedule's dies."""


@pytest.mark.parametrize(("seed", "first", "every"), per_change(DEATHS, keep=DEATHS[:1]))
def test_a_process_may_die_at_each_of_its_yields(seed: int, first: int, every: int) -> None:
    """Some of the yields with each change; all of them each night, in parts."""
    simulate("--seed", seed, "--first-yield", first, "--each-yield", every)
