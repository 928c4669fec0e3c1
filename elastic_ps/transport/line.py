"""Frames over a socket, in the order in which they are sent.

A frame is a fixed head, the method's name, a header, and the body's bytes. They are sent and received in
place, without a copy. If both sides are on one host, a body in shared memory (`transport.memory`) is not
sent: the head says where it is.
"""

from __future__ import annotations

import array
import contextlib
import enum
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from elastic_ps.contract.identity import Identity
from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed
from elastic_ps.transport import sealed, sockets
from elastic_ps.transport.base import EMPTY, Frame, Limits
from elastic_ps.transport.memory import Handle, Mapped, place_of
from elastic_ps.transport.sockets import Plain
from elastic_ps.transport.stall import SLOWEST
from elastic_ps.transport.views import flat, target_of

MEMORIES = 4
"""The number of shared memories that both sides of a socket know: those that were handed over last."""

HEAD = struct.Struct("<BBHIIQQ4x")
"""The kind; whether the body is in shared memory; the sizes of method and header; the number of the shared
memory; the size of the body, and its offset in that memory."""

SMALL = 128 * 1024
"""A body of at most so many bytes is sent although it is in shared memory, since that is faster."""

AHEAD = 64 * 1024
"""The bytes to receive at the beginning of a frame, so that a small frame takes one system call."""

_SCRATCH = 256 * 1024

_CUT_OFF = int(socket.MSG_CTRUNC)
"""A plain number: `&` of Python's flags is slow."""

_HANDED = socket.CMSG_SPACE(4 * struct.calcsize("i"))
"""Room for the ancillary data: four descriptors."""


class LineKind(enum.IntEnum):
    """The kind of a frame."""

    CALL = 1
    ANSWER = 2
    END = 3
    REFUSAL = 4
    MEMORY = 5
    """Shared memory is handed over."""
    NEXT = 6
    """The client is done with a body in shared memory."""
    LAST = 7
    """An answer, and the end of the call."""


class Head(NamedTuple):
    kind: int
    shared: int
    method: int
    header: int
    memory: int
    body: int
    offset: int


class Line:
    """A socket, with the memory that was handed over on it. For one thread only, except `hang_up`.

    Attributes:
        transport, peer: see `Incoming`.
    """

    def __init__(
        self, sock: socket.socket | Plain, what: str, *, stall: timedelta | None = None, way: str = ""
    ) -> None:
        """Use a connected socket.

        Args:
            what: its name in messages.
            stall: how long the other side may be silent in the middle of a frame.
            way: see `Incoming.transport`. Default: `shm` on a Unix socket, else `tcp`. Only `shm` hands over
                memory.
        """
        self._socket = sockets.of(sock)
        self._sock = self._socket.sock
        self.peer: Identity | None = None
        self._what = what
        self._stall = stall
        self._process = os.getpid()
        self.transport = way or ("shm" if self._sock.family == socket.AF_UNIX else "tcp")
        self._passes_memory = self.transport == "shm"
        self._shown: list[int] = []
        self._seen: dict[int, Mapped] = {}
        self._ahead = EMPTY  # received, but not used yet
        self._cut = False  # a frame has ended too early
        self._handed: list[int] = []  # descriptors of memory whose frames are not read yet
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)

    def hang_up(self) -> None:
        """End every wait on this socket, in any thread."""
        if os.getpid() == self._process:  # in a forked child: the parent still uses the socket
            self._socket.hang_up()

    def close(self) -> None:
        if os.getpid() == self._process:
            self._socket.end()
        self.hang_up()
        self._sock.close()
        self._seen.clear()
        while self._handed:
            os.close(self._handed.pop())

    def alive(self) -> bool:
        """Return True while the other side seems to be connected. Data that were not read do not matter."""
        self._poll.modify(self._sock, select.POLLRDHUP)
        return not self._poll.poll(0)

    @property
    def worn(self) -> bool:
        """Whether the next call needs a new connection, with new keys."""
        return self._socket.worn

    def require_open(self) -> None:
        """Raises ConnectionLost."""
        if self._sock.fileno() < 0:
            raise self._lost()

    def handshake(self, timeout: timedelta) -> object:
        """Make the TLS handshake with a client; returns its certificate, like `getpeercert`. Blocks.

        Raises:
            ConnectionLost: the client has no valid certificate, or does not answer.
        """
        try:
            self._tls.settimeout(timeout.total_seconds())
            self._tls.do_handshake()
            return self._tls.getpeercert()
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"{self._what}: the handshake has failed ({error})") from error

    def seal(self, hello: bytes, timeout: timedelta) -> None:
        """Send `hello` to a client after the handshake. Everything after it is sealed. Blocks.

        Raises ConnectionLost.
        """
        try:
            self._socket = sealed.greet(self._tls, hello, time.monotonic() + timeout.total_seconds())
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    @property
    def _tls(self) -> ssl.SSLSocket:
        if not isinstance(self._sock, ssl.SSLSocket):
            raise TypeError(f"{self._what}: not a TLS socket")
        return self._sock

    # --- waiting

    def _wait(self, events: int, deadline: float | None) -> int:
        """Block until one of `events` happens; returns those that did. Raises DeadlineExceeded."""
        self._poll.modify(self._sock, events)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"{self._what}: the deadline has passed")
            for _, happened in self._poll.poll(None if left is None else left * 1000):
                return happened

    def _wait_in_frame(self, events: int, deadline: float | None, patient: float | None = None) -> None:
        """Block like `_wait`, but no longer than the other side may be silent, and not after `patient`."""
        if self._stall is None:
            self._wait(events, deadline)
            return
        seconds = self._stall.total_seconds()
        silent = time.monotonic() + seconds
        try:
            self._wait(events, silent if patient is None else min(silent, patient))
        except DeadlineExceeded:
            verb = "sent" if events == select.POLLIN else "taken"
            said = f"the client has {verb} nothing for {seconds:g} s in the middle of a frame"
            raise ConnectionLost(f"{said}, or next to nothing") from None

    def _lost(self, error: Exception | None = None) -> ConnectionLost:
        return ConnectionLost(f"{self._what}: the other side has gone{f' ({error})' if error else ''}")

    # --- sending

    def encode(
        self, kind: LineKind, frame: Frame, method: bytes = b"", *, share: bool = True
    ) -> tuple[list[bytes | memoryview], bool]:
        """The parts to send for a frame, and whether its body is in shared memory and not among them.

        Shared memory that the other side does not know yet is handed over first.

        Args:
            share: whether the other side can report that it is done with the body, since it sends none
                itself.
        """
        body = flat(frame.body)
        place = place_of(body) if share and self._passes_memory and len(body) > SMALL else None
        number, offset = 0, 0
        if place is not None:
            memory, offset = place
            number = memory.number
            self._show(memory)
        sizes = len(method), len(frame.header)
        head = HEAD.pack(kind, place is not None, *sizes, number, len(body), offset)
        first = b"".join((head, method, frame.header))
        return ([first], True) if place is not None else ([first, body], False)

    def _show(self, memory: Handle) -> None:
        if memory.number in self._shown:
            return
        head = HEAD.pack(LineKind.MEMORY, 1, 0, 0, memory.number, memory.size, 0)
        handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.fd]))]
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    # A head is sent whole: the buffer was empty, or has room for that little.
                    sent = self._sock.sendmsg([head], handed, socket.MSG_NOSIGNAL)  # `send_fds` ignores flags
                    if sent < len(head):
                        self.send([head[sent:]], None)
                    break
                self._wait_in_frame(select.POLLOUT, None)
        except OSError as error:
            raise self._lost(error) from error
        self._shown = [*self._shown, memory.number][-MEMORIES:]

    def send(self, parts: Sequence[bytes | memoryview], deadline: float | None) -> None:
        """Send everything. Blocks. Raises ConnectionLost, DeadlineExceeded."""
        rest = self.send_some(parts)
        while rest:
            self._wait_in_frame(select.POLLOUT, deadline)
            rest = self.send_some(rest)

    def send_some(self, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send as much as the socket takes at once; returns the rest. Raises ConnectionLost."""
        rest = [part for part in parts if len(part)]
        try:
            while rest:
                sent = self._socket.send(rest)
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost(error) from error
        return rest

    def tell(self, kind: LineKind, header: bytes = b"") -> None:
        """Send a frame without method and body. Blocks."""
        self.send([HEAD.pack(kind, 0, 0, len(header), 0, 0, 0) + header], None)

    def send_while_waiting(self, rest: list[bytes | memoryview], deadline: float) -> list[bytes | memoryview]:
        """Send `rest` until it is sent or something arrives; returns what is left. Blocks."""
        while rest and not self._ahead:
            if self._wait(select.POLLIN | select.POLLOUT, deadline) & ~select.POLLOUT:
                break
            rest = self.send_some(rest)
        return rest

    # --- receiving

    def receive_into(self, target: memoryview, deadline: float | None) -> None:
        """Fill `target`. Blocks.

        Raises:
            ConnectionLost, DeadlineExceeded: the rest does not arrive. The socket is hung up, since it is in
                the middle of a frame.
        """
        patient = None  # the other side's deadline for all of it
        try:
            while target:
                # Checked each time: a reader that is slower than the sender never waits.
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{self._what}: the deadline has passed")
                if self._ahead:
                    received = min(len(target), len(self._ahead))
                    target[:received] = self._take(received)
                    target = target[received:]
                    continue
                try:
                    received = self._socket.receive_into(target)
                except BlockingIOError:
                    if patient is None and self._stall is not None:
                        least = len(target) / SLOWEST
                        patient = time.monotonic() + self._stall.total_seconds() + least
                    self._wait_in_frame(select.POLLIN, deadline, patient)
                    continue
                except OSError as error:
                    raise self._lost(error) from error
                if not received:
                    raise self._lost()
                target = target[received:]
        except BaseException:
            self._cut = True
            self.hang_up()
            raise

    def receive(self, size: int, deadline: float | None) -> bytes:
        """The next `size` bytes. Blocks. Allocates memory only for bytes that have arrived."""
        ahead = self._ahead
        if size <= len(ahead):
            self._ahead = ahead[size:]
            return bytes(ahead[:size])
        pieces = []
        while size:
            piece = bytearray(min(size, _SCRATCH))
            self.receive_into(memoryview(piece), deadline)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def discard(self, size: int, deadline: float | None) -> None:
        """Skip `size` bytes. Blocks."""
        scratch = memoryview(bytearray(min(size, _SCRATCH)))
        while size:
            chunk = scratch[: min(size, len(scratch))]
            self.receive_into(chunk, deadline)
            size -= len(chunk)

    def head(self, deadline: float | None) -> Head:
        """The next head, after mapping memory that is handed over. Blocks.

        Raises:
            ConnectionLost, DeadlineExceeded.
            Malformed: it is not a head.
        """
        if self._cut:  # in the middle of a frame, so the beginning of the next one is unknown
            raise self._lost()
        while True:
            if not self._ahead:
                self._receive_ahead(deadline)
            head = Head._make(HEAD.unpack(self.receive(HEAD.size, deadline)))
            if head.kind != LineKind.MEMORY:
                return head
            if not self._handed:
                raise Malformed("no shared memory was handed over with its frame")
            self._seen[head.memory] = Mapped(self._handed.pop(0))
            for oldest in list(self._seen)[:-MEMORIES]:
                del self._seen[oldest]

    def _take(self, size: int) -> memoryview:
        """Take so many bytes of those that were received ahead."""
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken

    def _receive_ahead(self, deadline: float | None) -> None:
        """Receive up to `AHEAD` bytes between two frames. Blocks until some arrive."""
        while True:
            if not self._socket.pending:
                self._wait(select.POLLIN, deadline)
            try:
                data = self._receive_handed() if self._passes_memory else self._socket.receive(AHEAD)
            except BlockingIOError:
                continue  # less than a record was there
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise self._lost()
            self._ahead = memoryview(data)
            return

    def _receive_handed(self) -> bytes:
        """Like `socket.recv`, with descriptors; a result ends at the first of these.

        `socket.recv_fds` takes more than twice the time.
        """
        data, handed, flags, _ = self._sock.recvmsg(AHEAD, _HANDED)
        fds = _descriptors(handed) if handed else []
        self._handed += fds
        if flags & _CUT_OFF and not fds:
            raise ConnectionLost(f"{self._what}: no descriptor is left for shared memory (see ulimit -n)")
        if len(fds) > 1 or len(self._handed) > MEMORIES:
            raise Malformed(f"{len(self._handed)} shared memories handed over at once")
        return data

    def frame(self, head: Head, limits: Limits, deadline: float | None) -> Received:
        """The frame that begins with `head`. Blocks until its header has arrived.

        Raises:
            Malformed: it exceeds the limits.
        """
        name = self.receive(head.method, deadline).decode(errors="replace") if head.method else ""
        limits.check(name or "answer", header=head.header, body=head.body)
        header = self.receive(head.header, deadline)
        view = None
        if head.shared:
            memory = self._seen.get(head.memory)
            if memory is None:
                raise Malformed(f"a body in shared memory {head.memory}, which was not handed over")
            view = memory.view(head.offset, head.body)
        return Received(self, name, header, head.body, view, deadline)


def _descriptors(handed: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in ancillary data; see `socket.recvmsg`."""
    fds = array.array("i")
    for level, kind, data in handed:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


class Received:
    """An `Incoming` whose body is still in the socket, or in shared memory.

    Attributes:
        method: the called method; "" in an answer.
        header, size, transport, peer: see `Incoming`.
    """

    def __init__(
        self,
        line: Line,
        method: str,
        header: bytes,
        size: int,
        view: memoryview | None,
        deadline: float | None,
    ) -> None:
        self.method, self.header, self.size = method, header, size
        self.transport, self.peer = line.transport, line.peer
        self._line, self._view, self._deadline = line, view, deadline
        self._taken = False

    @property
    def shared(self) -> bool:
        """Whether the body is in shared memory, so that the sender waits until nobody uses it."""
        return self._view is not None

    @property
    def arriving(self) -> bool:
        """Whether the body is still to be read from the socket."""
        return not self._taken and self._view is None and self.size > 0

    def view(self) -> memoryview | None:
        """The body where it is; see `Incoming.view`."""
        return None if self._taken else self._view

    def read_into(self, target: memoryview) -> None:
        """Write the body into `target`; see `Incoming.read_into`."""
        target = target_of(target, self.size)
        if self._taken:
            raise ValueError("the body has been read or discarded already")
        self._taken = True
        if self._view is None:
            self._line.receive_into(target, self._deadline)
            return
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineExceeded("the deadline has passed")
        self._line.require_open()
        if self.size:
            # numpy releases the GIL meanwhile.
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(self._view, dtype=np.uint8))

    def discard(self) -> None:
        """Skip it if it has not been read. Blocks."""
        if not self._taken:
            self._taken = True
            if self._view is None:
                self._line.discard(self.size, self._deadline)
