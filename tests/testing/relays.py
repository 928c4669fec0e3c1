"""Two relays in one process, with messages that are handed on in memory: what MPI does between two ranks."""

from __future__ import annotations

import collections
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

from elastic_ps.local.relay import Arrived, Relay
from elastic_ps.transport import mpi
from elastic_ps.transport.base import Connection, Frame, Incoming, Limits

LOOK = 0.0005
"""Seconds that the relays sleep for if nothing happens on the client's side."""


class Mail:
    """A `relay.Post` of one rank. A message is copied, as MPI does, when the other rank takes it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.other: Mail
        self.box: collections.deque[memoryview] = collections.deque()
        self.done: collections.deque[Callable[[], None]] = collections.deque()
        self.on_the_way: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def sending(self) -> bool:
        """See `Post.sending`."""
        return bool(self.on_the_way or self.done)

    def send(self, rank: int, message: memoryview, done: Callable[[], None]) -> None:
        """See `Post.send`."""
        assert rank == self.other.rank
        self.on_the_way.append(done)
        self.other.box.append(message)

    def step(self) -> list[Arrived]:
        """See `Post.step`."""
        while self.done:
            self.done.popleft()()
        arrived = []
        while self.box:
            arrived.append(Arrived(self.other.rank, memoryview(bytes(self.box.popleft())), lambda: None))
            self.other.done.append(self.other.on_the_way.popleft())
        return arrived


def two() -> tuple[Relay, Relay]:
    """The relays of rank 0, whose servers are on this host, and of rank 1."""
    zero, one = Mail(0), Mail(1)
    zero.other, one.other = one, zero
    return Relay(zero, target=lambda port: mpi.name_of(f"127.0.0.1:{port}")), Relay(one)


class Relayed(Connection):
    """A connection to an `MpiServer` through two relays, which one thread runs until it is closed."""

    def __init__(self, server: str, *, limits: Limits | None = None) -> None:
        """Connect to the server at `127.0.0.1:PORT`."""
        self._zero, self._one = two()
        address = f"rank1-{uuid.uuid4().hex}:{server.rpartition(':')[2]}"
        self._one.listen(address)
        self._connection = mpi.connect(address, limits=limits)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._zero.step(0)
            self._one.step(LOOK)
        self._zero.close([1])
        self._one.close([0])

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """See `Connection.call`."""
        return self._connection.call(method, frame, timeout=timeout)

    def close(self) -> None:
        """See `Connection.close`."""
        self._connection.close()
        self._ending.set()
        self._thread.join()
