"""Libraries that start process groups when they find ranks in the environment.

In a job each process counts as the only one for them. The variables that a worker of several processes has,
and those of a batch system, are hidden while a library looks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_ps.contract import env
from elastic_ps.errors import UsageError

_RANKS = (
    "RANK",
    "WORLD_SIZE",
    env.LOCAL_RANK,
    env.LOCAL_WORLD_SIZE,
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",  # of srun
)


def leads() -> bool:
    """Whether this is process 0 of its worker."""
    return os.environ.get(env.LOCAL_RANK, "0") == "0"


@contextmanager
def as_only_process(library: str) -> Iterator[None]:
    """While this is open, nothing says that there are other processes; the present GPU is this process's.

    Raises:
        UsageError: another launcher has started this process as one of several.
    """
    started = {name: os.environ[name] for name in _RANKS if name in os.environ}
    if not env.in_job() and any(
        started.get(name, "1") != "1" for name in _RANKS if name.endswith(("SIZE", "TASKS"))
    ):
        raise UsageError(
            f"another launcher has started this process as one of several ({started}). In a job each worker "
            f"uses {library} alone, and the job adds up gradients: start the script with `elastic-ps run "
            "SCRIPT --workers N`"
        )
    if torch.cuda.is_available() and env.LOCAL_RANK in started:
        torch.cuda.set_device(int(started[env.LOCAL_RANK]) % torch.cuda.device_count())
    for name in started:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(started)
