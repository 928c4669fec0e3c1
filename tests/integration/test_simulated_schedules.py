"""Some hundred schedules of the simulator: what real processes would need hours and much luck for.

`python -m tests.simulator` runs others, and says how one that broke a promise is run again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = 1_000
"""Of the seeds that are run here; always the same ones, so that a failure is one of the change under test."""


@pytest.mark.parametrize("part", range(2))
def test_no_schedule_breaks_a_promise(part: int) -> None:
    """In a process of its own: the simulator changes what modules know of threads and of time."""
    command = [
        sys.executable,
        "-m",
        "tests.simulator",
        "--seed",
        str(FIRST + 150 * part),
        "--schedules",
        "150",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "150 schedules" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout
