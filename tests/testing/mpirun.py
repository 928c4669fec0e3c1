"""The mpirun beside this Python, as tests start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
_ALLOWED = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
}


def command(ranks: int, module: str, *arguments: object) -> list[str]:
    """`mpirun -n RANKS python -m MODULE ARGUMENTS`."""
    mpirun = Path(sys.executable).with_name("mpirun")
    given = (mpirun, "--oversubscribe", "-n", ranks, sys.executable, "-m", module, *arguments)
    return [str(each) for each in given]


def variables(directory: Path) -> dict[str, str]:
    """The environment of such a process, whose state and modules are in a directory."""
    path = f"{ROOT}{os.pathsep}{directory}"
    return {**os.environ, **_ALLOWED, "XDG_STATE_HOME": str(directory), "PYTHONPATH": path}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program with all that it has started, and close its pipes."""
    if process.poll() is None:
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()
        process.kill()
    process.communicate()
