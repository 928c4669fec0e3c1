"""What the tests of the launcher and of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from elastic_ps.job import TrainingJob, parse_job
from elastic_ps.local import Launcher, LocalStatus, Programs
from elastic_ps.local.poller import fetch_status
from tests.polling import eventually

FAKE = str(Path(__file__).with_name("fake_programs.py"))
PROGRAMS = Programs(server=(sys.executable, FAKE, "ps"), worker=(sys.executable, FAKE, "worker"))


def job_document(name: str = "fake", *, workers: int = 2, **arguments: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"entrypoint": "script:main", "arguments": arguments, "worker": {"replicas": workers}},
    }


def make_job(*, workers: int = 2, spec: dict[str, Any] | None = None, **arguments: Any) -> TrainingJob:
    document = job_document(workers=workers, **arguments)
    document["spec"] |= spec or {}
    return parse_job(document, source="test")


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


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
