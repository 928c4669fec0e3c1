"""What the processes of one worker have from the system: pipes between them, and files that they hand over.

The files are real ones, in memory. So the processes do share what they allocate together.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from typing import Any

from tests.simulator.world import Process, Task, world


class End:
    """A process's end of a pipe, with those methods of `multiprocessing.connection.Connection` that are used.

    It is closed with the process. What was sent before that still arrives.
    """

    def __init__(self, process: Process) -> None:
        self.other: End
        self.arrived: deque[bytes | File] = deque()
        self._waiting: list[Task] = []
        self.closed = False
        process.on_death.append(self.close)

    @classmethod
    def pair(cls, one: Process, other: Process) -> tuple[End, End]:
        ends = cls(one), cls(other)
        ends[0].other, ends[1].other = ends[1], ends[0]
        return ends

    def send(self, item: object) -> None:
        self.put(pickle.dumps(item))

    def put(self, item: bytes | File) -> None:
        here = world()
        here.preempt()
        if self.closed or self.other.closed:
            raise BrokenPipeError("the other process has gone")
        self.other.arrived.append(item)
        self.other.wake()
        here.preempt()

    def recv(self) -> Any:
        item = self.take()
        assert isinstance(item, bytes)
        return pickle.loads(item)

    def take(self) -> bytes | File:
        here = world()
        here.preempt()
        while not self.arrived:
            if self.closed or self.other.closed:
                raise EOFError
            self._waiting.append(here.task)
            here.block(None)
        return self.arrived.popleft()

    def fileno(self) -> int:
        raise OSError("the simulator's pipes have no descriptors")

    def close(self) -> None:
        self.closed = True
        self.wake()
        self.other.wake()

    def wake(self) -> None:
        for task in self._waiting:
            world().wake(task)
        self._waiting.clear()


class File:
    """A descriptor on its way to another process, which may have gone before it arrives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = os.dup(descriptor)

    def take(self) -> int:
        assert self._descriptor is not None
        taken, self._descriptor = self._descriptor, None
        return taken

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def send_handle(end: End, descriptor: int, _process: int | None) -> None:
    """As that of `multiprocessing.reduction`."""
    end.put(File(descriptor))


def recv_handle(end: End) -> int:
    """As that of `multiprocessing.reduction`."""
    file = end.take()
    assert isinstance(file, File)
    return file.take()
