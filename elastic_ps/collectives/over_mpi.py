"""The operations of a communicator of MPI, with mpi4py. GPU tensors go through the host's memory."""

from __future__ import annotations

import fcntl
import functools
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from elastic_ps.collectives.backend import Backend, Both, Pending, Reduction
from elastic_ps.errors import UsageError

if TYPE_CHECKING:
    from mpi4py import MPI


class _Request:
    """A request of MPI, with the objects that must live as long."""

    def __init__(self, request: Any, *kept: torch.Tensor | None) -> None:
        self._request, self._kept = request, kept

    def wait(self) -> None:
        self._request.Wait()

    def done(self) -> bool:
        return bool(self._request.Test())


def await_read(pipe: int, *, timeout: timedelta = timedelta(seconds=5)) -> None:
    """Wait until mpirun has read what was written to this pipe, since it drops the rest when a rank aborts.

    Blocks for `timeout` at most, and for a moment in any case: mpirun has yet to print what it has read.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    with suppress(OSError):  # it is no pipe
        while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
    time.sleep(0.2)


@functools.cache
def _end_all_after_errors() -> None:
    """End all ranks after an exception that ends this one. Else it would wait for them in MPI_Finalize."""
    from mpi4py import MPI

    show = sys.excepthook

    def end(*error: Any) -> None:
        try:
            show(*error)
            sys.stderr.flush()
            await_read(sys.stderr.fileno())
        finally:
            if not hasattr(sys, "ps1"):  # the process goes on after an error of an interactive line
                MPI.COMM_WORLD.Abort(1)

    sys.excepthook = end


class MPIGroup(Backend):
    """A group that uses a duplicate of a communicator of MPI.

    Messages make progress while this process is in a call of MPI, unless MPI has a thread for that.

    Args:
        comm: None is MPI.COMM_WORLD. Blocks until all its ranks have created a group.

    Raises:
        UsageError: mpi4py or the MPI library is missing, or this process is not in `comm`.
    """

    name = "MPI"
    reducible = frozenset(
        {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    )

    def __init__(self, comm: MPI.Comm | None = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UsageError(
                f"MPI cannot be used: {error}. Install mpi4py with `pip install 'elastic-ps[mpi]'`, and an "
                "MPI library: that of mpirun"
            ) from error
        self._ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
        self._in_place, self._undefined = MPI.IN_PLACE, MPI.UNDEFINED
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm == MPI.COMM_NULL:
            raise UsageError("of_mpi got MPI.COMM_NULL; call it only in the processes of the communicator")
        _end_all_after_errors()
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def device(self, wanted: torch.device) -> torch.device:  # noqa: ARG002
        return torch.device("cpu")

    def has_tags(self, device: torch.device) -> bool:  # noqa: ARG002
        return True

    def broadcast(self, buffer: torch.Tensor, source: int) -> Pending:
        return _Request(self._comm.Ibcast(buffer.numpy(), source), buffer)

    def all_reduce(self, buffer: torch.Tensor, reduction: Reduction) -> Pending:
        op = self._ops[reduction]
        return _Request(self._comm.Iallreduce(self._in_place, buffer.numpy(), op), buffer)

    def reduce(self, buffer: torch.Tensor, reduction: Reduction, to: int) -> Pending:
        array, op = buffer.numpy(), self._ops[reduction]
        if self.rank == to:
            return _Request(self._comm.Ireduce(self._in_place, array, op, to), buffer)
        return _Request(self._comm.Ireduce(array, None, op, to), buffer)

    def reduce_scatter(self, parts: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> Pending:
        op = self._ops[reduction]
        return _Request(self._comm.Ireduce_scatter_block(parts.numpy(), out.numpy(), op), parts, out)

    def all_gather(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending:
        return _Request(self._comm.Iallgather(buffer.numpy(), out.numpy()), buffer, out)

    def gather(self, buffer: torch.Tensor, out: torch.Tensor | None, to: int) -> Pending:
        places = None if out is None else out.numpy()
        return _Request(self._comm.Igather(buffer.numpy(), places, to), buffer, out)

    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int) -> Pending:
        places = None if parts is None else parts.numpy()
        return _Request(self._comm.Iscatter(places, out.numpy(), source), parts, out)

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        return _Request(self._comm.Isend(buffer.numpy(), to, tag), buffer)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return _Request(self._comm.Irecv(buffer.numpy(), source, tag), buffer)

    def send_receive(
        self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int, tag: int
    ) -> Pending:
        return Both(self.receive(taken, source, tag), self.send(given, to, tag))

    def barrier(self) -> Pending:
        return _Request(self._comm.Ibarrier())

    def split(self, groups: Sequence[Sequence[int]], own: int | None) -> Backend | None:  # noqa: ARG002
        comm = self._comm.Split(self._undefined if own is None else own, self.rank)
        if own is None:
            return None
        try:
            return MPIGroup(comm)
        finally:
            comm.Free()

    def close(self) -> None:
        self._comm.Free()
