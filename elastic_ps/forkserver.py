"""`python -m elastic_ps.forkserver SOCKET`: starts the processes of a job on this host by forking itself.

Importing torch takes a second of CPU time in each process, which is most of the time to replace a killed one.
This process imports the modules once. Each process of the job is a fork, which has them from the start and
shares their memory. A fork is as good as a new process, because this one never has a second thread, opens no
connection and computes nothing.

`local.forks` is the other side of the socket. If it is gone, this process ends with all that it has started.
It ignores signals that all processes of a session get: without it, nobody would learn how its forks end, and
they would be killed, even a parameter server that writes its last checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic_ps.contract import exits
from elastic_ps.contract.env import THREAD_VARIABLES, disable_grpc_fork_hooks
from elastic_ps.contract.packets import Packets
from elastic_ps.process import lifecycle

FOR_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a system sends to all processes of a session or service. The launcher reacts to them."""


def _programs() -> Mapping[str, Callable[[], int]]:
    """The mains of the forks, by module name. Imports their modules."""
    with lifecycle.importing():
        disable_grpc_fork_hooks()
        from elastic_ps.evaluation import __main__ as evaluator
        from elastic_ps.evaluation import script  # noqa: F401
        from elastic_ps.process import compiler  # noqa: F401
        from elastic_ps.server import __main__ as server
        from elastic_ps.server import process as parameter_server  # noqa: F401
        from elastic_ps.server.job import status  # noqa: F401
        from elastic_ps.transport import credentials, grpc, ways  # noqa: F401
        from elastic_ps.worker import __main__ as worker
        from elastic_ps.worker import current  # noqa: F401
        from elastic_ps.worker import script as workers_script  # noqa: F401
    return {
        "elastic_ps.evaluation": evaluator.main,
        "elastic_ps.server": server.main,
        "elastic_ps.worker": worker.main,
    }


@contextlib.contextmanager
def _ending_with(sock: socket.socket) -> Iterator[None]:
    """End this process at once if the other side of the socket, which sends nothing meanwhile, goes.

    SIGIO does that, even while a library takes a second to load. A signal on the parent's death would not do:
    with `--detach` the parent ends, and its fork goes on.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([sock], [], [], 0)[0]:
        sys.exit(0)  # it has gone before
    try:
        yield
    finally:
        fcntl.fcntl(sock, fcntl.F_SETFL, flags)


class _Forks:
    """The processes that were started and have not ended."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._running: set[int] = set()
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        heard = [number for number in FOR_ALL if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *heard)}
        for number in self._before:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> dict[str, Any] | None:
        """Carry out orders. Returns in each fork with its order, and here at the end with None."""
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        poll.register(self._packets.sock, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._awake in ready:
                os.read(self._awake, 4096)
                self._reap()
            if self._packets.sock.fileno() not in ready:
                continue
            try:
                order, descriptors = self._packets.receive()
            except EOFError:
                for pid in self._running:  # most have a lifeline, but a check has none
                    self._signal(pid, signal.SIGKILL, group=True)
                return None
            if "signal" in order:
                if order["pid"] in self._running:  # so the number is not another process's
                    self._signal(order["pid"], order["signal"], group=order["group"])
            elif (forked := self._fork()) == 0:
                self._begin(order, descriptors)
                return order
            else:
                if forked is not None:
                    self._running.add(forked)
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork(self) -> int | None:
        """Like `os.fork`; None if the system refuses a process, which the other side is told."""
        try:
            return os.fork()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._packets.send({"refused": str(error)})
            return None

    def _signal(self, pid: int, number: int, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number) if group else os.kill(pid, number)

    def _reap(self) -> None:
        for pid in list(self._running):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._signal(pid, signal.SIGKILL, group=True)  # what it has started, before its pid is free
                _, status = os.waitpid(pid, 0)
                self._running.discard(pid)
                with contextlib.suppress(OSError):
                    self._packets.send({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _begin(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """In the fork: become an independent process."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._awake)
        os.close(self._wake)
        os.setsid()
        self._packets.send({"started": os.getpid()})
        self._packets.close()
        for source, targets in zip(descriptors, order["descriptors"], strict=True):
            for target in targets:
                os.dup2(source, target)
            if source not in targets:
                os.close(source)


def _become(order: Mapping[str, Any]) -> None:
    """In the fork: set the ordered environment and arguments, and new random seeds."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["directory"])
    sys.argv = [order["program"], *order["arguments"]]
    threads = os.environ.get(THREAD_VARIABLES[0], "").partition(",")[0].strip()  # a list: for nested regions
    if threads.isdecimal() and int(threads):  # otherwise OpenMP ignores it
        torch.set_num_threads(int(threads))  # OpenMP has read its variable long ago
    np.random.seed()  # Python's own `random` does so by itself
    torch.seed()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(order["name"])


def _run(program: Callable[[], int], shared: Collection[str]) -> NoReturn:
    """Run as a fork and end as Python does, but without freeing what the fork server shares with it.

    To free that, Python writes to nearly all of this memory, and each fork then has a copy of it. The modules
    that the script has imported are freed: their files are written, and their finalizers run.

    Args:
        shared: the names of the modules that the fork server has imported.
    """
    status: object = 1
    try:
        status = program()
    except SystemExit as ending:
        status = ending.code
    except Exception:  # noqa: BLE001 (as Python does at the end)
        sys.excepthook(*sys.exc_info())
    if not isinstance(status, int):
        if status is not None:
            print(status, file=sys.stderr)
        status = 0 if status is None else 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 (as in a process of multiprocessing)
    atexit._run_exitfuncs()  # noqa: SLF001
    for name in sys.modules.keys() - shared:
        del sys.modules[name]
    gc.collect()
    ctypes.CDLL(None).fflush(None)
    lifecycle.end_now(status)


def main() -> NoReturn:
    """Serve, or run as a fork, to the end of the process."""
    packets = Packets(socket.socket(fileno=int(sys.argv[1])))
    exits.print_stacks_on_request()  # before any fork
    with _ending_with(packets.sock):
        programs = _programs()
    packets.send({"programs": list(programs)})
    order = _Forks(packets).serve()
    if order is None:
        lifecycle.end_now(0)
    shared = set(sys.modules)
    _become(order)
    if order["program"] == "elastic_ps.server":  # as its own `__main__` does
        lifecycle.end_now(programs[order["program"]]())
    _run(programs[order["program"]], shared)


if __name__ == "__main__":
    main()
