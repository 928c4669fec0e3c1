"""`elastic-ps hostfile`: prints a hostfile for `mpirun`."""

from __future__ import annotations

import argparse
import os

from elastic_ps.errors import UserError
from elastic_ps.local import hosts


def hostfile(parsed: argparse.Namespace) -> int:
    """Print a hostfile; returns the exit code."""
    lines: list[str] = list(parsed.hosts)
    if parsed.source is not None:
        try:
            lines += parsed.source.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--from: cannot read {parsed.source}: {error}") from error
    named = parsed.hosts or parsed.source is not None
    found = hosts.from_lines(lines, slots=parsed.slots) if named else hosts.from_slurm(os.environ)
    print(hosts.write(found, parsed.style), end="")
    return 0
