"""Calls over sockets, with a socket for each concurrent call.

The sender of a body in shared memory waits until the other side is done with it: a server resumes its handler
when the client asks for the next answer, and a client waits for the answer anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed, TransportError, UsageError
from elastic_ps.transport.base import JOIN, STALL, Connection, Frame, Handler, Incoming, Limits, Server
from elastic_ps.transport.credentials import Credentials, UntrustedError, names_of
from elastic_ps.transport.line import Head, Line, LineKind, Received
from elastic_ps.transport.refusal import Blame, Refusal, answers
from elastic_ps.transport.shares import Shares, descriptors_for
from elastic_ps.transport.sockets import Plain

_LOG = logging.getLogger(__name__)

PROTOCOL = b"elastic-ps/3"
"""The name and version of the protocol."""

GREETING = PROTOCOL + b"\n"
"""The client's greeting, by which other programs are recognised."""

HURRY = timedelta(seconds=1)
"""The time for a client's handshake and greeting while many others wait, see `StreamServer._hurry`."""

LOOK = timedelta(seconds=1)
"""How often a call that waits for `serve` looks whether its client is still there."""

SOCKETS = 4096
"""The number of sockets of a server, each with a thread; further ones are closed. One address has a share of
them, see `transport.shares`."""

UNKNOWN = 4
"""If more than one in this many sockets have not greeted yet, they have to hurry."""

_EVERYTHING = 1 << 62


class StreamServer(Server):
    """Answers calls on a listening socket, with a thread for each socket. Thread-safe.

    A client is greeted at once, and waits until `serve` is called. That may take long, while a checkpoint is
    loaded, and a silent port would be taken for a blocked one. A client that goes meanwhile is not answered.

    Args:
        listener: bound and listening; closed by `close`.
        address: the address for clients.
        limits: the limits for clients.
        stall: how long a client may send or take nothing in the middle of a frame.
        admit: whether to accept a connection.
        hello: the greeting on each socket.
        credentials: for TLS with clients that have a certificate of the job; None: the server answers
            everybody in plain text.
        way: see `Line`.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        *,
        limits: Limits | None = None,
        stall: timedelta = STALL,
        admit: Callable[[socket.socket], bool] = lambda _: True,
        hello: bytes = b"",
        credentials: Credentials | None = None,
        way: str = "",
    ) -> None:
        self.limits = limits or Limits()
        self._listener, self._address = listener, address
        self._stall, self._admit, self._hello = stall, admit, hello
        self._credentials, self._way = credentials, way
        self._handler: Handler | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lines: dict[Line, threading.Thread] = {}
        self._busy: set[Line] = set()
        self._unknown: dict[Line, float] = {}  # with their start times, the oldest first
        self._most = descriptors_for(SOCKETS)
        self._shares = Shares(self._most, self.limits.share)
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"accept {address}", daemon=True)
        self._accepting.start()

    @property
    def address(self) -> str:
        """The address for clients."""
        return self._address

    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`. Does not block."""
        with self._changed:
            self._handler = handler
            self._changed.notify_all()

    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new calls, and end the running ones; see `Server.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for line in self._lines.keys() - self._busy:
                line.hang_up()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the accepting thread
        self._listener.close()
        self._accepting.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, grace.total_seconds())
            for line in self._lines:
                line.hang_up()
            idle = self._changed.wait_for(lambda: not self._lines, JOIN.total_seconds())
            left = len(self._lines)
        if not idle:
            _LOG.warning("%d handlers on %s did not end; their threads go on", left, self._address)

    def _accept(self) -> None:
        while True:
            try:
                sock, place = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("%s takes no more connections for a moment: %s", self._address, error)
                time.sleep(0.1)  # too many open files
                continue
            if not self._admit(sock):
                sock.close()
                continue
            try:
                what = f"a client of {self._address}"
                line = Line(self._secured(sock), what, stall=self._stall, way=self._way)
            except OSError:  # the client has gone already
                sock.close()
                continue
            client = place[0] if isinstance(place, tuple) else ""  # within a host it is always this user
            self._hurry()
            thread = threading.Thread(
                target=self._answer_all, args=(line, client), name=f"{self._address} calls", daemon=True
            )
            if client and not self._shares.take(client):
                line.close()
                continue
            admitted = False
            try:
                with self._changed:
                    if not self._closed and len(self._lines) < self._most:
                        thread.start()
                        self._lines[line] = thread
                        self._unknown[line] = time.monotonic()
                        admitted = True
            except RuntimeError as error:  # the system gives no thread
                _LOG.warning("%s takes no more connections for a moment: %s", self._address, error)
            if not admitted:
                line.close()
                self._give_back(client)

    def _give_back(self, client: str) -> None:
        if client:
            self._shares.give_back(client)

    def _hurry(self) -> None:
        """Hang up on clients that have not greeted, if they hold too many sockets.

        One address has only its share, but unfinished handshakes from many addresses could take all sockets.
        """
        with self._changed:
            if len(self._unknown) < self._most // UNKNOWN:
                return
            limit = time.monotonic() - HURRY.total_seconds()
            for line, since in [*self._unknown.items()]:
                if since > limit:
                    break
                line.hang_up()
                del self._unknown[line]

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The socket, with TLS if the server uses it. Nothing is sent yet. Raises OSError."""
        if self._credentials is None:
            return sock
        return self._credentials.accepting().wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )

    def _greet(self, line: Line) -> None:
        """Send the greeting; with credentials, after the client has shown its certificate.

        Raises TransportError if it has no certificate of this job.
        """
        if self._credentials is None:
            line.send([self._hello], None)
            return
        line.peer = self._credentials.accept(names_of(line.handshake(self.limits.handshake)))
        if line.peer is None:
            raise ConnectionLost(f"a client of {self._address} has no certificate of this job")
        line.seal(self._hello, self.limits.handshake)

    def _answer_all(self, line: Line, client: str) -> None:
        """Answer calls until the client goes."""
        try:
            self._greet(line)
            if line.receive(len(GREETING), None) == GREETING:
                with self._changed:
                    self._unknown.pop(line, None)
                while self._answer_one(line):
                    pass
        except TransportError as error:
            _LOG.debug("%s", error)
        finally:
            line.close()
            self._give_back(client)
            with self._changed:
                del self._lines[line]
                self._unknown.pop(line, None)
                self._busy.discard(line)
                self._changed.notify_all()

    def _answer_one(self, line: Line) -> bool:
        """Answer a call; returns whether there may be another one."""
        head = line.head(None)
        with self._lock:
            waits = self._handler is None
            while self._handler is None and not self._closed and line.alive():
                self._changed.wait(LOOK.total_seconds())
            if self._closed or self._handler is None or (waits and not line.alive()):
                return False
            handler = self._handler
            self._busy.add(line)
        try:
            incoming = line.frame(self._require(head, LineKind.CALL), self.limits, None)
        except Malformed as error:
            line.tell(LineKind.REFUSAL, Refusal.of(error).to_bytes())
            line.discard(
                _EVERYTHING, None
            )  # if closed at once, a client that still sends might not see the reason
            return False
        with contextlib.closing(answers(handler, incoming.method, incoming, alive=line.alive)) as items:
            for item in items:
                if isinstance(item, Refusal):
                    line.tell(LineKind.REFUSAL, item.to_bytes())
                    break
                kind = LineKind.LAST if item.last else LineKind.ANSWER
                parts, shared = line.encode(kind, item, share=not (item.last or incoming.arriving))
                line.send(parts, None)
                if item.last:
                    break
                if shared:
                    self._require(line.head(None), LineKind.NEXT)
            else:
                line.tell(LineKind.END)
        incoming.discard()
        with self._lock:
            self._busy.discard(line)
            return not self._closed

    @staticmethod
    def _require(head: Head, kind: LineKind) -> Head:
        if head.kind != kind:
            raise Malformed(f"a frame of kind {head.kind}; expected {kind.name}")
        return head


class StreamConnection(Connection):
    """Calls to one server, each over a socket that has no other call. Thread-safe.

    Args:
        dial: returns a connected socket.
        address: the address of the server, for messages.
        limits: the limits for the server.
        near: whether the server is on this host.
        way: see `Line`.
    """

    def __init__(
        self,
        dial: Callable[[], socket.socket | Plain],
        address: str,
        *,
        limits: Limits | None = None,
        near: bool = False,
        way: str = "",
    ) -> None:
        self._dial, self._address, self._near, self._way = dial, address, near, way
        self._limits = limits or Limits()
        self._lock = (
            threading.RLock()
        )  # the garbage collector may drop an answer, which takes the lock, anywhere
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._closed = False
        self._process = os.getpid()

    @property
    def near(self) -> bool:
        """See `Connection.near`."""
        return self._near

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers; see `Connection.call`."""
        what = f"{method} at {self._address}"
        if timeout <= timedelta(0):
            raise DeadlineExceeded(f"{what}: no time is left to call")
        deadline = time.monotonic() + timeout.total_seconds()
        line = self._take(what)
        try:
            parts, _ = line.encode(LineKind.CALL, frame, method.encode())
            rest = line.send_some(parts)
        except BaseException:
            self._give_back(line, usable=False, lost=True)
            raise
        return _Answers(line, frame, rest, self._limits, deadline, self._give_back)

    def _take(self, what: str) -> Line:
        """A socket for a call."""
        if os.getpid() != self._process:  # in a forked child: the parent still uses the sockets
            raise UsageError(
                f"{what}: only the process that has connected may call, and this is a child of it, such as a "
                "process of a DataLoader. Make the call in the script itself"
            )
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{what}: the connection was closed")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        try:
            line = Line(self._dial(), self._address, way=self._way)
        except UntrustedError as error:
            raise ConnectionLost(f"{what}: {error}") from error
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

    def _give_back(self, line: Line, *, usable: bool, lost: bool = False) -> None:
        """Note the end of a call. If the server was lost, idle sockets are useless."""
        useless = [] if usable else [line]
        with self._lock:
            self._busy.discard(line)
            if usable and not self._closed and not line.worn:
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
    def __call__(self, line: Line, *, usable: bool, lost: bool = False) -> None: ...


class _Answers(Iterator[Incoming]):
    """The answers to one call. Closing or dropping it cancels the call."""

    def __init__(
        self,
        line: Line,
        frame: Frame,
        rest: list[bytes | memoryview],
        limits: Limits,
        deadline: float,
        give_back: _GiveBack,
    ) -> None:
        self._line: Line | None = line
        self._rest = rest
        self._limits, self._deadline = limits, deadline
        self._give_back = give_back
        self._frame: Frame | None = frame  # its memory is reused when nobody has it any more
        self._received: Received | None = None
        self._over = False  # it is the last one
        self._process = os.getpid()

    def __next__(self) -> Incoming:
        line = self._line
        if line is None:
            raise StopIteration
        try:
            if self._received is not None:
                self._received.discard()
                if self._over:
                    self._end(usable=not self._rest)
                    raise StopIteration
                if self._received.shared:
                    line.tell(LineKind.NEXT)
                self._received = None
            self._rest = line.send_while_waiting(self._rest, self._deadline)
            head = line.head(self._deadline)
            if head.kind not in (LineKind.ANSWER, LineKind.LAST, LineKind.REFUSAL, LineKind.END):
                raise Malformed(f"a frame of kind {head.kind} as an answer")
            received = line.frame(head, self._limits, self._deadline)
        except BaseException as error:
            self._end(usable=False, lost=isinstance(error, ConnectionLost))
            raise
        if head.kind in (LineKind.ANSWER, LineKind.LAST):
            self._received, self._over = received, head.kind == LineKind.LAST
            return received
        refusal = Refusal.from_bytes(received.header) if head.kind == LineKind.REFUSAL else None
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
        if (
            os.getpid() == self._process
        ):  # in a forked child, the lock may be held by a thread that does not exist there
            self._end(usable=False)
