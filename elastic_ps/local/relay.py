"""Relays the connections of workers to parameter servers between the ranks of an `mpirun`.

A rank listens on Unix sockets for its workers (`transport.mpi`). Data of a connection goes to rank 0 in
messages, and rank 0 writes it to its own connection to the server; and vice versa. Bytes are moved in order,
without a look at the frames. When one end of a connection closes, so does the other, after the data in
transit: the death of a worker looks to the server as over TCP, and vice versa.

Nothing blocks, so a slow end never delays another. At most `WINDOW` bytes of a connection are in transit in
each direction: the receiver reports what its socket has taken, and the sender reads no further before. This
also bounds the memory. `Relay` is for one thread only; `local.messages` carries the messages.
"""

from __future__ import annotations

import enum
import itertools
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol

from elastic_ps.transport import local, mpi

HEAD = struct.Struct("<B7xQQ")
"""The kind of a message, the number of its connection, and an amount."""

CHUNK = mpi.BUFFER
"""The largest message, in bytes, without its head."""

WINDOW = 4 * CHUNK
"""The bytes of a connection that may be in transit in one direction."""

LEAST = 1024
"""The least bytes that a message counts, since each needs memory of its own."""

SHARE = 16
"""An idle relay sleeps for its idle time divided by this, which delays the next message."""

LONGEST = timedelta(milliseconds=2)
"""The longest sleep while there are connections. A socket ends it; a message of MPI cannot."""

ALONE = timedelta(milliseconds=20)
"""The longest sleep while there are none."""

SMALL = CHUNK // 4
"""A message of at most so many bytes gets its own memory: it may wait long, and must not hold a buffer."""

KEPT = 32
"""The number of buffers that are kept for reuse."""

_EVENTS = 256


class LinkKind(enum.IntEnum):
    """The kind of a message. Its amount is in brackets."""

    OPEN = 1
    """A worker has connected (the server's port)."""
    DATA = 2
    """The bytes that follow."""
    TAKEN = 3
    """The socket has taken bytes (how many)."""
    GONE = 4
    """One end has closed; nothing follows."""
    BYE = 5
    """The relay has ended; nothing follows from this rank."""


class Arrived(NamedTuple):
    """A message from a rank. Call `free` when nobody reads it any more."""

    rank: int
    message: memoryview
    free: Callable[[], None]


class Post(Protocol):
    """Carries messages between ranks reliably, and in order between two ranks."""

    def send(self, rank: int, message: memoryview, done: Callable[[], None]) -> None:
        """Begin to send. Does not block. `message` must not change until `done` is called."""

    def step(self) -> list[Arrived]:
        """Make progress without blocking. Returns the messages that have arrived, in order."""

    @property
    def sending(self) -> bool:
        """Whether a message is still being sent."""


class Buffers:
    """Reusable memory for messages, so that a large one does not begin with page faults."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int = HEAD.size + CHUNK) -> bytearray:
        """A buffer for so many bytes, and at most four times as many if they are few."""
        if not SMALL < size <= HEAD.size + CHUNK:
            return bytearray(size)
        return self._free.pop() if self._free else bytearray(HEAD.size + CHUNK)

    def give_back(self, buffer: bytearray) -> None:
        """Take back a buffer that nobody uses any more."""
        if len(self._free) < KEPT and len(buffer) == HEAD.size + CHUNK:
            self._free.append(buffer)


def cost(size: int) -> int:
    """The part of a connection's window that a message of so many bytes takes."""
    return max(size, LEAST)


def pause(idle: float, *, connections: int) -> float:
    """The seconds that a relay may sleep after `idle` seconds without activity."""
    return min(idle / SHARE, (LONGEST if connections else ALONE).total_seconds())


@dataclass
class _Waiting:
    """The unwritten rest of a message, with its part of the window."""

    data: memoryview
    paid: int
    free: Callable[[], None]


@dataclass(eq=False)
class _End:
    """The end of a connection that is on this host."""

    sock: socket.socket
    rank: int
    number: int
    room: int = WINDOW
    """The bytes that may still be sent to the other end."""
    waiting: deque[_Waiting] = field(default_factory=deque)
    """The data from the other end."""
    taken: int = 0
    """The bytes that the socket has taken, and that were not reported yet."""
    closing: bool = False
    """Whether the other end is gone, so that this one closes when nothing waits."""
    events: int = 0

    def wanted(self) -> int:
        """The events to wait for."""
        reads = select.EPOLLIN if self.room > 0 and not self.closing else 0
        return reads | (select.EPOLLOUT if self.waiting else 0)


class Relay:
    """The relay of a rank: connections from this host (`listen`), and on rank 0 those to its servers.

    Args:
        post: carries the messages.
        target: gives the socket's name of the server at a port of this host; None on a rank without servers.
    """

    def __init__(self, post: Post, *, target: Callable[[int], str] | None = None) -> None:
        self._post, self._target = post, target
        self._epoll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, int]] = {}
        self._addresses: set[str] = set()
        self._ends: dict[tuple[int, int], _End] = {}
        self._by_fd: dict[int, _End] = {}
        self._numbers = itertools.count()
        self._buffers = Buffers()
        self._moved = time.monotonic()
        self._left: set[int] = set()
        self._closed = False

    @property
    def left(self) -> frozenset[int]:
        """The ranks that have sent their last message."""
        return frozenset(self._left)

    @property
    def idle(self) -> bool:
        """Whether everything is sent."""
        return not self._post.sending

    def listen(self, address: str) -> None:
        """Accept connections for the server at the port of `address`. Repeated calls have no effect.

        Raises:
            CannotListen.
        """
        if address in self._addresses:
            return
        listener = local.listening(mpi.name_of(address), address)
        listener.setblocking(False)
        self._addresses.add(address)
        self._listeners[listener.fileno()] = listener, int(address.rpartition(":")[2])
        self._epoll.register(listener, select.EPOLLIN)

    def run(self, until: float) -> None:
        """Relay until that time of `time.monotonic`. Blocks."""
        while (now := time.monotonic()) < until:
            self.step(min(until - now, pause(now - self._moved, connections=len(self._ends))))

    def step(self, seconds: float) -> None:
        """Make progress, after a sleep of at most so many seconds, which a socket may end."""
        if seconds > 0:
            select.select([self._epoll], [], [], seconds)  # an epoll's own timeout has whole milliseconds
        moved = self._poll_sockets()
        arrived = self._post.step()
        for each in arrived:
            if not self._receive(each):
                each.free()
        if moved or arrived:
            self._moved = time.monotonic()

    def close(self, ranks: Iterable[int]) -> None:
        """End all connections, and send these ranks the last message. Pending data is still sent."""
        if self._closed:
            return
        self._closed = True
        for end in list(self._ends.values()):
            self._drop(end, tell=False)
        for listener, _ in self._listeners.values():
            self._epoll.unregister(listener)
            listener.close()
        self._listeners.clear()
        for rank in ranks:
            self._tell(rank, LinkKind.BYE, 0)

    # --- this host

    def _poll_sockets(self) -> bool:
        happened = self._epoll.poll(0, _EVENTS)
        for fd, events in happened:
            if fd in self._listeners:
                self._accept(*self._listeners[fd])
            elif end := self._by_fd.get(fd):
                if events & select.EPOLLOUT:
                    self._write(end)
                if events & ~select.EPOLLOUT and self._by_fd.get(fd) is end:
                    self._read(end)
        return bool(happened)

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the client has gone already, or no descriptor is left for now
            return
        if not local.same_user(sock):
            sock.close()
            return
        end = self._add(sock, 0, next(self._numbers))
        self._tell(end.rank, LinkKind.OPEN, end.number, port)

    def _add(self, sock: socket.socket, rank: int, number: int) -> _End:
        sock.setblocking(False)
        mpi.prepare(sock)
        end = _End(sock, rank, number)
        self._ends[rank, number] = self._by_fd[sock.fileno()] = end
        self._watch(end)
        return end

    def _watch(self, end: _End) -> None:
        """Watch the events of an end; if there are none, do not watch it: a hang-up would end every sleep."""
        events = end.wanted()
        if events == end.events:
            return
        if not end.events:
            self._epoll.register(end.sock, events)
        elif not events:
            self._epoll.unregister(end.sock)
        else:
            self._epoll.modify(end.sock, events)
        end.events = events

    def _read(self, end: _End) -> None:
        if not end.wanted() & select.EPOLLIN:
            self._lost(end)  # a hang-up with unwritten data
            return
        buffer = self._buffers.take()
        view = memoryview(buffer)
        try:
            size = end.sock.recv_into(view[HEAD.size : HEAD.size + min(CHUNK, end.room)])
        except BlockingIOError:
            self._buffers.give_back(buffer)
            return
        except OSError:
            size = 0
        if not size:
            self._buffers.give_back(buffer)
            self._lost(end)
            return
        HEAD.pack_into(buffer, 0, LinkKind.DATA, end.number, size)
        end.room -= cost(size)
        if size <= SMALL:
            self._post.send(end.rank, memoryview(bytes(view[: HEAD.size + size])), lambda: None)
            self._buffers.give_back(buffer)
        else:
            self._post.send(end.rank, view[: HEAD.size + size], lambda: self._buffers.give_back(buffer))
        self._watch(end)

    def _write(self, end: _End) -> None:
        """Write waiting data, as far as the socket takes it."""
        try:
            while end.waiting:
                first = end.waiting[0]
                sent = end.sock.send(first.data, socket.MSG_NOSIGNAL)
                first.data = first.data[sent:]
                if first.data:
                    break
                end.waiting.popleft()
                end.taken += first.paid
                first.free()
        except BlockingIOError:
            pass
        except OSError:
            self._lost(end)
            return
        if end.closing and not end.waiting:
            self._drop(end, tell=False)
            return
        if end.taken >= CHUNK and not end.closing:
            self._tell(end.rank, LinkKind.TAKEN, end.number, end.taken)
            end.taken = 0
        self._watch(end)

    def _lost(self, end: _End) -> None:
        """Handle the end of the process on this host."""
        self._drop(end, tell=not end.closing)

    def _drop(self, end: _End, *, tell: bool) -> None:
        if end.events:
            self._epoll.unregister(end.sock)
        del self._by_fd[end.sock.fileno()], self._ends[end.rank, end.number]
        end.sock.close()
        while end.waiting:
            end.waiting.popleft().free()
        if tell:
            self._tell(end.rank, LinkKind.GONE, end.number)

    # --- other ranks

    def _tell(self, rank: int, kind: LinkKind, number: int, amount: int = 0) -> None:
        self._post.send(rank, memoryview(HEAD.pack(kind, number, amount)), lambda: None)

    def _receive(self, arrived: Arrived) -> bool:
        """Handle a message; returns whether it is kept until its bytes are written."""
        kind, number, amount = HEAD.unpack_from(arrived.message)
        end = self._ends.get((arrived.rank, number))
        if kind == LinkKind.BYE:
            self._left.add(arrived.rank)
        elif kind == LinkKind.OPEN and not self._closed:
            self._open(arrived.rank, number, amount)
        elif end is None:
            pass  # it is gone here, but the other end does not know yet
        elif kind == LinkKind.DATA:
            end.waiting.append(_Waiting(arrived.message[HEAD.size :], cost(amount), arrived.free))
            if len(end.waiting) == 1:
                self._write(end)
            return True
        elif kind == LinkKind.TAKEN:
            end.room += amount
            self._watch(end)
        elif kind == LinkKind.GONE:
            end.closing = True
            if end.waiting:
                self._watch(end)
            else:
                self._drop(end, tell=False)
        return False

    def _open(self, rank: int, number: int, port: int) -> None:
        """Connect to the server at a port of this host. If there is none, the other end is told at once."""
        try:
            if self._target is None:
                raise ConnectionRefusedError
            sock = local.connected(self._target(port), f"port {port}", blocking=False)
        except OSError:
            self._tell(rank, LinkKind.GONE, number)
            return
        self._add(sock, rank, number)
