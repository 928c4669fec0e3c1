"""Starts and ends the processes of a job, and notices their ends.

Each process is the leader of its own session, so that a Ctrl-C in the terminal reaches only the launcher, and
all that the process starts can be ended with it. It inherits the read end of the launcher's lifeline, a pipe
without a writer: when the launcher dies for any reason, the pipe closes and the process ends itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract.env import THREAD_VARIABLES
from elastic_ps.contract.schemes import name_of
from elastic_ps.errors import CannotListen
from elastic_ps.process.lifecycle import usable_cores

OUTPUT_LINES = 30

PORTS = range(10_000, 20_000, 2)
"""The ports of a job's processes. Operating systems use higher ports for outgoing connections, so that none
takes the port of a process that is about to be started or restarted. Odd ports are left for data ports; see
`transport.tcp`."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The command lines of a job's processes. Tests use small programs of their own."""

    server: Sequence[str] = (sys.executable, "-m", "elastic_ps.server")
    worker: Sequence[str] = (sys.executable, "-m", "elastic_ps.worker")
    evaluator: Sequence[str] = (sys.executable, "-m", "elastic_ps.evaluation")

    @property
    def forkable(self) -> bool:
        """Whether a fork server can start any of them."""
        return self.server == Programs.server or self.worker == Programs.worker

    def check(self, spec: TrainingJobSpec) -> list[str]:
        """The command that tries to import the entrypoints and the codecs with their arguments."""
        given = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return [*self.worker, "--check", json.dumps(given)]  # model_dump_json would make infinity null


class Lifeline:
    """A pipe whose read end every process inherits and whose write end only this process holds."""

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._held)


PIDS = 1 << 22
"""More than any pid. A process on rank r of an mpirun, on another host, has its pid plus r times this."""


class Started(Protocol):
    """A process that was started here, or on another rank of an mpirun. For one thread only."""

    @property
    def pid(self) -> int:
        """A number that is unique in the job: its pid, plus a multiple of `PIDS` on another host."""

    def poll(self) -> int | None:
        """Its exit status (negative: the signal) once it has ended with everything that it started."""

    def terminate(self) -> None:
        """Ask it to end. It ends the processes that it has started itself."""

    def kill(self) -> None:
        """Kill it and everything it has started."""

    def output(self) -> str:
        """The last lines of its output."""


_MAY_PASS = {
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
    errno.EDQUOT,
}
_OF_DISKS = {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.EHOSTDOWN}


def may_pass(error: OSError, *, ran: bool) -> bool:
    """Whether an error may pass: a lack of processes, memory, descriptors or disk space.

    `ran`: a process has run before, so a disk or host that does not answer may come back, too.
    """
    returns = error.errno in _OF_DISKS or isinstance(error, TimeoutError)
    return error.errno in _MAY_PASS or (ran and returns)


def opened(log: Path) -> BinaryIO:
    """Open the log of a process for appending. A deleted directory is recreated."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def last_lines(log: Path, offset: int) -> str:
    """The last lines of a process's output, which begins at `offset` of the file; "" if it cannot be read."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-OUTPUT_LINES:]).strip()


class Child:
    """A process that was started here. For one thread only."""

    def __init__(
        self, argv: Sequence[str], *, variables: Mapping[str, str], log: Path, lifeline: Lifeline
    ) -> None:
        self._log = log
        with opened(log) as output:
            self._offset = output.tell()
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                argv,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline.fd,),
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """See `Started`."""
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal_group()  # before its pid may be reused
            self._popen.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """See `Started`."""
        if self._popen.returncode is None:
            os.kill(self.pid, signal.SIGTERM)  # Popen.terminate would reap it, and `poll` spare its group

    def kill(self) -> None:
        """See `Started`."""
        if self._popen.returncode is None:
            self._signal_group()

    def output(self) -> str:
        """See `Started`."""
        return last_lines(self._log, self._offset)

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def free_ports(count: int, among: range = PORTS, *, held: contextlib.ExitStack | None = None) -> list[int]:
    """`count` different ports on which nobody listens on this host, by TCP or by Unix socket.

    Args:
        held: until this is closed, no other launcher of this host gets them, although nobody listens yet.

    Raises:
        CannotListen: there are fewer.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(among, len(among)):
            if len(ports) == count:
                break
            listener = stack.enter_context(socket.socket())
            near, lock = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in ("near", "lock"))
            with contextlib.suppress(OSError):
                lock.bind(f"\0elastic-ps port {port}")
                listener.bind(("", port))
                near.bind(name_of(f"127.0.0.1:{port}") or "")  # another user may have taken the name
                ports.append(port)
                if held is not None:
                    held.enter_context(lock.dup())
    if len(ports) < count:
        raise CannotListen(
            f"a job needs {count} free ports from {among.start} to {among.stop - 1}, but {len(ports)} are "
            "free. Stop the processes that hold the others"
        )
    return ports


def free_addresses(count: int, among: range = PORTS) -> list[str]:
    """`count` different `host:port` of loopback on which nobody listens. Raises CannotListen."""
    return [f"127.0.0.1:{port}" for port in free_ports(count, among)]


@contextlib.contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Processes that the calling thread starts in the block run only on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processes_of(spec: TrainingJobSpec) -> int:
    """The number of processes of a job."""
    server = spec.parameter_server
    standbys = server.replicas if server.durability == "standby" else 0
    return server.replicas + standbys + spec.worker.replicas + (spec.evaluator is not None)


def with_threads(variables: Mapping[str, str], *, processes: int) -> dict[str, str]:
    """The variables, with numbers of threads that divide the calling thread's cores among the processes.

    By default each process would use as many threads as there are cores, and they would slow each other down.
    """
    threads = str(max(1, usable_cores() // max(1, processes)))
    if "OMP_NUM_THREADS" in variables:
        return dict(variables)
    return {**dict.fromkeys(THREAD_VARIABLES, threads), **variables}
