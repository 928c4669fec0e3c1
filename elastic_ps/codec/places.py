"""Finds the places of few large or nonzero elements of a tensor, and encodes them.

numpy uses vector instructions, and takes a small fraction of the time of `torch.Tensor.nonzero`, which reads
an array element by element.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_BLOCK = 1 << 16
"""The elements of a block, in which two bytes encode a place."""

LOW, COUNTS = "low", "counts"
"""The names of the encoded places: positions in blocks, int16, and counts of each block, int32."""


def of_large(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """The places, in order, of the elements whose magnitude is at least `limit`, which is not negative.

    `tensor` is flat and on the CPU.
    """
    elements = tensor.numpy()
    large = elements >= limit
    large |= elements <= -limit
    return torch.from_numpy(np.flatnonzero(large))


def of_nonzero(tensor: torch.Tensor) -> torch.Tensor | None:
    """The places, in order, of the elements that are not zero; None if they are at least half of all."""
    there = tensor.numpy() != 0
    if 2 * np.count_nonzero(there) >= there.size:
        return None
    return torch.from_numpy(np.flatnonzero(there))


def packed(places: torch.Tensor, elements: int) -> dict[str, torch.Tensor]:
    """Encode places in a tensor of so many elements: `LOW`, and with several blocks `COUNTS`.

    They take two bytes each, and four for each block of the tensor.

    Args:
        places: int64, in order.
    """
    found = places.numpy()
    parts = {LOW: torch.from_numpy(found.astype(np.uint16).view(np.int16))}
    if elements > _BLOCK:
        ends = np.searchsorted(found, np.arange(_BLOCK, elements + _BLOCK, _BLOCK))
        parts[COUNTS] = torch.from_numpy(np.diff(ends, prepend=0).astype(np.int32))
    return parts


def unpacked(parts: Mapping[str, torch.Tensor], elements: int) -> torch.Tensor:
    """Decode places, int64, some of which may be beyond the end of the tensor; see `packed`.

    Raises ValueError if they do not fit a tensor of so many elements.
    """
    low = parts[LOW]
    if low.dtype is not torch.int16:
        raise ValueError(f"places of {low.dtype}; expected {torch.int16}")
    places = low.numpy().view(np.uint16).astype(np.int64)
    blocks = -(-elements // _BLOCK)
    if blocks > 1:
        counts = parts[COUNTS]
        if counts.dtype is not torch.int32 or counts.numel() != blocks:
            said = f"{counts.numel()} counts of {counts.dtype}"
            raise ValueError(f"{said}; expected {blocks} of {torch.int32}")
        each = counts.numpy()
        if int(each.min()) < 0 or int(each.sum(dtype=np.int64)) != len(places):
            raise ValueError(f"the blocks have not {len(places)} places together, none of them fewer than 0")
        places += np.repeat(np.arange(blocks, dtype=np.int64) * _BLOCK, each)
    return torch.from_numpy(places)
