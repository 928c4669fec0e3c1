"""Which tensors have elements in common memory, as a weight and its transpose that another layer uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch


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
    """Whether one begins before another one has ended."""
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + _span(tensor)) for tensor in tensors)
    return any(start < end for (_, end), (start, _) in itertools.pairwise(ends))


def _span(tensor: torch.Tensor) -> int:
    """The bytes from the first element to the end of the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def _pairs(tensors: Sequence[torch.Tensor], together: Sequence[int]) -> Iterator[tuple[int, int]]:
    """See `overlaps`, of tensors with one storage, of each of whose elements is noted whose it is."""
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
