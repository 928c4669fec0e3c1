"""The launcher's side of `elastic_ps.forkserver`, which starts processes with torch imported."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from elastic_ps.contract.packets import Packets
from elastic_ps.local.processes import Lifeline, last_lines, opened

END = timedelta(seconds=10)
"""How long the fork server may take to end before it is killed."""


class ForkServer:
    """A process that imports torch once, and then starts processes of a job at once. Thread-safe.

    If it cannot start a program, because that is another one or it was killed, the caller starts the program
    itself. Processes that it has started are killed when it ends.

    Args:
        variables: its environment, which sets the number of threads of some libraries.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "elastic_ps.forkserver", str(theirs.fileno())],
                env={"PYTHONUNBUFFERED": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._packets = Packets(ours)
        self._lock = threading.RLock()
        self._programs: list[str] | None = None
        self._alive, self._released, self._refused = True, False, False
        self._statuses: dict[int, int | None] = {}

    def ready(self, within: timedelta) -> bool:
        """Whether `start` need not wait. Blocks for at most `within`."""
        with self._lock:
            if self._alive and self._programs is None:
                self._read(within)
            return self._programs is not None or not self._alive

    def start(
        self,
        argv: Sequence[str],
        *,
        variables: Mapping[str, str],
        descriptors: Mapping[int, Sequence[int]],
        name: str,
    ) -> int | None:
        """Start a program in a session of its own, like `subprocess.Popen`. Blocks until it has begun.

        Args:
            argv: `[python, "-m", module, *arguments]`.
            descriptors: descriptors of this process, with their numbers in the new one.
            name: the name of the process in `ps`; at most 15 bytes of it.

        Returns:
            Its pid; None if nothing was started.
        """
        try:
            directory = str(Path.cwd())
        except FileNotFoundError:  # it was removed
            return None
        python, flag, program, *arguments = (*argv, "", "")[: max(3, len(argv))]
        with self._lock:
            while not self.ready(END):
                pass
            if (python, flag) != (sys.executable, "-m") or program not in (self._programs or ()):
                return None
            order = {
                "program": program,
                "arguments": arguments,
                "variables": dict(variables),
                "directory": directory,
                "descriptors": [list(targets) for targets in descriptors.values()],
                "name": name,
            }
            before = set(self._statuses)
            try:
                self._packets.send(order, list(descriptors))
            except OSError:
                return None
            self._refused = False
            while not (begun := self._statuses.keys() - before):
                if self._refused or not self._alive:
                    return None
                self._read(END)
            return begun.pop()

    def status(self, pid: int) -> int | None:
        """The exit status of a process that was started here; None while it runs. Returned only once.

        A negative status is the signal that has ended it.
        """
        with self._lock:
            while self._alive and self._read(timedelta(0)):
                pass
            if self._statuses[pid] is None:
                return None
            return self._statuses.pop(pid)  # another process may get its pid

    def signal(self, pid: int, number: int, *, group: bool) -> None:
        """Send a process a signal if it runs, or also to all that it has started. Does not block."""
        with self._lock, contextlib.suppress(OSError):
            if self._alive:
                self._packets.send({"signal": number, "pid": pid, "group": group})

    def _read(self, within: timedelta) -> bool:
        """Handle a message; returns whether there was one. The lock is held."""
        if not select.select([self._packets.sock], [], [], within.total_seconds())[0]:
            return False
        try:
            message, _ = self._packets.receive()
        except EOFError:
            self._lost()
            return False
        self._note(message)
        return True

    def _note(self, message: Mapping[str, Any]) -> None:
        if "programs" in message:
            self._programs = message["programs"]
        elif "started" in message:
            self._statuses.setdefault(message["started"], None)
        elif "refused" in message:
            self._refused = True
        else:
            self._statuses[message["ended"]] = message["status"]

    def _lost(self) -> None:
        """Handle the end of the fork server: the ends of its processes are unknown."""
        self._alive = False
        for pid, status in self._statuses.items():
            if status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._statuses[pid] = -signal.SIGKILL

    def release(self) -> None:
        """Leave it to a fork of this process. `close` does nothing then."""
        self._released = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._alive = False
            self._packets.close()

    def close(self) -> None:
        """End it, with all that it has started."""
        if self._released:
            return
        with self._lock:
            self._packets.hang_up()
            self._let_go()
        if self._programs is None:  # it still imports, and has started nothing
            self._popen.kill()
        try:
            self._popen.wait(END.total_seconds())
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Fork:
    """A process of a job that the fork server has started; see `Started`. For one thread only."""

    def __init__(self, server: ForkServer, pid: int, log: Path, offset: int) -> None:
        self.pid = pid
        self._server, self._log, self._offset = server, log, offset
        self._status: int | None = None

    @classmethod
    def start(
        cls,
        server: ForkServer,
        argv: Sequence[str],
        *,
        variables: Mapping[str, str],
        log: Path,
        lifeline: Lifeline,
        name: str,
    ) -> Fork | None:
        """Start a program like `Child.start`; None if the fork server cannot."""
        with opened(log) as output:
            offset = output.tell()
            descriptors = {output.fileno(): (1, 2), lifeline.fd: (lifeline.fd,)}
            pid = server.start(argv, variables=variables, descriptors=descriptors, name=name)
        return None if pid is None else cls(server, pid, log, offset)

    def poll(self) -> int | None:
        """See `Started`."""
        if self._status is None:
            self._status = self._server.status(self.pid)
        return self._status

    def terminate(self) -> None:
        """See `Started`."""
        self._server.signal(self.pid, signal.SIGTERM, group=False)

    def kill(self) -> None:
        """See `Started`."""
        self._server.signal(self.pid, signal.SIGKILL, group=True)

    def output(self) -> str:
        """See `Started`."""
        return last_lines(self._log, self._offset)
