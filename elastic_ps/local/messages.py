"""Non-blocking MPI messages, for `relay`.

A message is sent from its own buffer, and received into one of its size, which a probe tells beforehand.
Several messages from one rank may be in transit; they are delivered in order. MPI is called under the world's
lock, so MPI_THREAD_SERIALIZED is enough.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from elastic_ps.local.relay import Arrived, Buffers

MOST = 16
"""The most messages to start receiving in one step, so that sockets get their turn."""


class _Receiving(NamedTuple):
    request: Any
    buffer: bytearray
    size: int


class Messages:
    """A `relay.Post` over a communicator, with a tag of its own. For one thread at a time.

    Args:
        comm: an mpi4py communicator.
        lock: held while MPI is called.
    """

    def __init__(self, comm: Any, tag: int, lock: contextlib.AbstractContextManager[object]) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._tag, self._lock = MPI, comm, tag, lock
        self._status = MPI.Status()
        self._requests: list[Any] = []
        self._sent: list[tuple[memoryview, Callable[[], None]]] = []
        self._receiving: dict[int, deque[_Receiving]] = {}
        self._buffers = Buffers()

    @property
    def sending(self) -> bool:
        """See `Post.sending`."""
        return bool(self._requests)

    def send(self, rank: int, message: memoryview, done: Callable[[], None]) -> None:
        """See `Post.send`."""
        with self._lock:
            request = self._comm.Isend([message, self._mpi.BYTE], dest=rank, tag=self._tag)
        self._requests.append(request)
        self._sent.append((message, done))

    def step(self) -> list[Arrived]:
        """See `Post.step`."""
        with self._lock:
            finished = self._mpi.Request.Testsome(self._requests) if self._requests else None
            self._begin_to_receive()
            arrived = self._received() if self._receiving else []
        if finished:
            self._forget(set(finished))
        return arrived

    def _forget(self, finished: set[int]) -> None:
        done = [self._sent[index][1] for index in finished]
        left = [index for index in range(len(self._sent)) if index not in finished]
        self._requests = [self._requests[index] for index in left]
        self._sent = [self._sent[index] for index in left]
        for each in done:
            each()

    def _begin_to_receive(self) -> None:
        mpi, status = self._mpi, self._status
        for _ in range(MOST):
            message = self._probe() or self._probe()
            if message is None:
                return
            size, source = status.Get_count(mpi.BYTE), status.Get_source()
            buffer = self._buffers.take(size)
            request = message.Irecv([buffer, size, mpi.BYTE])
            self._receiving.setdefault(source, deque()).append(_Receiving(request, buffer, size))

    def _probe(self) -> Any:
        """The next message that has arrived.

        Open MPI polls its network only after it has found none, so a message that arrived while this rank
        slept is found by the second call.
        """
        return self._comm.Improbe(source=self._mpi.ANY_SOURCE, tag=self._tag, status=self._status)

    def _received(self) -> list[Arrived]:
        arrived = []
        for source, receiving in list(self._receiving.items()):
            while receiving and receiving[0].request.Test():
                _, buffer, size = receiving.popleft()
                arrived.append(Arrived(source, memoryview(buffer)[:size], self._free(buffer)))
            if not receiving:
                del self._receiving[source]
        return arrived

    def _free(self, buffer: bytearray) -> Callable[[], None]:
        return lambda: self._buffers.give_back(buffer)
