"""Lends memory that is written to again to tensors that a script has.

A script may keep such a tensor, or one that shares its memory, for as long as it likes. So the owner of the
memory asks, before it writes, whether one still exists.
"""

from __future__ import annotations

import weakref

import torch

from elastic_ps.codec.memory import as_bytes

WORTHWHILE = 1 << 16
"""Bytes of a piece from which on lending it is worth the time of a step that it takes."""


class Loans:
    """Pieces of memory that are lent, by number. Not thread-safe."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def lend(self, number: int, memory: torch.Tensor) -> torch.Tensor:
        """A tensor with the memory of one on the CPU, which is contiguous and not empty.

        It owns its storage and is not a view, so it may be saved, or detached in place, like any other.
        """
        view = as_bytes(memory)
        self._lent[number] = weakref.ref(view)  # the storage holds it
        return torch.frombuffer(view, dtype=memory.dtype).view(memory.shape).data

    def in_use(self, number: int) -> bool:
        """Whether the tensor that was lent last, or one that shares its storage, still exists."""
        lent = self._lent.get(number)
        return lent is not None and lent() is not None
