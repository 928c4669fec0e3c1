"""Collective operations for scripts: on tensors and objects, blocking or with handles.

They are for processes that are started together and stay together: by `torchrun`, by `mpirun`, or by hand
with `torch.distributed.init_process_group`. torch.distributed or MPI does the work. The workers of a job come
and go, so they have no communicator, and a job's own exchange needs none.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but mypy does not know

from elastic_ps.collectives.communicator import Communicator
from elastic_ps.collectives.operations import Handle, Op, Operations
from elastic_ps.collectives.over_mpi import MPIGroup
from elastic_ps.collectives.over_torch import TorchGroup
from elastic_ps.collectives.replicas import (
    check_replicas,
    synchronize_gradients,
    synchronize_parameters,
    synchronized_backward,
)
from elastic_ps.contract import env
from elastic_ps.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Communicator",
    "Handle",
    "Op",
    "Operations",
    "check_replicas",
    "of_group",
    "of_mpi",
    "synchronize_gradients",
    "synchronize_parameters",
    "synchronized_backward",
    "world",
]


def world(*, timeout: timedelta | None = None) -> Communicator:
    """The communicator of all processes that were started with this one. Blocks until all have called it.

    It uses the default process group of torch.distributed if there is one. Otherwise it creates one under
    `torchrun` (gloo for the CPU, and nccl if there are GPUs), uses MPI under `mpirun`, and is alone in any
    other process.

    Args:
        timeout: how long an operation waits for the others; None is torch's default. MPI has none.

    Raises:
        UsageError: the process is a worker of a job; MPI cannot be used, or is not that of `mpirun`.
    """
    if env.in_job():
        raise UsageError(
            "elastic_ps.collectives.world() was called by a worker of a job. Its workers come and go, and a "
            "communicator cannot follow them. Use the session (session.optimizer, session.assign, "
            "session.report), or start the script itself with torchrun or mpirun"
        )
    if not dist.is_initialized():
        if not env.in_torchrun() and env.started_by_mpirun():
            found = of_mpi()
            env.require_ranks(found.size)
            return found
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if env.in_torchrun():
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return Communicator(TorchGroup(timeout=timeout))


def of_group(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of a process group of torch.distributed; None is the default group.

    Raises:
        UsageError: there is no default group yet.
    """
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group: call torch.distributed.init_process_group(...) before, or "
            "elastic_ps.collectives.world() instead"
        )
    return Communicator(TorchGroup(group))


def of_mpi(comm: MPI.Comm | None = None) -> Communicator:
    """A communicator that duplicates one of mpi4py; None is MPI.COMM_WORLD.

    Blocks until all its processes have called it.

    Raises:
        UsageError: MPI cannot be used.
    """
    return Communicator(MPIGroup(comm))
