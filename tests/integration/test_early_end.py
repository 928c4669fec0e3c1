"""A process that is asked to end before it has begun does so at once, in a container, too."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ps.contract import exits
from tests.testing.polling import LIMIT, eventually


@pytest.mark.parametrize(
    ("program", "status"),
    [("elastic_ps.worker", exits.LEFT), ("elastic_ps.evaluation", exits.LEFT), ("elastic_ps.server", 0)],
)
def test_it_can_be_asked_before_a_large_library_is_imported(program: str, status: int) -> None:
    """The kernel ignores a signal to a container's first process that this has not asked for."""
    process = subprocess.Popen([sys.executable, "-m", program], stderr=subprocess.PIPE, text=True)

    def can_be_asked() -> bool:
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        handled = bool(caught >> (signal.SIGTERM - 1) & 1)
        large = [name for name in ("pydantic_core", "libtorch") if name in mapped]
        assert handled or not large, f"SIGTERM has no handler yet, and imported is {large}"
        return handled

    with process:
        try:
            eventually(can_be_asked, "SIGTERM has a handler")
            process.send_signal(signal.SIGUSR1)
            process.terminate()
            _, told = process.communicate(timeout=LIMIT)
            assert process.returncode == status
            assert "most recent call first" in told, "it was asked where it is before it was asked to end"
        finally:
            process.kill()
