"""What looking for NaN and Inf costs a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_ps.codec.finite import ALONE

THREADS = f"""
import os, torch
from elastic_ps.codec.finite import require_finite
torch.set_num_threads(4)
values = torch.ones({ALONE})
before = os.listdir("/proc/self/task")
require_finite(values, "a small gradient")
print(len(os.listdir("/proc/self/task")) - len(before))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the threads of a process")
def test_for_a_small_gradient_no_thread_is_woken_up() -> None:
    """Each thread that answers calls would begin some of its own, and wait for them in every step."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
