"""What `CudaStreams` asks of CUDA, for which a stand-in answers; nobody here has a GPU for certain."""

from __future__ import annotations

import pytest
import torch

from elastic_ps.worker.staging import CudaStreams

DEVICE = torch.device("cuda", 1)
ALREADY_REGISTERED = 712
"""CUDA's code of this error."""


class Cuda:
    """A stand-in for torch.cuda and CUDA's runtime, with the state of one thread.

    Attributes:
        code: what the runtime answers to its next calls; 0 is success.
        error: the last one, which the next kernel raises and forgets.
    """

    def __init__(self) -> None:
        self.code = self.error = 0

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return self._called()

    def cudaHostUnregister(self, address: int) -> int:
        return self._called()

    def _called(self) -> int:
        self.error = self.code or self.error
        return self.code

    def ones(self, count: int, *, device: torch.device) -> torch.Tensor:
        """A kernel."""
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")
        return torch.full((count,), 1.0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", cuda.cudart)
    monkeypatch.setattr(torch, "ones", cuda.ones)
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
