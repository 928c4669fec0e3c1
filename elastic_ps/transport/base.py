"""The interface of a transport: calls that carry a small header and a large body.

A *call* sends one frame, a method name with a header and a body, and receives any number of frames back,
one after the other. A header is an encoded protobuf message of a few hundred bytes. A body is a tensor's
bytes: it is announced by its size, and the receiver says where it shall be written before a byte of it is
copied. So a body can go from the sender's tensor to the receiver's without a buffer between them, on
transports that can do that (shared memory, MPI), and a server decides when it takes a body in.

Nothing here knows what the headers say. Everything is safe to use from several threads unless it says
otherwise. A transport is correct if `tests/integration/test_transport.py` passes for it.
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


@dataclass(frozen=True)
class Frame:
    """What one side sends: a header and a body.

    Attributes:
        header: at most `Limits.header_bytes` bytes.
        body: a C-contiguous view of bytes. It is read while the frame is being sent and must not change
            until the call has ended (for a server: until the next frame is asked for).
        last: of a server's frame: the handler ends after it. So a transport may say so with the frame itself,
            and need not ask the handler for more.
    """

    header: bytes
    body: memoryview = EMPTY
    last: bool = False


class Incoming(Protocol):
    """A frame that is being received. To be used by one thread."""

    @property
    def header(self) -> bytes:
        """The sender's header."""

    @property
    def size(self) -> int:
        """Bytes of the body as announced; at most `Limits.body_bytes`."""

    @property
    def transport(self) -> str:
        """In which way it came: `shm`, `tcp`, `grpc`, `mpi` or `inproc`."""

    @property
    def peer(self) -> Identity | None:
        """Who has sent it, by the certificate of the connection.

        None: the connection has none. The job has no certificates, or the sender is a process of the same
        user on this host (`shm`), or this process (`inproc`): it could do all that this process does. Or it
        comes through a rank of the same `mpirun` (`mpi`), which has started it.
        """

    def view(self) -> memoryview | None:
        """The body in memory that both sides share, read-only; None if it has to be read with `read_into`.

        It is there until this side answers, or asks for the next answer. A handler that looks at it may not
        yield before it is done with it.
        """

    def read_into(self, target: memoryview) -> None:
        """Write the body into `target`, which has exactly `size` writable bytes. Blocks until all are there.

        May be called once. A body that is never read is discarded by the transport.

        Raises:
            ConnectionLost, DeadlineExceeded: the rest does not come; `target`'s content is undefined.
            Malformed: the sender sent another number of bytes than it announced.
        """


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts; beyond it, `Malformed` for the sender of a frame, and no memory is taken.

    A server's `body_bytes` may be raised when it learns the layout of the model.
    """

    header_bytes: int = 16 * 1024 * 1024
    body_bytes: int = 256 * 1024 * 1024
    share: int = 128
    """What one address may hold of a server in any case: workers on one host need about eight each."""
    handshake: timedelta = timedelta(seconds=10)
    """For how long the handshake of a `stream` may take."""

    def check(self, what: str, *, header: int, body: int) -> None:
        """Raises Malformed if a frame's header or body has too many bytes. `what` names it in the message."""
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
    """A client's way to one server."""

    @property
    def near(self) -> bool:
        """Whether the server is known to be on this host, so that large bodies need not travel."""
        return False

    @abc.abstractmethod
    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers. Sending starts at once; a large body may take until the
        first `next`.

        An answer's body must be read before the next answer is asked for. `timeout` bounds the whole call,
        from now to its last answer. Closing the iterator (or dropping it) cancels the call.

        Raises (here or while iterating or reading):
            Refused: the server says no.
            ConnectionLost, DeadlineExceeded, Malformed, TransportError.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Cancel the calls that are under way (their threads get `ConnectionLost`) and free everything."""


class Server(abc.ABC):
    """A listening server. It serves from `serve` until `close`."""

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """What a client passes to connect."""

    @abc.abstractmethod
    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`, in threads of the transport. Does not block."""

    @abc.abstractmethod
    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new call, let the running ones end within `grace`, cancel the rest, join the threads.

        A handler that waits for something else than its client is not interrupted: whoever owns that
        wakes it up. Close waits a few more seconds for such handlers, then leaves them and says so.
        """


def unary(connection: Connection, method: str, header: bytes, *, timeout: timedelta) -> bytes:
    """A call with headers only and exactly one answer; returns the answer's header. Blocks."""
    headers = [answer.header for answer in connection.call(method, Frame(header), timeout=timeout)]
    if headers:
        return headers[0]
    raise Malformed(f"{method}: the server sent an empty answer")
