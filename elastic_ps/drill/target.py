"""A running job as the faults see it: who is there, how far it is, and waiting for it to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from elastic_ps.errors import UserError
from elastic_ps.job import Member, ServerStatus
from elastic_ps.local import Launcher
from elastic_ps.local.poller import fetch_status

T = TypeVar("T")

LOOK = 0.03
"""Seconds between two looks at the job."""


class Unavailable(Exception):
    """A fault that cannot be brought about here; the message says why."""


class NotRecovered(Exception):
    """What should have come after a fault has not come in time; the message says what."""


class JobOver(Exception):
    """The job has ended meanwhile."""


class Target:
    """One run of a job. Belongs to one thread.

    Args:
        launcher: that runs the job; started.
        disk: the small disk that holds the checkpoints, or why there is none.
        limit: how long anything may take.
    """

    def __init__(self, launcher: Launcher, *, disk: Path | str, limit: timedelta) -> None:
        self.launcher = launcher
        self.disk = disk
        self.struck: float | None = None
        self.struck_version = 0
        self._limit = limit

    @property
    def workers(self) -> int:
        """How many are wanted."""
        return self.launcher.status().workers

    @property
    def lease(self) -> timedelta:
        return self.launcher.job.spec.worker.lease_duration

    @property
    def checkpoints(self) -> Path:
        return self.launcher.checkpoints

    def server(self) -> ServerStatus | None:
        """What shard 0 says now; None if it does not answer."""
        http = self.launcher.status().http
        return fetch_status(http[0]) if http else None

    def pid(self, role: str, index: int) -> int:
        """The process that has this place now; waits for it if there is none."""
        found = self.until(
            lambda: [
                process.pid
                for process in self.launcher.status().processes
                if (process.role, process.index) == (role, index) and process.state != "ended"
            ],
            f"{role} {index} runs",
        )
        return found[0]

    def member(self, pid: int) -> Member | None:
        """The newest stay of a worker process."""
        server = self.server()
        return next((m for m in reversed(server.members) if m.pid == pid), None) if server else None

    def training(self) -> list[Member]:
        """The members that compute now."""
        server = self.server()
        return [m for m in server.members if m.state == "training"] if server else []

    def settled(self) -> ServerStatus:
        """Wait until all workers that are wanted take part; returns the status then."""
        self.until(lambda: len(self.training()) >= self.workers, f"{self.workers} workers train")
        return self.until(self.server, "the parameter server answers")

    def strike(self, action: Callable[[], object]) -> None:
        """Do it, and note when, and at which version."""
        server = self.server()
        self.struck_version = server.progress.version if server else 0
        action()
        self.struck = time.monotonic()

    def until(self, condition: Callable[[], T | None], what: str, limit: timedelta | None = None) -> T:
        """The first true value of `condition`.

        Raises:
            NotRecovered: not within the limit.
            JobOver: the job has ended before.
        """
        seconds = (limit or self._limit).total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if self.launcher.wait(timedelta(0)):
                raise JobOver(f"the job ended before this came about: {what}")
            if time.monotonic() > deadline:
                raise NotRecovered(f"not within {seconds:.0f} s: {what}")
            time.sleep(LOOK)

    def pause(self, duration: timedelta) -> None:
        """Let time pass, unless the job ends."""
        self.launcher.wait(duration)

    def moved_on(self, *, epoch: int = 0) -> Callable[[], bool]:
        """Whether the version is above that of the strike, in an epoch above `epoch`."""

        def look() -> bool:
            server = self.server()
            return (
                server is not None and server.epoch > epoch and server.progress.version > self.struck_version
            )

        return look

    def scale(self, workers: int) -> None:
        """Change the number of workers. Raises Unavailable if the job does not allow it."""
        try:
            self.launcher.directory.scale(workers)
        except UserError as error:
            raise Unavailable(str(error)) from error
