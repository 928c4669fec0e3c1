"""What the tests of the launcher and of the command line share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from elastic_ps.job import TrainingJob, parse_job
from elastic_ps.local import Programs

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


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
