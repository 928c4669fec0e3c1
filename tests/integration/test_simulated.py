"""A few schedules of the simulator: how coordinator, shards, standbys and checkpointer act together.

`tests/integration/test_simulated_schedules.py` runs many more of them.
"""

from __future__ import annotations

import subprocess
import sys

from tests.testing.polling import LIMIT

COMMAND = [sys.executable, "-m", "tests.simulator", "--seed", "1", "--schedules", "30", "--stop"]


def test_no_schedule_of_the_real_parameter_server_breaks_a_promise() -> None:
    """`elastic_ps.server` runs in a process of its own, in which threads and time are simulated."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
