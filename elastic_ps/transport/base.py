"""The interface of a transport: calls that carry a small header and a large body.

A *call* sends one frame, a method name with a header and a body, and receives any number of frames in
sequence. A header is an encoded protobuf message of a few hundred bytes. A body is a tensor's bytes. It is
announced by its size, and the receiver names its target before a byte is copied. So a body can go from the
sender's tensor to the receiver's without a buffer, on transports that support it (shared memory, MPI), and a
server decides when it receives a body.

Transports do not read headers. Objects are thread-safe unless they say otherwise. A transport is correct if
`tests/integration/test_transport.py` passes for it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from elastic_ps.contract.identity import Identity
from elastic_ps.errors import Malformed

EMPTY = memoryview(b"")

STALL = timedelta(seconds=5)
"""A client that sends or takes nothing for this long in the middle of a frame is cut off: it may hold one of
the few buffers that all others need."""

JOIN = timedelta(seconds=10)
"""How long `close` waits for threads that should end at once."""


@dataclass(frozen=True)
class Frame:
    """A header and a body to send.

    Attributes:
        header: at most `Limits.header_bytes` bytes.
        body: a C-contiguous view of bytes. It is read while the frame is being sent and must not change
            until the call has ended (for a server: until the next frame is asked for).
        last: whether a server's handler ends after this frame. A transport may then announce the end with the
            frame, and need not ask the handler for more.
    """

    header: bytes
    body: memoryview = EMPTY
    last: bool = False


class Incoming(Protocol):
    """A frame that is being received. For one thread only."""

    @property
    def header(self) -> bytes:
        """The sender's header."""

    @property
    def size(self) -> int:
        """The announced size of the body, in bytes; at most `Limits.body_bytes`."""

    @property
    def transport(self) -> str:
        """The transport: `shm`, `tcp`, `grpc`, `mpi` or `inproc`."""

    @property
    def peer(self) -> Identity | None:
        """The identity in the sender's certificate; None if the connection has no certificate.

        That is so if the job has none, or the sender needs none: a process of the same user on this host
        (`shm`), this process (`inproc`), or a process that a rank of the same `mpirun` has started (`mpi`).
        """

    def view(self) -> memoryview | None:
        """The body in shared memory, read-only; None if it has to be read with `read_into`.

        It is valid until this side answers, or asks for the next answer. So a handler that uses it may not
        yield before it is done with it.
        """

    def read_into(self, target: memoryview) -> None:
        """Write the body into `target`, which has exactly `size` writable bytes. Blocks until it is complete.

        Call it at most once. The transport discards a body that is never read.

        Raises:
            ConnectionLost, DeadlineExceeded: the rest does not arrive; the content of `target` is undefined.
            Malformed: the sender sent another number of bytes than it announced.
        """


@dataclass(frozen=True)
class Limits:
    """The limits of a receiver. A larger frame is refused with `Malformed`, before memory is allocated."""

    header_bytes: int = 16 * 1024 * 1024
    body_bytes: int = 1 << 36
    """More than a tensor has, since optimizers may need one whole. A handler knows from the model how long a
    body is, and compares `Incoming.size` before it takes memory, or takes memory only as the bytes arrive."""
    share: int = 128
    """The least number of calls or sockets of one address: workers on one host need about eight each."""
    handshake: timedelta = timedelta(seconds=10)
    """The time limit of a client's handshake, and with gRPC of its first message."""
    speaks: timedelta | None = None
    """How long an unknown data port may take to greet before gRPC is used; None: see `tcp.dial`."""

    def check(self, what: str, *, header: int, body: int) -> None:
        """Raise Malformed if a frame's header or body is too large. `what` names it in the message."""
        for part, size, limit in (("header", header, self.header_bytes), ("body", body, self.body_bytes)):
            if size > limit:
                raise Malformed(f"{what}: a {part} of {size} bytes; the limit is {limit}")


Handler = Callable[[str, Incoming], Iterator[Frame]]
"""A server's answer to a call: `handler(method, frame)` yields the frames to send back.

It runs in a thread of the transport and may block. When the client goes away, the iterator is closed at
its next frame. `errors.Refused` raised in it arrives at the client as `errors.Refused` with the same code
and message; `errors.Malformed` likewise; any other exception arrives as `errors.TransportError` that names
its type, and is logged with its traceback.
"""


class Connection(abc.ABC):
    """A client's connection to one server."""

    @property
    def near(self) -> bool:
        """Whether the server is known to be on this host, so that large bodies need not be sent."""
        return False

    @abc.abstractmethod
    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers. Sending starts at once; a large body may take until the
        first `next`.

        An answer's body must be read before the next answer is asked for. `timeout` bounds the whole call,
        from now to its last answer. Closing the iterator (or dropping it) cancels the call.

        Raises (here or while iterating or reading):
            Refused: the server refuses.
            ConnectionLost, DeadlineExceeded, Malformed, TransportError.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Cancel all calls (their threads get `ConnectionLost`) and free everything."""


class Server(abc.ABC):
    """A listening server, which serves from `serve` until `close`."""

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """The address for clients."""

    @abc.abstractmethod
    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`, in threads of the transport. Does not block."""

    @abc.abstractmethod
    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new calls, let the running ones end within `grace`, cancel the rest, join the threads.

        A handler that waits for anything but its client is not interrupted; its owner has to wake it up.
        Close waits a few more seconds for such handlers, then logs a warning and leaves them.
        """


def unary(connection: Connection, method: str, header: bytes, *, timeout: timedelta) -> bytes:
    """Make a call without bodies and with exactly one answer; returns its header. Blocks."""
    headers = [answer.header for answer in connection.call(method, Frame(header), timeout=timeout)]
    if headers:
        return headers[0]
    raise Malformed(f"{method}: the server sent an empty answer")
