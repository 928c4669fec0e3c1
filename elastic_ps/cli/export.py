"""`elastic-ps export`: in a process of its own, since the command line does without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys


def export(parsed: argparse.Namespace) -> int:
    """Write a checkpoint's model into a file; returns the exit code."""
    version = [] if parsed.version is None else ["--version", parsed.version]
    program = [sys.executable, "-m", "elastic_ps.checkpoint"]
    return subprocess.call([*program, str(parsed.directory), str(parsed.out), *version])
