"""A running job for fault injection: its processes, its progress, and waits for changes."""

from __future__ import annotations

import abc
import os
import signal
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from elastic_ps.api.status import MemberStatus, Phase, Progress, ServerStatus
from elastic_ps.contract.env import Role
from elastic_ps.drill.wire import Wires
from elastic_ps.errors import UserError
from elastic_ps.local import Launcher
from elastic_ps.local.poller import fetch_status

T = TypeVar("T")

LOOK = timedelta(milliseconds=30)
"""The time between two looks at the job."""


class Unavailable(Exception):
    """A fault is not possible here; the message says why."""


class NotRecovered(Exception):
    """The job has not recovered in time; the message says what did not happen."""


class JobOver(Exception):
    """The job has ended meanwhile."""


class Result(NamedTuple):
    """The end of a job, and its parameter server's last answer."""

    job: str
    phase: Phase
    reason: str
    message: str
    elapsed: timedelta
    failures: int
    progress: Progress | None


class Target(abc.ABC):
    """A run of a job, on a machine or a cluster. For one thread only.

    Args:
        limit: the time limit of each wait.

    Attributes:
        struck: the time of the last fault, in monotonic seconds; None before the first one.
        struck_version: the model's version at that time.
    """

    def __init__(self, *, limit: timedelta) -> None:
        self.struck: float | None = None
        self.struck_version = 0
        self._limit = limit

    @property
    @abc.abstractmethod
    def workers(self) -> int:
        """The wanted number of workers."""

    @abc.abstractmethod
    def server(self) -> ServerStatus | None:
        """The present status of shard 0; None if it does not answer."""

    @abc.abstractmethod
    def process(self, role: Role, index: int) -> Hashable:
        """The present process with this role and index: a unique number or name. Waits for it."""

    @abc.abstractmethod
    def kill(self, role: Role, index: int) -> None:
        """Kill the process with this role and index, without asking it."""

    @abc.abstractmethod
    def scale(self, workers: int) -> None:
        """Change the number of workers. Raises Unavailable if the job does not allow it."""

    @abc.abstractmethod
    def over(self, wait: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the job for that long; returns whether it has ended."""

    @abc.abstractmethod
    def stop(self, why: str) -> None:
        """End the job before its time."""

    @abc.abstractmethod
    def result(self) -> Result:
        """How the job ended; call it once it is over."""

    def member(self, worker: int) -> MemberStatus | None:
        """The newest member of a worker."""
        server = self.server()
        return next((m for m in reversed(server.members) if m.worker == worker), None) if server else None

    def training(self) -> list[MemberStatus]:
        """The members that compute."""
        server = self.server()
        return [m for m in server.members if m.state == "training"] if server else []

    def settled(self) -> ServerStatus:
        """Wait until all wanted workers take part; returns the status."""
        self.until(lambda: len(self.training()) >= self.workers, f"{self.workers} workers train")
        return self.until(self.server, "the parameter server answers")

    def strike(self, action: Callable[[], object]) -> None:
        """Inject a fault, and note its time and version."""
        server = self.server()
        self.struck_version = server.progress.version if server else 0
        action()
        self.struck = time.monotonic()

    def until(self, condition: Callable[[], T | None], what: str, limit: timedelta | None = None) -> T:
        """The first true value of `condition`.

        Raises:
            NotRecovered: it did not become true within the limit.
            JobOver: the job ended before.
        """
        seconds = (limit or self._limit).total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if self.over(LOOK):
                raise JobOver(f"the job ended before this happened: {what}")
            if time.monotonic() > deadline:
                raise NotRecovered(f"this did not happen within {seconds:.0f} s: {what}")

    def replaced(self, before: MemberStatus) -> Callable[[], bool]:
        """Whether the worker trains in a later incarnation than this one."""
        return lambda: any(
            m.worker == before.worker and m.incarnation > before.incarnation for m in self.training()
        )

    def moved_on(self, *, term: int = 0) -> Callable[[], bool]:
        """Whether the version is above that of the fault, in a term above `term`."""

        def look() -> bool:
            server = self.server()
            return server is not None and server.term > term and server.progress.version > self.struck_version

        return look


class LocalTarget(Target):
    """A job of processes on this machine.

    Args:
        launcher: the job's launcher, which is started.
        disk: the small disk that holds the checkpoints, or why there is none.
        wires: the relays between workers and parameter servers; None if none is to be cut.
    """

    def __init__(
        self, launcher: Launcher, *, disk: Path | str, wires: Wires | None, limit: timedelta
    ) -> None:
        super().__init__(limit=limit)
        self.launcher = launcher
        self.disk = disk
        self.wires = wires

    @property
    def workers(self) -> int:
        return self.launcher.status().workers

    @property
    def lease(self) -> timedelta:
        return self.launcher.job.spec.worker.lease_duration

    @property
    def checkpoints(self) -> Path:
        return self.launcher.checkpoints

    def server(self) -> ServerStatus | None:
        http = self.launcher.status().http
        return fetch_status(http[0]) if http else None

    def process(self, role: Role, index: int) -> int:
        found = self.until(
            lambda: [
                process.pid
                for process in self.launcher.status().processes
                if (process.role, process.index) == (role, index) and process.state != "ended"
            ],
            f"{role} {index} runs",
        )
        return found[0]

    def kill(self, role: Role, index: int) -> None:
        os.kill(self.process(role, index), signal.SIGKILL)

    def scale(self, workers: int) -> None:
        try:
            self.launcher.directory.scale(workers)
        except UserError as error:
            raise Unavailable(str(error)) from error

    def over(self, wait: timedelta = timedelta(0)) -> bool:
        return self.launcher.wait(wait)

    def stop(self, why: str) -> None:
        self.launcher.stop(why)

    def result(self) -> Result:
        self.launcher.wait()
        outcome = self.launcher.outcome()
        verdict, last = outcome.verdict, outcome.record.last
        return Result(
            outcome.status.job,
            verdict.phase,
            verdict.reason,
            verdict.message,
            outcome.elapsed,
            outcome.status.failures,
            last.progress if last else None,
        )
