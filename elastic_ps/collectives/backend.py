"""The interface of a communicator to its library, which `over_torch` and `over_mpi` implement."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Reduction = Literal["sum", "min", "max", "product"]
"""The reductions of elements over processes."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> object:
        """Block until it is over. Raises the library's exception if it has failed."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Does not block."""


class Both:
    """Several operations under way as one."""

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

    A tensor must live, and must not be changed, until its operation is over. Data that is only moved is given
    as bytes (uint8), data to reduce in one of the dtypes of `reducible`.

    Attributes:
        rank, size: the rank of this process in the group, from 0, and the number of processes.
        reducible: the dtypes that can be reduced.
        name: the name of the library, for messages.
    """

    rank: int
    size: int
    reducible: frozenset[torch.dtype]
    name: str

    @abc.abstractmethod
    def device(self, wanted: torch.device) -> torch.device:
        """The device that a tensor on device `wanted` has to be moved to for an operation."""

    @abc.abstractmethod
    def has_tags(self, device: torch.device) -> bool:
        """Whether messages of tensors on that device are matched by tag."""

    @abc.abstractmethod
    def broadcast(self, buffer: torch.Tensor, source: int) -> Pending:
        """Write the bytes of rank `source` to the buffers of all ranks."""

    @abc.abstractmethod
    def all_reduce(self, buffer: torch.Tensor, reduction: Reduction) -> Pending:
        """Replace each element by the reduction over all ranks."""

    @abc.abstractmethod
    def reduce(self, buffer: torch.Tensor, reduction: Reduction, to: int) -> Pending:
        """Like `all_reduce`, on rank `to`. The other buffers are undefined afterwards."""

    @abc.abstractmethod
    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> Pending:
        """Reduce `size * n` elements. Each rank gets `n` of them in its `out`, in order of rank."""

    @abc.abstractmethod
    def all_gather(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending:
        """Write the `n` bytes of each rank to the `out` of all ranks, of `size * n`, in order of rank."""

    @abc.abstractmethod
    def gather(self, buffer: torch.Tensor, out: torch.Tensor | None, to: int) -> Pending:
        """Like `all_gather`, on rank `to` alone; the others have no `out`."""

    @abc.abstractmethod
    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int) -> Pending:
        """Give each rank its `n` of the `size * n` bytes of rank `source`; the others have no `parts`."""

    @abc.abstractmethod
    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        """Send bytes to a rank."""

    @abc.abstractmethod
    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Receive bytes from a rank, as many as it sends."""

    @abc.abstractmethod
    def send_receive(
        self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int, tag: int
    ) -> Pending:
        """Send bytes to a rank and receive bytes from a rank, without one waiting for the other."""

    @abc.abstractmethod
    def barrier(self) -> Pending:
        """An operation that is over when all ranks have called it."""

    @abc.abstractmethod
    def split(self, groups: Sequence[Sequence[int]], own: int | None) -> Backend | None:
        """Divide the ranks into groups; returns the group of this rank. Blocks until all ranks have called
        it.

        Args:
            groups: the ranks of each group, ascending; the same on all ranks.
            own: the number of the group that this rank is in; None if it is in none.

        Raises:
            UsageError: this group cannot be divided.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free a group that `split` has created."""
