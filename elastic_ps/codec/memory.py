"""Conversions between tensors and bytes, reusable memory, checksums, and what shares memory."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterator, Sequence
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


def overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors with common elements: each one with one before it. Views side by side have none."""
    by_storage: dict[tuple[torch.device, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            place = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(place, []).append(index)
    return [
        pair
        for together in by_storage.values()
        if _meet([tensors[index] for index in together])
        for pair in _pairs(tensors, together)
    ]


def _meet(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of two tensors may overlap."""
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + _span(tensor)) for tensor in tensors)
    return any(start < end for (_, end), (start, _) in itertools.pairwise(ends))


def _span(tensor: torch.Tensor) -> int:
    """The bytes from the first element to the end of the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def _pairs(tensors: Sequence[torch.Tensor], together: Sequence[int]) -> Iterator[tuple[int, int]]:
    """See `overlaps`, of tensors with one storage. Notes for each of its elements which tensor has it."""
    unit = min(tensors[index].element_size() for index in together)
    nbytes = tensors[together[0]].untyped_storage().nbytes()
    whose = torch.full((nbytes // unit,), -1, dtype=torch.int32, device="cpu")
    for index in together:
        tensor = tensors[index]
        units = tensor.element_size() // unit
        shape = [size if step else 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        steps = [step * units for step in tensor.stride()]
        place = whose.as_strided([*shape, units], [*steps, 1], tensor.storage_offset() * units)
        if (other := int(place.max())) >= 0:
            yield other, index
        place.fill_(index)


PAGE = 4096
PARTS = 8
"""How many parts each `PAGE` bytes have; the other times one of them is looked at."""

LITTLE = 64 * 1024
"""Bytes. Memory that is not larger is copied in less time than torch takes to begin a sum."""

MUCH = 1024 * 1024
"""Bytes. Smaller memory is always looked at as a whole."""


class Bits:
    """The bits of flat memory, of which a part can be compared."""

    def __init__(self, flat: torch.Tensor) -> None:
        raw = flat.view(torch.uint8)
        self._small = as_bytes(raw) if len(raw) <= LITTLE else None
        paged = len(raw) // PAGE * PAGE if len(raw) >= MUCH else 0
        pages = raw[:paged].view(torch.int64).view(-1, PAGE // 8)
        self._parts = pages.chunk(PARTS, dim=1)
        tail = raw[paged:]
        whole = len(tail) // 8 * 8
        self._pages, self._words, self._rest = pages, tail[:whole].view(torch.int64), tail[whole:]

    def digest(self, part: int | None = None) -> int | bytes:
        """A sum of the bits, or a copy of little memory.

        Args:
            part: of this part of each page alone, if there are many, and of the bytes after the last page.
        """
        if self._small is not None:
            return bytes(self._small)
        pages = self._pages if part is None else self._parts[part]
        return sum(int(each.sum()) for each in (pages, self._words, self._rest) if each.numel())
