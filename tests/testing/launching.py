"""What the tests of the launcher and of the command line share."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.contract.env import inherited
from elastic_ps.local import Launcher, LocalStatus, Programs
from elastic_ps.local.forks import ForkServer
from elastic_ps.local.poller import fetch_status
from elastic_ps.local.processes import with_threads
from tests.testing.polling import eventually, while_moving

FAKE = str(Path(__file__).with_name("fake_programs.py"))
Here = Callable[..., subprocess.CompletedProcess[str]]
"""`elastic-ps` with these words, see the fixture `elastic_ps_here`."""
PROGRAMS = Programs(server=(sys.executable, FAKE, "ps"), worker=(sys.executable, FAKE, "worker"))


def fake_document(name: str = "fake", *, workers: int = 2, **arguments: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"entrypoint": "script:main", "arguments": arguments, "worker": {"replicas": workers}},
    }


def make_job(*, workers: int = 2, spec: dict[str, Any] | None = None, **arguments: Any) -> TrainingJob:
    document = fake_document(workers=workers, **arguments)
    document["spec"] |= spec or {}
    return parse_job(document, source="test")


@functools.cache
def forks() -> ForkServer:
    """Starts the processes of real jobs, with torch imported once for all. It ends with this process."""
    return ForkServer(with_threads(inherited(), processes=3))


def wait_for_workers(
    launcher: Launcher, wanted: Callable[[dict[int, int]], bool], what: str
) -> dict[int, int]:
    """index -> pid of the workers that train, once they are as wanted; fails when the job ends before."""

    def look() -> dict[int, int] | None:
        assert not launcher.wait(timedelta(0)), launcher.outcome().verdict
        workers = workers_of(launcher.status())
        return workers if wanted(workers) else None

    return eventually(look, what)


def workers_of(status: LocalStatus) -> dict[int, int]:
    """index -> pid of the workers that train."""
    return {p.index: p.pid for p in status.processes if p.role == "worker" and p.state == "training"}


def version_of(launcher: Launcher) -> int:
    """The model's version; 0 as long as no parameter server answers."""
    http = launcher.status().http
    status = fetch_status(http[0]) if http else None
    return status.progress.version if status else 0


def wait_for_end(launcher: Launcher, look: Callable[[LocalStatus], None] | None = None) -> None:
    """Wait for the job's end; fails when it stands still, and says what the job and its workers did last.

    Args:
        look: called again and again meanwhile.
    """

    def ended() -> bool:
        if look is not None:
            look(launcher.status())
        return launcher.wait(timedelta(0))

    try:
        while_moving(ended, lambda: _seen(launcher), "the job ends")
    except AssertionError as error:
        for process in launcher.status().processes:
            if process.exit is None:
                psutil.Process(process.pid).send_signal(signal.SIGUSR1)  # it logs where its threads are
        time.sleep(2)
        for log in sorted(launcher.directory.logs.glob("*.log")):
            error.add_note(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise


def _seen(launcher: Launcher) -> object:
    """What changes as long as the job goes on."""
    status = launcher.status()
    version = status.server.progress.version if status.server else None
    processes = [(f"{p.role}-{p.index}", p.pid, p.state, p.exit) for p in status.processes]
    return {"version": version, "processes": processes}


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
