"""`elastic_ps.connect`: a session in the job that started this process, or in a job of its own.

A script that was not started by a job also trains: it is the only worker, and the parameter server runs in
its process. So you can run it by itself, step through it in a debugger, and compare its result with that of a
job. Such a job writes no checkpoints, and ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from elastic_ps.api.checkpoints import Checkpoint
from elastic_ps.api.job import TrainingJobSpec, Worker, load_job
from elastic_ps.contract import env
from elastic_ps.embedding.tables import Tables, tables_alone
from elastic_ps.transport.base import Connection
from elastic_ps.worker import current
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

NAME = "standalone"

PATIENCE = timedelta(days=7)
"""How long a debugger may halt the process. In a real job, a worker would be lost after seconds."""


def connect(job: str | os.PathLike[str] | None = None) -> Session:
    """Return this process's session in the job that started it, or in a job of its own.

    If no job started this process, it becomes the only worker of a job of its own, and the parameter server
    runs in this process, too. A warning says so. Another call, as from a cell of a notebook, closes that
    session and begins another job.

    Args:
        job: a job's YAML file. A script that trains alone uses fields such as `data` and `consistency`. It
            ignores the numbers of workers and parameter servers, and checkpoints. In a process that a job
            started, the file is not read.

    Raises:
        InvalidJob: the file cannot be read, or is not a valid TrainingJob.
        UsageError: the process is part of a job, but not a worker.
    """
    if env.in_job():
        return current.connect()
    spec = alone(load_job(Path(job)).spec if job is not None else TrainingJobSpec(entrypoint="script:main"))
    logger.warning(
        "this process was not started as part of a job, so it trains alone: one worker, no checkpoints. "
        "To start a job, use `elastic-ps run`"
    )
    for before in _sessions:
        before.close(failed=True)
    session = _Standalone(spec)
    if not _sessions:
        atexit.register(_close_last)
    _sessions[:] = [session]
    return session


_sessions: list[Session] = []
"""The last session that this process has made. A notebook's earlier ones, and their models, are not kept."""


def _close_last() -> None:
    _sessions[-1].close(failed=hasattr(sys, "last_value"))  # for an exception that ends the process


def alone(spec: TrainingJobSpec) -> TrainingJobSpec:
    """The spec for one worker and one parameter server in one process."""
    fields = {"replicas": 1, "durability": "checkpoint", "checkpoint": Checkpoint()}
    server = spec.parameter_server.model_copy(update=fields)
    worker = Worker(replicas=1, lease_duration=PATIENCE, progress_timeout=timedelta(0))
    consistency = spec.consistency.model_copy(update={"backup_workers": 0})
    update = {"parameter_server": server, "worker": worker, "consistency": consistency}
    return spec.model_copy(update=update)


class _Standalone(Session):
    """A session that owns its job's parameter server."""

    def __init__(self, spec: TrainingJobSpec) -> None:
        from elastic_ps.server import process  # a worker of a job does not need these
        from elastic_ps.transport.inproc import InprocServer, connect

        self._process = os.getpid()
        transport = InprocServer()
        environment = env.ProcessEnvironment(
            job=NAME, spec=spec, role="ps", index=0, addresses=(transport.address,)
        )
        self._server = process.ParameterServer(environment, transport, _no_other_shard)
        super().__init__(NAME, spec, 0, [connect(transport)])

    def _tables_of(self, model: torch.nn.Module) -> Tables | None:
        return tables_alone(model, self.spec)

    def close(self, *, failed: bool = False) -> None:
        if os.getpid() != self._process:  # a forked child: the threads are the parent's
            return
        # While the interpreter ends, newer Pythons start no thread, not even for a goodbye.
        with contextlib.suppress(RuntimeError):
            super().close(failed=failed)
        self._server.close(keep=False)


def _no_other_shard(shard: int) -> Connection:
    raise AssertionError(f"a job with one parameter server has no shard {shard}")
