"""Libraries that start process groups when they find ranks in the environment.

In a job each process counts as the only one for them. The variables that a worker of several processes has,
and those of a batch system, are hidden while a library looks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


def is_one_of_several() -> bool:
    """Whether this worker has several processes."""
    return os.environ.get(env.LOCAL_WORLD_SIZE, "1") != "1"


def own_gpu() -> torch.device:
    """The GPU of this process, in a worker of several."""
    return torch.device("cuda", int(os.environ[env.LOCAL_RANK]) % torch.cuda.device_count())


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
        torch.cuda.set_device(own_gpu())
    for name in started:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(started)


class OneDevice:
    """In front of a strategy of Lightning's: this process has one of the devices that Lightning has found."""

    _devices: Sequence[torch.device] = ()

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """The devices that Lightning has found for `devices=...`."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self: Any, devices: Sequence[torch.device]) -> None:
        self._devices, self._root_device = devices, devices[0]
        if env.LOCAL_RANK in os.environ and devices[0].type == "cuda":
            self._root_device = own_gpu()


def too_many_devices(devices: Sequence[torch.device], nodes: int) -> str:
    """Say why a `Trainer` or a `Fabric` may not use these devices; "" if it may."""
    several = devices[0].type == "cpu" or env.LOCAL_RANK not in os.environ
    if nodes == 1 and not (len(devices) > 1 and several):
        return ""
    return (
        f"the script asks for {len(devices)} devices and {nodes} nodes, but a worker of a job is one process "
        "with one device. Set devices=1 and num_nodes=1, and start more workers: `elastic-ps run SCRIPT "
        "--workers N`; or several processes in a worker, with worker.processes"
    )
