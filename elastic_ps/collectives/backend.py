"""What a communicator needs of the library that moves the bytes: `over_torch` and `over_mpi` implement it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Reduction = Literal["sum", "min", "max", "product"]
"""What a library makes of the elements that several processes have at one place."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until it is over. Raises what the library raises if it has failed."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Does not block."""


class Both:
    """Operations under way, as one."""

    def __init__(self, *pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> None:
        """See `Pending.wait`."""
        for each in self._pending:
            each.wait()

    def done(self) -> bool:
        """See `Pending.done`."""
        return all(each.done() for each in self._pending)


class Backend(abc.ABC):
    """The operations of one group of processes, on flat contiguous tensors. None of them blocks.

    A tensor must live, and must not be changed, until its operation is over. What only moves is given as
    bytes (uint8), what is reduced in one of the dtypes of `reducible`.

    Attributes:
        rank, size: the place of this process in the group, from 0, and how many there are.
        reducible: the dtypes that can be reduced.
        name: of the library, for messages.
    """

    rank: int
    size: int
    reducible: frozenset[torch.dtype]
    name: str

    @abc.abstractmethod
    def device(self, wanted: torch.device) -> torch.device:
        """Where a tensor has to be to take part that is on device `wanted`."""

    @abc.abstractmethod
    def has_tags(self, device: torch.device) -> bool:
        """Whether a message of tensors on that device goes to a `receive` of the same tag."""

    @abc.abstractmethod
    def broadcast(self, buffer: torch.Tensor, source: int) -> Pending:
        """Write the bytes that rank `source` has into everybody's buffer."""

    @abc.abstractmethod
    def all_reduce(self, buffer: torch.Tensor, reduction: Reduction) -> Pending:
        """Replace each element by what the reduction makes of everybody's."""

    @abc.abstractmethod
    def reduce(self, buffer: torch.Tensor, reduction: Reduction, to: int) -> Pending:
        """The same on rank `to`; what the others' buffers hold afterwards is undefined."""

    @abc.abstractmethod
    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> Pending:
        """Reduce `size * n` elements, of which each rank gets `n` in its `out`, in order of rank."""

    @abc.abstractmethod
    def all_gather(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending:
        """Write everybody's `n` bytes into everybody's `out` of `size * n`, in order of rank."""

    @abc.abstractmethod
    def gather(self, buffer: torch.Tensor, out: torch.Tensor | None, to: int) -> Pending:
        """The same on rank `to` alone; the others have no `out`."""

    @abc.abstractmethod
    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int) -> Pending:
        """Give each rank its `n` of the `size * n` bytes of rank `source`; the others have no `parts`."""

    @abc.abstractmethod
    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        """Send bytes to a rank."""

    @abc.abstractmethod
    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Receive bytes of a rank: as many as it sends."""

    @abc.abstractmethod
    def send_receive(
        self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int, tag: int
    ) -> Pending:
        """Send bytes to a rank and receive bytes of a rank, neither of which waits for the other."""

    @abc.abstractmethod
    def barrier(self) -> Pending:
        """Over when everybody has called it."""

    @abc.abstractmethod
    def split(self, groups: Sequence[Sequence[int]], own: int | None) -> Backend | None:
        """Divide the ranks into groups; returns that of this rank. Blocks until all ranks have called it.

        Args:
            groups: the ranks of each, ascending; the same on all ranks.
            own: the number of the group that this rank is in; None if it is in none.

        Raises:
            UsageError: this group cannot be divided.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free what `split` has made."""
