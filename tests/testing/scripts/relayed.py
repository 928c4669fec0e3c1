"""Under mpirun: a job whose workers reach the parameter servers through MPI, with histories."""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_ps.api.job import load_job
from elastic_ps.local import Launcher, Options, mpi


def main(job: Path, history: Path) -> None:
    """Run the job, and record what it does."""
    world = mpi.World()
    if world.rank:
        mpi.serve(world, relays=True)
        return
    slots = mpi.Slots(world, relays=True)
    try:
        with Launcher(load_job(job), Options(transport="mpi", slots=slots, history=history)) as launcher:
            launcher.start()
            launcher.wait()
            print(launcher.outcome().verdict.phase, flush=True)
    finally:
        slots.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
