"""What `CudaStreams` asks of CUDA, for which a stand-in answers; nobody here has a GPU for certain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from elastic_ps.codec.devices import CudaStreams
from tests.testing import machine

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 1)
ALREADY_REGISTERED = 712
"""CUDA's code of this error."""


class Cuda:
    """A stand-in for torch.cuda and CUDA's runtime, with the state of one thread.

    Attributes:
        current: the index of the device that is current.
        opened: the devices that have a context: those on which something was done.
        code: what the runtime answers to its next calls; 0 is success.
        error: the last one, which the next kernel raises and forgets.
    """

    def __init__(self) -> None:
        self.current = 0
        self.opened: set[int] = set()
        self.code = self.error = 0

    def work(self) -> None:
        """Something is done on the current device."""
        self.opened.add(self.current)

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return self._called()

    def cudaHostUnregister(self, address: int) -> int:
        return self._called()

    def _called(self) -> int:
        self.work()
        self.error = self.code or self.error
        return self.code

    def ones(self, count: int, *, device: torch.device) -> torch.Tensor:
        """A kernel."""
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")
        return torch.full((count,), 1.0)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """It does nothing with the device that was current before."""
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes the stream's device the current one; afterwards it sets the stream of the one before."""
        before, self.current = self.current, stream.device.index
        yield
        self.current = before
        self.work()

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(device)


class Stream:
    """A stream, which does what it is told at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, stream: Stream) -> None:
        pass


class Event:
    """An event, which has happened when it is made."""

    def __init__(self, cuda: Cuda, *, blocking: bool = False) -> None:
        self._cuda, self._blocking = cuda, blocking

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        assert self._blocking, "CUDA would look at it again and again"
        self._cuda.work()

    def query(self) -> bool:
        self._cuda.work()
        return True


class Tensor:
    """A tensor on a device or the host."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking

    def record_stream(self, stream: Stream) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    own = {name: getattr(cuda, name) for name in ("cudart", "device", "stream", "current_stream")}
    event = partial(Event, cuda)
    machine.has_cuda(monkeypatch, cuda.ones, Stream=Stream, Event=event, **own)
    return cuda


def test_memory_that_cuda_does_not_lock_leaves_no_error_behind(cuda: Cuda) -> None:
    cuda.code = ALREADY_REGISTERED
    assert CudaStreams(DEVICE).pin(torch.zeros(4)) is None
    assert not cuda.error, "the script's next kernel would raise it"


def test_memory_that_cuda_does_not_unlock_leaves_no_error_behind(cuda: Cuda) -> None:
    unpin = CudaStreams(DEVICE).pin(torch.zeros(4))
    assert unpin is not None
    cuda.code = ALREADY_REGISTERED
    unpin()
    assert not cuda.error


@pytest.mark.parametrize(("to", "of"), [(HOST, DEVICE), (DEVICE, HOST)])
def test_no_other_device_is_touched(cuda: Cuda, to: torch.device, of: torch.device) -> None:
    """Device 0, which is current in a new thread, may be another worker's."""
    streams = CudaStreams(DEVICE)
    unpin = streams.pin(torch.zeros(4))
    target: Any = Tensor(to)
    source: Any = Tensor(of)
    event = streams.copy(target, source)
    assert event.query()
    event.synchronize()
    assert unpin is not None
    unpin()
    assert cuda.opened == {DEVICE.index}
    assert cuda.current == 0, "the script's device is current again"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the stand-in alone answers")
def test_a_script_goes_on_after_memory_was_not_locked() -> None:
    memory, device = torch.zeros(1 << 20), torch.device("cuda", 0)
    streams = CudaStreams(device)
    unpin = streams.pin(memory)
    assert unpin is not None
    assert streams.pin(memory) is None, "it is locked already"
    assert torch.ones(1, device=device).item() == 1
    for _ in range(2):
        unpin()
    assert torch.ones(1, device=device).item() == 1
