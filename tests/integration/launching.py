"""What the tests of the launcher and of the command line share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from elastic_ps.job import TrainingJob, parse_job
from elastic_ps.local import Programs

FAKE = str(Path(__file__).with_name("fake_programs.py"))
PROGRAMS = Programs(server=(sys.executable, FAKE, "ps"), worker=(sys.executable, FAKE, "worker"))
LIMIT = 60.0
T = TypeVar("T")


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


def eventually(condition: Callable[[], T | None], what: str) -> T:
    """The first true value of `condition`; fails the test if there is none in time."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {LIMIT:g} s")


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
