"""Under mpirun: rank 0 gives large orders, while processes end that have much to tell."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from elastic_ps.local import mpi
from elastic_ps.local.processes import Started

LOUD = [sys.executable, "-c", "print('x' * 100_000); raise SystemExit(3)"]
LARGE = {"LARGE": "y" * 100_000}


def main() -> None:
    """Start processes again as they end, and close while two have not told that they ended."""
    world = mpi.World()
    if world.rank:
        mpi.serve(world)
        return
    slots = mpi.Slots(world)

    def start(index: int) -> Started:
        return slots.start(index, LOUD, variables=LARGE, log=Path(f"{index}.log"))

    processes: list[Started] = [start(0), start(1)]
    ended = 0
    while ended < 10:
        for index, process in enumerate(processes):
            if process.poll() is not None:
                processes[index], ended = start(index), ended + 1
        time.sleep(0.02)
    time.sleep(0.5)  # nobody listens, and both end
    slots.close()
    print("closed")


if __name__ == "__main__":
    main()
