"""Calls over sockets: one call at a time on each socket, as many sockets as there are calls at a time.

A frame is a fixed head, the names of what it is, a header, and the body's bytes. They are sent from where
they lie and received where they are used, with nothing in between. If both sides are on one host, a body
that lies in shared memory (`transport.memory`) is not sent: its head says where it is.

Whoever sends a body in shared memory waits until the other side is done with it: a server resumes its
handler when the client has asked for the next answer, and a client waits for the answer anyway.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import numpy as np

from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed, TransportError
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Limits, Server
from elastic_ps.transport.memory import Handle, Mapped, place_of
from elastic_ps.transport.refusal import Kind as Blame
from elastic_ps.transport.refusal import Refusal, answers
from elastic_ps.transport.views import flat, target_of

_LOG = logging.getLogger(__name__)

GREETING = b"elastic-ps/1\n"
"""What a client says first, so that a stranger is told apart."""

STALL = timedelta(seconds=5)
"""A client that sends nothing for this long, in the middle of a frame that a server reads, is cut off."""

JOIN = timedelta(seconds=10)
"""How long `close` waits for threads that nothing should hold up."""

SOCKETS = 4096
"""How many sockets a server has at a time, each with a thread; those that come then are closed."""

MEMORIES = 4
"""How many shared memories both sides know at a time on one socket: those that were handed over last."""

_HEAD = struct.Struct("<BBHIIQQ4x")
"""Kind; whether the body is in shared memory; sizes of method and header; number of the shared memory; size
of the body, and where it is in that memory."""

SMALL = 128 * 1024
"""Bytes of a body that is sent although it is in shared memory: that is faster than to wait for an answer."""

_SCRATCH = 256 * 1024

_EVERYTHING = 1 << 62


class Kind(enum.IntEnum):
    """What a frame is."""

    CALL = 1
    ANSWER = 2
    END = 3
    REFUSAL = 4
    MEMORY = 5
    """Shared memory is handed over."""
    NEXT = 6
    """The client is done with a body in shared memory."""


class _Head(NamedTuple):
    kind: int
    shared: int
    method: int
    header: int
    memory: int
    body: int
    offset: int


class _Line:
    """A socket and what has been handed over on it. To be used by one thread, but for `hang_up`."""

    def __init__(self, sock: socket.socket, what: str, *, stall: timedelta | None = None) -> None:
        """Args: what: for messages. stall: how long the other side may be silent in the middle of a frame."""
        sock.setblocking(False)
        self._sock = sock
        self._what = what
        self._stall = stall
        self._process = os.getpid()
        self._passes_memory = sock.family == socket.AF_UNIX
        self._shown: list[int] = []
        self._seen: dict[int, Mapped] = {}
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def hang_up(self) -> None:
        """End whatever waits on this socket, in any thread."""
        if os.getpid() == self._process:  # a forked child has a copy of the socket, and the parent uses it
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._sock.close()
        self._seen.clear()

    def alive(self) -> bool:
        """Whether the other side is still there, as far as can be seen."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def require_open(self) -> None:
        """Raises ConnectionLost."""
        if self._sock.fileno() < 0:
            raise self._lost()

    # --- waiting

    def _wait(self, events: int, deadline: float | None) -> int:
        """Block until one of `events`; returns those that are there. Raises DeadlineExceeded."""
        self._poll.modify(self._sock, events)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"{self._what}: the time is over")
            for _, happened in self._poll.poll(None if left is None else left * 1000):
                return happened

    def _lost(self, error: OSError | None = None) -> ConnectionLost:
        return ConnectionLost(f"{self._what}: the other side has gone{f' ({error})' if error else ''}")

    # --- sending

    def encode(
        self, kind: Kind, frame: Frame, method: bytes = b"", *, share: bool = True
    ) -> tuple[list[bytes | memoryview], bool]:
        """What to send for a frame, and whether its body is in shared memory, so that it is not sent.

        Shared memory that the other side has not seen yet is handed over at once.

        Args:
            share: whether the other side can say that it is done with the body: it is not sending one itself.
        """
        body = flat(frame.body)
        place = place_of(body) if share and self._passes_memory and len(body) > SMALL else None
        number, offset = 0, 0
        if place is not None:
            memory, offset = place
            number = memory.number
            self._show(memory)
        sizes = len(method), len(frame.header)
        head = _HEAD.pack(kind, place is not None, *sizes, number, len(body), offset)
        first = b"".join((head, method, frame.header))
        return ([first], True) if place is not None else ([first, body], False)

    def _show(self, memory: Handle) -> None:
        if memory.number in self._shown:
            return
        head = _HEAD.pack(Kind.MEMORY, 1, 0, 0, memory.number, memory.size, 0)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    # Heads are whole or not at all: the buffer was empty, or has room for as little.
                    sent = socket.send_fds(self._sock, [head], [memory.fd], socket.MSG_NOSIGNAL)
                    if sent < len(head):
                        self.send([head[sent:]], None)
                    break
                self._wait(select.POLLOUT, None)
        except OSError as error:
            raise self._lost(error) from error
        self._shown = [*self._shown, memory.number][-MEMORIES:]

    def send(self, parts: Sequence[bytes | memoryview], deadline: float | None) -> None:
        """Send everything. Blocks. Raises ConnectionLost, DeadlineExceeded."""
        rest = self.send_some(parts)
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = self.send_some(rest)

    def send_some(self, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Send what the socket takes at once; returns the rest. Raises ConnectionLost."""
        rest = [part for part in parts if len(part)]
        try:
            while rest:
                sent = self._sock.sendmsg(rest, (), socket.MSG_NOSIGNAL)
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if sent:
                    rest[0] = memoryview(rest[0])[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._lost(error) from error
        return rest

    def tell(self, kind: Kind, header: bytes = b"") -> None:
        """Send a frame without method and body. Blocks."""
        self.send([_HEAD.pack(kind, 0, 0, len(header), 0, 0, 0), header], None)

    def send_while_waiting(self, rest: list[bytes | memoryview], deadline: float) -> list[bytes | memoryview]:
        """Send `rest` until all of it is sent or something arrives; returns what is left of it. Blocks."""
        while rest:
            if self._wait(select.POLLIN | select.POLLOUT, deadline) & ~select.POLLOUT:
                break
            rest = self.send_some(rest)
        return rest

    # --- receiving

    def receive_into(self, target: memoryview, deadline: float | None) -> None:
        """Fill `target`. Blocks.

        Raises:
            ConnectionLost, DeadlineExceeded: the rest does not come. The socket is hung up, because what
                comes next on it is no frame.
        """
        try:
            while target:
                try:
                    received = self._sock.recv_into(target)
                except BlockingIOError:
                    self._wait_for_more(deadline)
                    continue
                except OSError as error:
                    raise self._lost(error) from error
                if not received:
                    raise self._lost()
                target = target[received:]
        except BaseException:
            self.hang_up()
            raise

    def _wait_for_more(self, deadline: float | None) -> None:
        """Of a frame that has begun."""
        if self._stall is None:
            self._wait(select.POLLIN, deadline)
            return
        seconds = self._stall.total_seconds()
        try:
            self._wait(select.POLLIN, time.monotonic() + seconds)
        except DeadlineExceeded:
            text = f"the client has sent nothing for {seconds:g} s in the middle of a frame"
            raise ConnectionLost(text) from None

    def receive(self, size: int, deadline: float | None) -> bytes:
        """The next `size` bytes. Blocks."""
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def discard(self, size: int, deadline: float | None) -> None:
        """Skip `size` bytes. Blocks."""
        scratch = memoryview(bytearray(min(size, _SCRATCH)))
        while size:
            chunk = scratch[: min(size, len(scratch))]
            self.receive_into(chunk, deadline)
            size -= len(chunk)

    def head(self, deadline: float | None) -> _Head:
        """The next head but those that hand over memory, which is mapped. Blocks.

        Raises:
            ConnectionLost, DeadlineExceeded.
            Malformed: it is none.
        """
        while True:
            buffer = memoryview(bytearray(_HEAD.size))
            received, fds = self._first_bytes(buffer, deadline)
            try:
                self.receive_into(buffer[received:], deadline)
                head = _Head(*_HEAD.unpack(buffer))
                if head.kind != Kind.MEMORY:
                    return head
                if len(fds) != 1:
                    raise Malformed(f"{len(fds)} shared memories handed over at once")
                self._seen[head.memory] = Mapped(fds.pop())
                for oldest in list(self._seen)[:-MEMORIES]:
                    del self._seen[oldest]
            finally:
                for fd in fds:
                    os.close(fd)

    def _first_bytes(self, buffer: memoryview, deadline: float | None) -> tuple[int, list[int]]:
        while True:
            try:
                if self._passes_memory:
                    data, fds, flags, _ = socket.recv_fds(self._sock, len(buffer), 4)
                    if flags & socket.MSG_CTRUNC and not fds:
                        text = f"{self._what}: no descriptor is left for shared memory (see ulimit -n)"
                        raise ConnectionLost(text)
                    buffer[: len(data)] = data
                    received = len(data)
                else:
                    received, fds = self._sock.recv_into(buffer), []
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not received:
                raise self._lost()
            return received, fds

    def frame(self, head: _Head, limits: Limits, deadline: float | None) -> _Received:
        """The frame that begins with `head`. Blocks until its header is there.

        Raises:
            Malformed: it is above the limits.
        """
        name = self.receive(head.method, deadline).decode(errors="replace")
        for what, size, limit in (
            ("header", head.header, limits.header_bytes),
            ("body", head.body, limits.body_bytes),
        ):
            if size > limit:
                raise Malformed(f"{name or 'answer'}: a {what} of {size} bytes; the limit is {limit}")
        header = self.receive(head.header, deadline)
        view = None
        if head.shared:
            memory = self._seen.get(head.memory)
            if memory is None:
                raise Malformed(f"a body in shared memory {head.memory}, which was not handed over")
            view = memory.view(head.offset, head.body)
        return _Received(self, name, header, head.body, view, deadline)


class _Received:
    """An `Incoming`, whose body is still in the socket, or in shared memory."""

    def __init__(
        self,
        line: _Line,
        method: str,
        header: bytes,
        size: int,
        view: memoryview | None,
        deadline: float | None,
    ) -> None:
        self.method, self._header, self._size = method, header, size
        self._line, self._view, self._deadline = line, view, deadline
        self._taken = False

    @property
    def header(self) -> bytes:
        """The sender's header."""
        return self._header

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return self._size

    @property
    def shared(self) -> bool:
        """Whether the body is in shared memory, so that the sender waits until nobody looks at it."""
        return self._view is not None

    @property
    def arriving(self) -> bool:
        """Whether the body is still to be read from the socket."""
        return not self._taken and self._view is None and self._size > 0

    def view(self) -> memoryview | None:
        """The body where it is; see `Incoming.view`."""
        return None if self._taken else self._view

    def read_into(self, target: memoryview) -> None:
        """Write the body into `target`; see `Incoming.read_into`."""
        target = target_of(target, self._size)
        if self._taken:
            raise ValueError("the body has been read or discarded already")
        self._taken = True
        if self._view is None:
            self._line.receive_into(target, self._deadline)
            return
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineExceeded("the time is over")
        self._line.require_open()
        if self._size:
            # numpy lets other threads run meanwhile.
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(self._view, dtype=np.uint8))

    def discard(self) -> None:
        """Skip it if it has not been read. Blocks."""
        if not self._taken:
            self._taken = True
            if self._view is None:
                self._line.discard(self._size, self._deadline)


class StreamServer(Server):
    """Answers calls on a listening socket, with a thread for each socket. Thread-safe.

    Args:
        listener: bound and listening; closed by `close`.
        address: what clients connect to.
        limits: what is accepted from clients; `limits` may be replaced later.
        stall: how long a client may send nothing in the middle of a frame.
        admit: whether to talk to who has connected.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        *,
        limits: Limits | None = None,
        stall: timedelta = STALL,
        admit: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        self.limits = limits or Limits()
        self._listener, self._address = listener, address
        self._stall, self._admit = stall, admit
        self._handler: Handler | None = None
        self._accepting: threading.Thread | None = None
        self._changed = threading.Condition()
        self._lines: dict[_Line, threading.Thread] = {}
        self._busy: set[_Line] = set()
        self._closed = False

    @property
    def address(self) -> str:
        """What a client passes to connect."""
        return self._address

    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`. Does not block."""
        self._handler = handler
        self._accepting = threading.Thread(target=self._accept, name=f"accept {self._address}", daemon=True)
        self._accepting.start()

    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new call, let the running ones end within `grace`, cancel the rest, join the threads.

        A handler that waits for something else than its client is not interrupted: whoever owns that
        wakes it up. Close waits a few more seconds for such handlers, then leaves them and says so.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for line in self._lines.keys() - self._busy:
                line.hang_up()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up who accepts
        self._listener.close()
        if self._accepting is not None:
            self._accepting.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, grace.total_seconds())
            for line in self._lines:
                line.hang_up()
            idle = self._changed.wait_for(lambda: not self._lines, JOIN.total_seconds())
            left = len(self._lines)
        if not idle:
            _LOG.warning("%d handlers on %s did not end; their threads are left", left, self._address)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("%s takes no more connections for a moment: %s", self._address, error)
                time.sleep(0.1)  # too many open files
                continue
            line = _Line(sock, f"a client of {self._address}", stall=self._stall)
            if not self._admit(sock):
                line.close()
                continue
            thread = threading.Thread(
                target=self._answer_all, args=(line,), name=f"{self._address} calls", daemon=True
            )
            admitted = False
            try:
                with self._changed:
                    if not self._closed and len(self._lines) < SOCKETS:
                        thread.start()
                        self._lines[line] = thread
                        admitted = True
            except RuntimeError as error:  # the system gives no thread
                _LOG.warning("%s takes no more connections for a moment: %s", self._address, error)
            if not admitted:
                line.close()

    def _answer_all(self, line: _Line) -> None:
        """Answer one call after the other until the client goes."""
        try:
            if line.receive(len(GREETING), None) == GREETING:
                while self._answer_one(line):
                    pass
        except TransportError as error:
            _LOG.debug("%s", error)
        finally:
            line.close()
            with self._changed:
                del self._lines[line]
                self._busy.discard(line)
                self._changed.notify_all()

    def _answer_one(self, line: _Line) -> bool:
        """Answer a call; returns whether there may be another one."""
        head = line.head(None)
        with self._changed:
            if self._closed:
                return False
            self._busy.add(line)
        try:
            incoming = line.frame(self._require(head, Kind.CALL), self.limits, None)
        except Malformed as error:
            line.tell(Kind.REFUSAL, Refusal.of(error).to_bytes())
            line.discard(_EVERYTHING, None)  # closed at once, a client that still sends might not see why
            return False
        assert self._handler is not None, "accepted only after `serve`"
        with contextlib.closing(answers(self._handler, incoming.method, incoming, alive=line.alive)) as items:
            for item in items:
                if isinstance(item, Refusal):
                    line.tell(Kind.REFUSAL, item.to_bytes())
                    break
                parts, shared = line.encode(Kind.ANSWER, item, share=not incoming.arriving)
                line.send(parts, None)
                if shared:
                    self._require(line.head(None), Kind.NEXT)
            else:
                line.tell(Kind.END)
        incoming.discard()
        with self._changed:
            self._busy.discard(line)
            return not self._closed

    @staticmethod
    def _require(head: _Head, kind: Kind) -> _Head:
        if head.kind != kind:
            raise Malformed(f"a frame of kind {head.kind}; expected {kind.name}")
        return head


class StreamConnection(Connection):
    """Calls to one server, each over a socket that has no other call. Thread-safe.

    Args:
        dial: gives a connected socket.
        address: of the server, for messages.
        limits: what is accepted from the server.
    """

    def __init__(
        self, dial: Callable[[], socket.socket], address: str, *, limits: Limits | None = None
    ) -> None:
        self._dial, self._address = dial, address
        self._limits = limits or Limits()
        self._lock = (
            threading.RLock()
        )  # an answer that is dropped anywhere, by the garbage collector, takes it
        self._idle: list[_Line] = []
        self._busy: set[_Line] = set()
        self._closed = False

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers; see `Connection.call`."""
        what = f"{method} at {self._address}"
        if timeout <= timedelta(0):
            raise DeadlineExceeded(f"{what}: no time is left to call")
        deadline = time.monotonic() + timeout.total_seconds()
        line = self._take(what)
        try:
            parts, _ = line.encode(Kind.CALL, frame, method.encode())
            rest = line.send_some(parts)
        except BaseException:
            self._give_back(line, usable=False, lost=True)
            raise
        return _Answers(line, frame, rest, self._limits, deadline, self._give_back)

    def _take(self, what: str) -> _Line:
        """A socket for a call."""
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{what}: the connection was closed")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        try:
            line = _Line(self._dial(), self._address)
        except OSError as error:
            raise ConnectionLost(f"{what}: nobody serves there ({error})") from error
        try:
            line.send([GREETING], None)
            with self._lock:
                if self._closed:
                    raise ConnectionLost(f"{what}: the connection was closed")
                self._busy.add(line)
        except BaseException:
            line.close()
            raise
        return line

    def _give_back(self, line: _Line, *, usable: bool, lost: bool = False) -> None:
        """A call has ended. If the server was lost, the sockets that are idle are of no use any more."""
        useless = [] if usable else [line]
        with self._lock:
            self._busy.discard(line)
            if usable and not self._closed:
                self._idle.append(line)
            elif usable:
                useless.append(line)
            if lost:
                useless += self._idle
                self._idle = []
        for each in useless:
            each.close()

    def close(self) -> None:
        """Cancel the calls that are under way, and free everything."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for line in self._busy.copy():  # the garbage collector may end a call meanwhile
                line.hang_up()
        for line in idle:
            line.close()


class _GiveBack(Protocol):
    def __call__(self, line: _Line, *, usable: bool, lost: bool = False) -> None: ...


class _Answers(Iterator[Incoming]):
    """The answers to one call. Closing or dropping it cancels the call."""

    def __init__(
        self,
        line: _Line,
        frame: Frame,
        rest: list[bytes | memoryview],
        limits: Limits,
        deadline: float,
        give_back: _GiveBack,
    ) -> None:
        self._line: _Line | None = line
        self._rest = rest
        self._limits, self._deadline = limits, deadline
        self._give_back = give_back
        self._frame: Frame | None = frame  # its memory is taken back when nobody has it any more
        self._received: _Received | None = None
        self._process = os.getpid()

    def __next__(self) -> Incoming:
        line = self._line
        if line is None:
            raise StopIteration
        try:
            if self._received is not None:
                self._received.discard()
                if self._received.shared:
                    line.tell(Kind.NEXT)
                self._received = None
            self._rest = line.send_while_waiting(self._rest, self._deadline)
            head = line.head(self._deadline)
            if head.kind not in (Kind.ANSWER, Kind.REFUSAL, Kind.END):
                raise Malformed(f"a frame of kind {head.kind} as an answer")
            received = line.frame(head, self._limits, self._deadline)
        except BaseException as error:
            self._end(usable=False, lost=isinstance(error, ConnectionLost))
            raise
        if head.kind == Kind.ANSWER:
            self._received = received
            return received
        refusal = Refusal.from_bytes(received.header) if head.kind == Kind.REFUSAL else None
        malformed = refusal is not None and refusal.kind is Blame.MALFORMED  # where the next frame begins?
        self._end(usable=not self._rest and not malformed)
        if refusal is not None:
            raise refusal.error()
        raise StopIteration

    def _end(self, *, usable: bool, lost: bool = False) -> None:
        line, self._line, self._frame, self._rest = self._line, None, None, []
        if line is not None:
            self._give_back(line, usable=usable, lost=lost)

    def close(self) -> None:
        """Cancel the call if it has not ended; the body of its frame is not read after that."""
        self._end(usable=False)

    def __del__(self) -> None:
        if os.getpid() == self._process:  # in a forked child the lock may be held by a thread that it lacks
            self._end(usable=False)
