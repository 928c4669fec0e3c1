"""Copies tensors between devices and the host's memory, beside computations.

A gradient is copied on a stream of its own, after it has been computed, into page-locked memory. So backward
and the script's thread go on, and a thread that sends the gradient waits for the copy. Values are copied back
in the same way: the device waits for them before it computes, and the script's thread does not wait.
`Staging` keeps the order of the copies, and `Streams` makes them on devices of one type.
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
    """An event that occurs when a copy is made."""

    def synchronize(self) -> None:
        """Block until then; other threads go on."""

    def query(self) -> bool:
        """Whether it has occurred. Does not block."""

    def wait(self) -> None:
        """Have this thread's next computations on the device wait for it. Does not block."""


class Streams(Protocol):
    """The operations of devices of one type. Thread-safe."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Page-lock contiguous host memory for devices; returns what ends that.

        Returns None if the system does not permit it: copies are slower then.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Begin to copy when the device has computed what it has queued. Does not block.

        One of the two tensors is on the device. Copies of one direction are made one after the other.
        """


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))


class CudaStreams:
    """CUDA's: a stream for copies to the host and one for copies from it, on each device.

    CUDA opens a context, which takes some hundred MiB, on the device that is current when it is called. In a
    new thread that is device 0, which may belong to another worker. So each call makes its device the current
    one first.

    Args:
        device: one of the devices, which locks the host's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}

    def pin(self, memory: torch.Tensor) -> Callable[[], None] | None:
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
        there = source if source.is_cuda else target
        stream = self._stream(there.device, source.is_cuda)
        stream.wait_stream(torch.cuda.current_stream(there.device))
        with torch.cuda.device(there.device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # else a thread that waits keeps a core busy
            event.record(stream)
        there.record_stream(stream)  # no other tensor gets its memory before
        return CudaEvent(event, there.device)

    def _stream(self, device: torch.device, down: bool) -> torch.cuda.Stream:
        with self._lock:
            if (device, down) not in self._streams:
                self._streams[device, down] = torch.cuda.Stream(device)
            return self._streams[device, down]


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device's type; None if its copies are made at once."""
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
        """True if this tensor is copied on a stream."""
        return tensor.device.type in self._streams

    def down(self, index: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to the host. The copy is made when this returns, or when `arrived` returns."""
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
        """Copy each pair's second tensor to its first. The second one must not change until `settle` returns.

        A device computes next on the copies. Blocks for those that no stream makes.
        """
        last: dict[torch.device, Event] = {}
        for target, source in pairs:
            streams = self._streams.get(target.device.type)
            if streams is None:
                target.copy_(source)
            else:
                last[target.device] = streams.copy(target, source)
        for event in last.values():
            event.wait()
            self._up.append(event)

    def settle(self) -> None:
        """Block until the copies of `up` are made: their sources may be overwritten."""
        for event in self._up:
            event.synchronize()
        self._up.clear()


def _end(unpin: Callable[[], None], _memory: torch.Tensor) -> None:
    """Unpin memory, which must not be freed before."""
    unpin()
