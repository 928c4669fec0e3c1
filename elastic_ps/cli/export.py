"""`elastic-ps export`, which becomes another program, since the command line does not import torch."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from elastic_ps.errors import UserError


def export(parsed: argparse.Namespace) -> NoReturn:
    """Write a checkpoint's model to a file. The process ends with the exit code."""
    if not parsed.directory.is_dir():
        raise UserError(f"{parsed.directory}: there is no such directory")
    version = [] if parsed.version is None else ["--version", parsed.version]
    program = [sys.executable, "-m", "elastic_ps.export"]
    os.execv(sys.executable, [*program, str(parsed.directory), str(parsed.out), *version])
