"""What a launcher is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from elastic_ps.contract.schemes import Scheme
from elastic_ps.local.forks import ForkServer
from elastic_ps.local.gone import tell_parameter_server
from elastic_ps.local.mpi import Slots
from elastic_ps.local.plan import ScaleAt, Verdict
from elastic_ps.local.processes import PORTS, Programs
from elastic_ps.local.record import Record
from elastic_ps.local.state import LocalStatus

WorkerGone = Callable[[str, tuple[str, ...], int, str, Path | None], None]
"""Called with (job, addresses of the shards, worker index, instance, directory of the launcher's certificate)
when a worker process has died."""

Route = Callable[[int, tuple[str, ...]], tuple[str, ...]]
"""Called with (worker index, addresses of the shards); returns where that worker is to reach them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a job is run.

    Attributes:
        schedule: numbers of workers to scale to, at given versions.
        trace: the file for a Chrome trace of all processes; None records none.
        resume: a directory of checkpoints to continue from; None to start from scratch.
        history: directory for the histories that tests check.
        root: where jobs keep their state; None is `env.state_directory()`.
        programs: the command lines of the processes.
        transport: how the processes talk to each other; None is the fastest way that works.
        tls: each process has a certificate, and shows it where it does not talk within the host; see
            docs/guides/security.md. False: whoever reaches a port of the job rules it.
        slots: where workers are started; None is this host.
        bind: each worker that is started on this host has cores of its own.
        forks: starts the processes on this host, and is closed by its owner; None: the launcher has its own.
        host: an address of this host, at which workers reach the parameter servers.
        route: what stands between workers and parameter servers; None for nothing.
        on_worker_gone: told about worker processes that died; may block, is called on its own thread.
        ports: those that the parameter servers may listen on.
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


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `unreached`: changes of the schedule whose version never came."""

    verdict: Verdict
    record: Record
    elapsed: timedelta
    status: LocalStatus
    unreached: tuple[ScaleAt, ...] = ()
