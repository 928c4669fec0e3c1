"""Conversions between tensors and bytes, and reusable memory."""

from __future__ import annotations

import warnings
import zlib
from typing import Protocol

import torch


class Body(Protocol):
    """Bytes that are being received; see `transport.base.Incoming`."""

    @property
    def size(self) -> int: ...

    def view(self) -> memoryview | None: ...

    def read_into(self, target: memoryview) -> None: ...


class Scratch:
    """Memory that is reused, which is faster than new memory."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def bytes(self, nbytes: int) -> memoryview:
        """Memory of that many bytes."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return memoryview(self._memory)[:nbytes]

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of that many elements, flat."""
        return as_tensor(self.bytes(elements * dtype.itemsize), dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype, as writable bytes, without a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.dtype is torch.float32:  # faster, but numpy does not know all dtypes
        return tensor.detach().numpy().data.cast("B")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def as_tensor(data: memoryview, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A flat tensor over these bytes, without a copy. It must not be written to if they are read-only."""
    return torch.frombuffer(data, dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype, device="cpu")


with warnings.catch_warnings():  # torch says once that it does not know of read-only tensors
    warnings.simplefilter("ignore")
    as_tensor(memoryview(b"\0"))


def checksum(data: memoryview) -> int:
    """A CRC-32 checksum of the bytes."""
    return zlib.crc32(data)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype with this name, one of `core.partition.ITEM_SIZE`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The inverse of `dtype_of`."""
    return str(dtype).removeprefix("torch.")
