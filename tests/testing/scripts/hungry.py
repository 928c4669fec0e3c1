"""A worker's script that takes more memory than its control group may have."""

from __future__ import annotations

import os
from pathlib import Path


def main(group: str, nbytes: int) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    print(len(os.urandom(nbytes)))
