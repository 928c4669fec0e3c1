"""A stand-in for the streams of a device, on the CPU: whoever does not wait for a copy finds NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch


class Said(NamedTuple):
    """What was asked for: `what`, by which thread, of which direction."""

    what: str
    thread: str
    down: bool


class Copy:
    """A copy that has begun; an `Event`."""

    def __init__(self, streams: LateStreams, target: torch.Tensor, source: torch.Tensor, down: bool) -> None:
        self._streams, self._target, self._source = streams, target, source
        self._then = source.detach().clone()
        self.down = down
        target.fill_(torch.nan if target.is_floating_point() else -1)

    def make(self) -> None:
        assert torch.equal(self._source, self._then), "what is being copied was changed"
        self._target.copy_(self._then)

    def query(self) -> bool:
        return not self._streams.is_begun(self)

    def synchronize(self) -> None:
        self._streams.note("wait", self.down)
        self._streams.make(self)

    def wait(self) -> None:
        self._streams.note("compute after", self.down)
        self._streams.make(self)


class LateDevice:
    """A device whose copies are late. Thread-safe.

    Attributes:
        said: what was asked for, in order.
        pinned: how many bytes are.
    """

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.pinned = 0
        self._lock = threading.Lock()

    def note(self, what: str, down: bool) -> None:
        """Remember what this thread asks for."""
        with self._lock:
            self.said.append(Said(what, threading.current_thread().name, down))

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See `Streams.pin`."""
        nbytes = memory.nbytes
        self.pinned += nbytes

        def unpin() -> None:
            self.pinned -= nbytes

        return unpin

    def streams(self) -> LateStreams:
        """Those of one worker. As with a real device, nobody who waits for them waits for another's."""
        return LateStreams(self)


class LateStreams:
    """Makes a copy, and those before it, when somebody waits for it; until then its target has NaN."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._host: list[tuple[int, int]] = []
        self._begun: list[Copy] = []
        self._lock = threading.Lock()

    def note(self, what: str, down: bool) -> None:
        """See `LateDevice.note`."""
        self._device.note(what, down)

    def is_begun(self, copy: Copy) -> bool:
        """Whether a copy is not made yet."""
        with self._lock:
            return copy in self._begun

    def make(self, copy: Copy) -> None:
        """Make a copy, after those of its direction that began before it."""
        with self._lock, torch.no_grad():
            if copy in self._begun:
                due = [each for each in self._begun[: self._begun.index(copy) + 1] if each.down == copy.down]
                for each in due:
                    each.make()
                    self._begun.remove(each)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See `Streams.pin`."""
        self._host.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return self._device.pin(memory)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """See `Streams.copy`."""
        down = any(begin <= target.data_ptr() < end for begin, end in self._host)
        self.note("copy", down)
        with self._lock, torch.no_grad():
            self._begun.append(Copy(self, target, source, down))
            return self._begun[-1]
