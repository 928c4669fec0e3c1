"""`elastic_ps.connect`: a stay in the job that started this process, or a job of its own without one.

A script that nobody started as part of a job trains all the same: with a parameter server in its own process,
as the only worker. So it can be run by itself, stepped through in a debugger, and its result compared with
that of a job. Such a job writes no checkpoints and ends with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from datetime import timedelta
from pathlib import Path

from elastic_ps import env
from elastic_ps.job import ParameterServer, TrainingJobSpec, Worker, load_job
from elastic_ps.transport.base import Connection
from elastic_ps.worker import current
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

NAME = "standalone"

PATIENCE = timedelta(days=7)
"""For how long a debugger may hold the process; a worker is given up after seconds in a real job."""


def connect(job: str | os.PathLike[str] | None = None) -> Session:
    """Begin this process's stay in the job that it was started for, or in one of its own. Does not block.

    A process that no job started gets a parameter server of its own, in this process, with itself as the only
    worker; a warning says so.

    Args:
        job: a job's YAML file, whose data order and consistency a job of its own then has. The file's numbers
            of workers and parameter servers and its checkpoints are left out. Not read as part of a job.

    Raises:
        InvalidJob: the file cannot be read, or is not a valid TrainingJob.
        UsageError: the process is part of a job, but not a worker.
    """
    if env.in_job():
        return current.connect()
    spec = alone(load_job(Path(job)).spec if job is not None else TrainingJobSpec(entrypoint="script:main"))
    logger.warning(
        "this process was not started as part of a job, so it trains alone: one worker, no checkpoints. "
        "`elastic-ps run` starts a job"
    )
    session = _Standalone(spec)
    atexit.register(session.close)
    return session


def alone(spec: TrainingJobSpec) -> TrainingJobSpec:
    """The spec for one worker and one parameter server in one process."""
    server = ParameterServer(bucket_bytes=spec.parameter_server.bucket_bytes)
    worker = Worker(replicas=1, lease_duration=PATIENCE, progress_timeout=timedelta(0))
    consistency = spec.consistency.model_copy(update={"backup_workers": 0})
    update = {"parameter_server": server, "worker": worker, "consistency": consistency}
    return spec.model_copy(update=update)


class _Standalone(Session):
    """A session that owns its job's parameter server."""

    def __init__(self, spec: TrainingJobSpec) -> None:
        from elastic_ps.server import process  # which a worker of a job does not need
        from elastic_ps.transport.inproc import InprocServer, connect

        self._process = os.getpid()
        transport = InprocServer()
        environment = env.ProcessEnvironment(
            job=NAME, spec=spec, role="ps", index=0, addresses=(transport.address,)
        )
        self._server = process.ParameterServer(environment, transport, _no_other_shard)
        super().__init__(NAME, spec, 0, [connect(transport)])

    def close(self) -> None:
        if os.getpid() != self._process:  # a child of a fork: the threads are the parent's
            return
        # While the interpreter ends, newer Pythons start no thread, not even for a goodbye.
        with contextlib.suppress(RuntimeError):
            super().close()
        self._server.close(keep=False)


def _no_other_shard(shard: int) -> Connection:
    raise AssertionError(f"a job with one parameter server has no shard {shard}")
