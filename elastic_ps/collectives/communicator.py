"""A communicator, with a blocking method for each operation of its processes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from elastic_ps.collectives.backend import Backend
from elastic_ps.collectives.operations import Op, Operations


class Communicator:
    """A fixed group of processes, and their operations.

    If a process ends, an operation raises CollectiveFailed (with MPI, `mpirun` ends all processes instead).
    All processes must call collective operations, in the same order. Tensors have the same shape and dtype
    everywhere, and may be on a GPU. Each operation blocks; `begin` has the same operations, which return a
    handle instead::

        handle = communicator.begin.all_reduce(tensor)
        ...
        handle.wait()

    Create one communicator for a group, and keep it. For one thread at a time.

    Attributes:
        begin: the operations that return a `Handle` instead of blocking.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.begin = Operations(backend)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._backend.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._backend.size

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace the tensor of all processes, in place, by that of rank `source`; returns it."""
        return self.begin.broadcast(tensor, source).wait()

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """Replace the tensor of all processes, in place, by the sum (mean, ...) of all; returns it.

        Over MPI, float16 and bfloat16 are reduced in float32.
        """
        return self.begin.all_reduce(tensor, op).wait()

    def reduce(self, tensor: torch.Tensor, op: Op = "sum", to: int = 0) -> torch.Tensor:
        """Like `all_reduce`, on rank `to` alone. The other tensors do not change."""
        return self.begin.reduce(tensor, op, to).wait()

    def reduce_scatter(self, parts: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """This rank's part of the sum (mean, ...) of the parts of all ranks.

        Args:
            parts: of shape (size, ...), one part for each rank.
        """
        return self.begin.reduce_scatter(parts, op).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor of shape (size, ...) with the tensors of all ranks, in order of rank."""
        return self.begin.all_gather(tensor).wait()

    def gather(self, tensor: torch.Tensor, to: int = 0) -> torch.Tensor | None:
        """A tensor of shape (size, ...) on rank `to`, with the tensors of all ranks; None on the others."""
        return self.begin.gather(tensor, to).wait()

    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Write this rank's part of the parts of rank `source` to `out`; returns it.

        Args:
            parts: on rank `source`, of shape (size, ...) and of out's dtype. Others give None.
        """
        return self.begin.scatter(parts, out, source).wait()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor to another rank, which calls `receive` with the same tag, from 0 to 4095.

        nccl, which sends tensors on GPUs, has no tags but 0.
        """
        self.begin.send(tensor, to, tag).wait()

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """Receive a tensor from another rank, in place; returns it. Shape and dtype must be the sender's."""
        return self.begin.receive(tensor, source, tag).wait()

    def send_receive(
        self, tensor: torch.Tensor, *, to: int, source: int, into: torch.Tensor | None = None, tag: int = 0
    ) -> torch.Tensor:
        """Send a tensor to one rank, and receive one from another rank, in place; returns the latter.

        Args:
            into: the tensor to receive into, on the same device; None: the tensor that is sent.
        """
        return self.begin.send_receive(tensor, to=to, source=source, into=into, tag=tag).wait()

    def barrier(self) -> None:
        """Block until all processes have called it."""
        self.begin.barrier().wait()

    def broadcast_object(self, item: Any = None, source: int = 0) -> Any:
        """The object of rank `source`. Objects are pickled, so all processes must trust each other."""
        return self.begin.broadcast_object(item, source).wait()

    def all_gather_objects(self, item: Any) -> list[Any]:
        """The objects of all ranks, in order of rank."""
        return self.begin.all_gather_objects(item).wait()

    def gather_objects(self, item: Any, to: int = 0) -> list[Any] | None:
        """The objects of all ranks on rank `to`; None on the others."""
        return self.begin.gather_objects(item, to).wait()

    def send_object(self, item: Any, to: int, tag: int = 0) -> None:
        """Send an object to another rank, which calls `receive_object` with the same tag."""
        self.begin.send_object(item, to, tag).wait()

    def receive_object(self, source: int, tag: int = 0) -> Any:
        """Receive the next object that another rank sends with this tag."""
        return self.begin.receive_object(source, tag).wait()

    def split(self, key: Hashable) -> Communicator | None:
        """A communicator of the processes with an equal key, in the same order; None for the key None.

        Blocks until all processes have called it. An example: `world.split(socket.gethostname())`.

        Raises:
            UsageError: over torch.distributed, this is not the communicator of all processes.
        """
        members: dict[Hashable, list[int]] = {}
        for rank, other in enumerate(self.all_gather_objects(key)):
            if other is not None:
                members.setdefault(other, []).append(rank)
        own = None if key is None else list(members).index(key)
        backend = self._backend.split(list(members.values()), own)
        return None if backend is None else Communicator(backend)

    def close(self) -> None:
        """Free a communicator that `split` has created. All its processes must call it."""
        self._backend.close()
