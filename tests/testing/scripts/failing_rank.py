"""`elastic-ps`, on ranks of which each fails when a process that it has started ends badly."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from elastic_ps.cli import main
from elastic_ps.local import processes


def fail(log: Path, offset: int) -> str:
    raise RuntimeError(f"this rank fails: {log} from {offset}")


if __name__ == "__main__":
    with mock.patch.object(processes, "last_lines", fail):
        sys.exit(main())
