"""Where the program uses threads, clocks, queues, locks of files and disks, it gets the simulator's."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulator import pipes
from tests.simulator.primitives import Condition, Queue, Threading, Time
from tests.simulator.world import Process, World, world

MODULES = {
    "threading": Threading,
    "queue": Queue,
    "time": Time,
}

PACKAGES = (
    "elastic_ps.codec.state",
    "elastic_ps.process.retrying",
    "elastic_ps.process.telemetry",
    "elastic_ps.server.job.commit",
    "elastic_ps.server.job.guarded",
    "elastic_ps.server.job.checkpointer",
    "elastic_ps.server.calls.shard_zero",
    "elastic_ps.server.calls.node",
    "elastic_ps.server.process",
    "elastic_ps.server.shards.pulls",
    "elastic_ps.server.orders",
    "elastic_ps.server.job.standby",
    "elastic_ps.server.shards.shard",
    "elastic_ps.worker.wire.client",
    "elastic_ps.worker.strategies.push_pull",
    "elastic_ps.worker.strategies.strategy",
    "elastic_ps.worker.runtime.gradients",
    "elastic_ps.worker.runtime.membership",
    "elastic_ps.worker.wire.local_world",
    "elastic_ps.worker.model.values",
    "elastic_ps.worker.strategies.all_reduce",
    "elastic_ps.worker.strategies.replica",
    "elastic_ps.worker.strategies.local_group",
)


@contextmanager
def simulated(disk: Disk) -> Iterator[None]:
    """The program's modules use the simulator's primitives, and the disk asks `disk`."""
    with contextlib_stack() as patch:
        for name in PACKAGES:
            module = importlib.import_module(name)
            for attribute, replacement in MODULES.items():
                if hasattr(module, attribute):
                    patch(module, attribute, replacement)
        patch(importlib.import_module("elastic_ps.server.job.commit"), "ThreadPoolExecutor", Executor)
        client = importlib.import_module("elastic_ps.worker.wire.client")
        patch(client, "random", SimpleNamespace(random=lambda: world().random.random()))
        local_world = importlib.import_module("elastic_ps.worker.wire.local_world")
        patch(local_world, "send_handle", pipes.send_handle)
        patch(local_world, "recv_handle", pipes.recv_handle)
        files = importlib.import_module("elastic_ps.checkpoint.files")
        operations = {name: getattr(fcntl, name) for name in ("LOCK_EX", "LOCK_NB", "LOCK_UN")}
        patch(files, "fcntl", SimpleNamespace(**operations, flock=disk.flock))
        patch(files, "flush", disk.flush)
        for call in ("stat", "lstat", "listdir", "open", "preadv"):
            patch(os, call, disk.watched(getattr(os, call)))
        yield


@contextmanager
def contextlib_stack() -> Iterator[Any]:
    patches: list[Any] = []

    def patch(module: Any, name: str, replacement: Any) -> None:
        patches.append(mock.patch.object(module, name, replacement))
        patches[-1].start()

    try:
        yield patch
    finally:
        for each in reversed(patches):
            each.stop()


class Disk:
    """What all processes write to.

    Attributes:
        root: the directory that the disk is mounted at; None before there is one.
        full_until: virtual time until which nothing more fits.
        unreadable_until: virtual time until which no file or directory can be looked at.
    """

    def __init__(self, here: World) -> None:
        self.root: Path | None = None
        self.full_until = self.unreadable_until = 0.0
        self._judged = False
        self._here = here
        self._held: dict[str, tuple[Any, Process]] = {}
        self._changed: Condition | None = None

    def flock(self, file: Any, operation: int) -> None:
        """As the system's: the lock goes with the open file, or with the process."""
        here = world()
        path = str(Path(file.name).resolve())
        if operation == fcntl.LOCK_UN:
            if self._held.get(path, (None,))[0] is file:
                del self._held[path]
            return
        while True:
            here.preempt()
            owner = self._held.get(path)
            if owner is None or owner[0].closed or owner[1].dead or owner[0] is file:
                self._held[path] = (file, here.process)
                return
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError(errno.EAGAIN, "locked")
            here.sleep(0.001)

    def watched(self, call: Any) -> Any:
        """A call of the system that reads, which fails while the disk is unreadable."""

        def read(path: Any, *arguments: Any, **named: Any) -> Any:
            if self._fails(path, *arguments):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *arguments, **named)

        return read

    def _fails(self, path: Any, *arguments: Any) -> bool:
        if World.current is None or self._judged or world().now >= self.unreadable_until:
            return False
        if isinstance(path, int):  # a file that is open for reading
            return True
        writes = bool(arguments) and isinstance(arguments[0], int) and arguments[0] & os.O_ACCMODE
        return not writes and self.root is not None and Path(path).is_relative_to(self.root)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """The judge looks at the disk, and that never fails. No other task has its turn meanwhile."""
        self._judged = True
        try:
            yield
        finally:
            self._judged = False

    def flush(self, path: Path) -> None:
        """A write takes a moment, and may find no room."""
        here = world()
        here.sleep(10 ** here.random.uniform(-4, -1.5))
        if here.now < self.full_until:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


class Future:
    def __init__(self) -> None:
        self._changed = Condition()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: Any, error: BaseException | None) -> None:
        with self._changed:
            self._value, self._error, self._done = value, error, True
            self._changed.notify_all()

    def result(self, timeout: float | None = None) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout)
        if self._error is not None:
            raise self._error
        return self._value


class Executor:
    """`ThreadPoolExecutor`, with a thread for each call."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix
        self._closed = False

    def submit(self, function: Any, *args: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()

        def run() -> None:
            try:
                value = function(*args)
            except Exception as error:  # noqa: BLE001
                future.set(None, error)
            else:
                future.set(value, None)

        Threading.Thread(target=run, name=self._name).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
