"""`elastic-ps export`, in a process of its own, since the command line does not import torch."""

from __future__ import annotations

import argparse
import subprocess
import sys

from elastic_ps.errors import UserError


def export(parsed: argparse.Namespace) -> int:
    """Write a checkpoint's model to a file; returns the exit code."""
    if not parsed.directory.is_dir():
        raise UserError(f"{parsed.directory}: there is no such directory")
    version = [] if parsed.version is None else ["--version", parsed.version]
    program = [sys.executable, "-m", "elastic_ps.export"]
    return subprocess.call([*program, str(parsed.directory), str(parsed.out), *version])
