"""The options and the outcome of a launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from elastic_ps.api.status import FINISHED_GRACE
from elastic_ps.contract.schemes import Scheme
from elastic_ps.local.forks import ForkServer
from elastic_ps.local.gone import tell_parameter_server
from elastic_ps.local.mpi import Slots
from elastic_ps.local.plan import LEAVE_GRACE, ScaleAt, Verdict
from elastic_ps.local.processes import PORTS, Programs
from elastic_ps.local.record import Record
from elastic_ps.local.state import LocalStatus

WorkerGone = Callable[[str, tuple[str, ...], int, str, Path | None], None]
"""Called with (job, addresses of the shards, worker index, instance, directory of the launcher's certificate)
when a worker process has died."""

Route = Callable[[int, tuple[str, ...]], tuple[str, ...]]
"""Called with (worker index, addresses of the shards); returns the addresses for that worker."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run.

    Attributes:
        schedule: numbers of workers to scale to at given versions.
        trace: the file for a Chrome trace of all processes; None records none.
        resume: a directory of checkpoints to continue from; None to start from scratch.
        history: directory for the histories that tests check.
        root: the directory of jobs' state; None is `env.state_directory()`.
        programs: the command lines of the processes.
        transport: the transport between the processes; None is the fastest one that works.
        tls: whether each process has a certificate, for connections between hosts; see
            docs/guides/security.md. Without it, anyone who can reach a port of the job controls it.
        slots: the ranks to start workers on; None is this host.
        bind: whether each worker on this host has cores of its own.
        forks: starts the processes on this host; its owner closes it. None: the launcher has its own.
        host: an address of this host, at which workers reach the parameter servers.
        route: changes the addresses for workers, as for a relay in between; None for none.
        on_worker_gone: called for worker processes that died; may block, since it has its own thread.
        ports: the ports that the parameter servers may listen on.
        finished_grace: how long a finished job waits for a worker that is stopped, or has not joined.
        leave_grace: how long a worker may take to finish its step and leave, before it is killed.
    """

    schedule: tuple[ScaleAt, ...] = ()
    trace: Path | None = None
    resume: Path | None = None
    history: Path | None = None
    root: Path | None = None
    programs: Programs = field(default_factory=Programs)
    transport: Scheme | None = None
    tls: bool = True
    slots: Slots | None = None
    bind: bool = False
    forks: ForkServer | None = None
    host: str = "127.0.0.1"
    route: Route | None = None
    on_worker_gone: WorkerGone = tell_parameter_server
    ports: range = PORTS
    finished_grace: timedelta = FINISHED_GRACE
    leave_grace: timedelta = LEAVE_GRACE


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `unreached`: changes of the schedule whose version was not reached."""

    verdict: Verdict
    record: Record
    elapsed: timedelta
    status: LocalStatus
    unreached: tuple[ScaleAt, ...] = ()
