"""Copies between a device and this host's memory, beside what the device computes.

A gradient is copied on a stream of its own, after what has computed it, into memory that the device may write
to directly (page-locked). So backward goes on meanwhile, and so does the script's thread. Who reads what was
copied waits for it: the threads that send. Values go back likewise; what the device computes next waits for
them, and the script's thread for nothing.

`Staging` keeps the order of the copies; what a device does is behind `Streams`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, SupportsInt

import torch

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A copy is made."""

    def synchronize(self) -> None:
        """Block until then; other threads go on."""

    def query(self) -> bool:
        """Whether it is made by now. Does not block."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """What the device computes on the stream from now on begins after that. Does not block."""


class Streams(Protocol):
    """What devices of one type can do. Thread-safe."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Let devices read and write contiguous host memory directly; returns what ends that.

        None: the system does not permit it, so copies are slower.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin to copy, after what the device computes now, beside what it computes next. Does not block.

        One of the two is on the device. Copies of one direction are made one after the other.
        """

    def compute_after(self, event: Event, device: torch.device) -> None:
        """What this thread has the device compute from now on begins after the event. Does not block."""


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def query(self) -> bool:
        """See `Event.query`."""
        with torch.cuda.device(self._device):
            return bool(self._event.query())

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """See `Event.wait`."""
        self._event.wait(stream)


class CudaStreams:
    """CUDA's: a stream for copies to the host and one for copies from it, on each device.

    CUDA opens a context, which takes some hundred MiB, on the device that is current when it is called. In a
    new thread that is device 0, which may belong to another worker. So the device that a call is about is
    made the current one before.

    Args:
        device: one of the devices, which locks the host's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    def pin(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """See `Streams.pin`."""
        runtime, address, size = torch.cuda.cudart(), memory.data_ptr(), memory.nbytes
        if code := self._code_of(lambda: runtime.cudaHostRegister(address, size, 0)):
            logger.info("CUDA cannot lock %d bytes of memory (error %d): copies are slower", size, code)
            return None

        def unpin() -> None:
            self._code_of(lambda: runtime.cudaHostUnregister(address))

        return unpin

    def _code_of(self, call: Callable[[], SupportsInt]) -> int:
        """Call CUDA's runtime; returns the code of its error, or 0.

        CUDA remembers a thread's last error, and torch would raise it at the next kernel of the script.
        """
        with torch.cuda.device(self._device):
            code = int(call())
            if code:
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)  # torch asks its kernel for the error: it is forgotten
        return code

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """See `Streams.copy`."""
        there = source if source.is_cuda else target
        stream = self._stream(there.device, source.is_cuda)
        stream.wait_stream(torch.cuda.current_stream(there.device))
        with torch.cuda.device(there.device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # else who waits for it keeps a core busy
            event.record(stream)
        there.record_stream(stream)  # no other tensor gets its memory before
        return CudaEvent(event, there.device)

    def compute_after(self, event: Event, device: torch.device) -> None:
        """See `Streams.compute_after`."""
        event.wait(torch.cuda.current_stream(device))

    def _stream(self, device: torch.device, down: bool) -> torch.cuda.Stream:
        with self._lock:
            if (device, down) not in self._streams:
                self._streams[device, down] = torch.cuda.Stream(device)
            return self._streams[device, down]


def streams_of(device: torch.device) -> Streams | None:
    """Those of a type of devices; None where a copy is made before the next line of the script."""
    return CudaStreams(device) if device.type == "cuda" else None


class Staging:
    """Copies to and from the flat memory of a model. Thread-safe, but for `up` and `settle`.

    Args:
        devices: where the model's tensors are.
        memory: that they are copied to and from.
    """

    def __init__(self, devices: Iterable[torch.device], memory: Collection[torch.Tensor]) -> None:
        types = {device.type: device for device in devices}
        self._streams = {kind: of for kind, device in types.items() if (of := streams_of(device)) is not None}
        self._lock = threading.Lock()
        self._down: dict[int, Event] = {}
        self._up: list[Event] = []
        for streams in self._streams.values():
            for each in memory:
                if each.numel() and (unpin := streams.pin(each)) is not None:
                    weakref.finalize(self, _end, unpin, each).atexit = False

    def handles(self, tensor: torch.Tensor) -> bool:
        """Whether a copy of this one goes on beside what its device computes."""
        return tensor.device.type in self._streams

    def down(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to the host: when this returns, or when `arrived` has."""
        streams = self._streams.get(source.device.type)
        if streams is None:
            target.copy_(source)
            return
        event = streams.copy(target, source)
        with self._lock:
            self._down[index] = event

    def are_here(self, indexes: Iterable[int]) -> bool:
        """Whether `arrived` would not block."""
        with self._lock:
            events = [self._down.get(index) for index in indexes] if self._down else []
        return all(event is None or event.query() for event in events)

    def arrived(self, indexes: Iterable[int]) -> None:
        """Block until the last copies of these tensors to the host are made."""
        if not self._down:
            return
        for index in indexes:
            with self._lock:
                event = self._down.get(index)
            if event is None:
                continue
            event.synchronize()
            with self._lock:
                if self._down.get(index) is event:
                    del self._down[index]

    def up(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to each first tensor the second one, which stays as it is until `settle` has returned.

        What is computed next is computed on the copies. Blocks for those that no stream makes.
        """
        last: dict[torch.device, Event] = {}
        for target, source in pairs:
            streams = self._streams.get(target.device.type)
            if streams is None:
                target.copy_(source)
            else:
                last[target.device] = streams.copy(target, source)
        for device, event in last.items():
            self._streams[device.type].compute_after(event, device)
            self._up.append(event)

    def settle(self) -> None:
        """Block until the copies of `up` are made: what was copied may be written over."""
        for event in self._up:
            event.synchronize()
        self._up.clear()


def _end(unpin: Callable[[], None], _memory: torch.Tensor) -> None:
    """The memory is there until it has ended."""
    unpin()
