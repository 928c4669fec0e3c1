"""The process group of the workers that make a round, over torch.distributed (gloo).

A group is made of the workers that are there, without any of them starting again, and independently of the
default group of torch.distributed, which stays the script's. The workers find each other at the store of the
one with the lowest index; each worker has a store, since any of them may be that one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.errors import ConnectionLost, UsageError
from elastic_ps.process.listening import address_towards
from elastic_ps.process.retrying import retry

_c10d: Any = dist
"""Some of its names are not among those that mypy knows."""

CONNECTING = timedelta(seconds=15)
"""How long a worker waits for the others of a new group, which all have been heard of a moment ago."""

SILENCE = timedelta(seconds=30)
"""How long it waits within an operation for bytes of another worker."""

LOOK = timedelta(seconds=1)
"""How often a worker looks, within an operation, whether the round is still made by this group."""

PAUSE = timedelta(milliseconds=500)
"""The time between two looks for the address of a parameter server."""


class Broken(Exception):
    """The workers of a group are not connected (any more)."""


def host_towards(address: str, *, within: timedelta) -> str:
    """The address of this host on the way to `host:port`. Nothing is sent.

    Blocks while the name has no address, as that of a pod which waits for a node.

    Raises:
        ConnectionLost: that takes longer than `within`.
    """
    try:
        return retry(partial(address_towards, address), OSError, patience=within, pause=PAUSE)
    except OSError as error:
        text = f"there is no route to the parameter server at {address}: {error}"
        raise ConnectionLost(text) from error


def require_safe(host: str, spec: TrainingJobSpec, *, secured: bool) -> None:
    """Raise UsageError if the workers of a job with certificates would speak to each other without.

    Args:
        host: this host's address, as the others reach it.
        secured: the job's processes have certificates.
    """
    why = spec.refuse_unencrypted(secured=secured)
    if why and not ipaddress.ip_address(host).is_loopback:
        raise UsageError(f"this worker would be reached at {host}: {why}")


class Store:
    """This worker's store, where the others find it.

    Args:
        host: this host's address, as the others reach it. It listens there alone.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)  # torch itself listens at every address
        port = listener.getsockname()[1]
        self._store: Any = _c10d.TCPStore(
            host, port, None, True, CONNECTING, False, master_listen_fd=listener.detach()
        )

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self._store.port}"


class Group:
    """A process group. Belongs to one thread; operations are made by all of the group in the same order.

    Args:
        name: no other group of the job ever has it.
        addresses: those of the members' stores, in the order of ranks.
        host: this host's address.

    Raises:
        Broken: a member has not come within `CONNECTING`.
    """

    def __init__(self, name: str, addresses: Sequence[str], rank: int, host: str) -> None:
        self.rank, self.size = rank, len(addresses)
        self._backend: Any = None
        self._works: list[Any] = []
        if self.size == 1:
            return
        there, _, port = addresses[0].rpartition(":")
        try:
            store = _c10d.TCPStore(there, int(port), None, False, CONNECTING, False)
            store = _c10d.PrefixStore(name, store)
            gloo = _c10d.ProcessGroupGloo
            options = gloo._Options()  # noqa: SLF001 (torch has no other name for it)
            options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
            options._timeout = CONNECTING  # noqa: SLF001
            self._backend = gloo(store, rank, self.size, options)
        except RuntimeError as error:
            raise Broken(str(error)) from error
        with contextlib.suppress(AttributeError):  # torch before 2.7 keeps the shorter timeout
            self._backend.set_timeout(SILENCE)

    @property
    def at_rest(self) -> bool:
        """Whether no operation is under way, so that the group can be dropped without waiting."""
        return all(work.is_completed() for work in self._works)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> None:
        """Begin to make `tensor` the sum over the group, or the maximum, in place."""
        if self._backend is None or not tensor.numel():
            return
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        self._begin(lambda: self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Begin to make `tensor`, which is contiguous, that of the worker with this rank, in place."""
        if self._backend is None or not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        raw = tensor.reshape(-1).view(torch.uint8)
        self._begin(lambda: self._backend.broadcast([raw], options))

    def _begin(self, operation: Callable[[], Any]) -> None:
        try:
            self._works.append(operation())
        except RuntimeError as error:
            raise Broken(str(error)) from error

    def wait(self, look: Callable[[], None]) -> None:
        """Wait for all operations that have begun. Blocks.

        Args:
            look: called now and then; what it raises is raised.

        Raises:
            Broken: an operation has failed.
        """
        for work in self._works:
            while True:
                try:
                    work.wait(LOOK)
                    break
                except RuntimeError as error:
                    if work.is_completed():
                        raise Broken(str(error)) from error
                look()
        self._works.clear()
