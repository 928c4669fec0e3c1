"""What the tests of all transports share. A new transport is one more line in TRANSPORTS."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from elastic_ps.errors import TransportError
from elastic_ps.transport import local, tcp
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Limits, Server
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.transport.inproc import InprocConnection, InprocServer
from elastic_ps.transport.local import LocalServer
from elastic_ps.transport.mpi import MpiServer
from elastic_ps.transport.tcp import TcpServer
from tests.testing import certificates
from tests.testing.relays import Relayed
from tests.testing.tiers import per_change

_NUMBERS = itertools.count(os.getpid() * 1000)
"""They need not be ports."""

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=300)


class GrpcTransport:
    """Makes servers and connections of the gRPC transport."""

    tls = False

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """A server that does not serve yet; at the address of the closed server `again`, if given."""
        credentials = certificates.pair()[0] if self.tls else None
        return GrpcServer(again.address if again else "127.0.0.1:0", limits=limits, credentials=credentials)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        credentials = certificates.pair()[1] if self.tls else None
        return GrpcConnection(server.address, limits=limits, credentials=credentials)


class GrpcOverTls(GrpcTransport):
    """The same with certificates."""

    tls = True


class InprocTransport:
    """Makes servers and connections of the transport within a process."""

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """See `GrpcTransport.listen`."""
        return again or InprocServer(limits=limits)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        assert isinstance(server, InprocServer)
        return InprocConnection(server, limits=limits)


class LocalTransport:
    """Makes servers and connections of the transport within a host."""

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """See `GrpcTransport.listen`."""
        return LocalServer(again.address if again else f"127.0.0.1:{next(_NUMBERS)}", limits=limits)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        return local.connect(server.address, limits=limits)


class TcpTransport:
    """Makes servers and connections of the transport between hosts."""

    tls = False

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """See `GrpcTransport.listen`."""
        credentials = certificates.pair()[0] if self.tls else None
        return TcpServer(again.address if again else "127.0.0.1:0", limits=limits, credentials=credentials)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        credentials = certificates.pair()[1] if self.tls else None
        return tcp.connect(server.address, limits=limits, credentials=credentials)


class TcpOverTls(TcpTransport):
    """The same with certificates."""

    tls = True


class MpiTransport:
    """Makes servers of the transport through MPI, and connections through two relays without MPI."""

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """See `GrpcTransport.listen`."""
        return MpiServer(again.address if again else f"127.0.0.1:{next(_NUMBERS)}", limits=limits)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        return Relayed(server.address, limits=limits)


Transport = GrpcTransport | InprocTransport | LocalTransport | TcpTransport | MpiTransport
TRANSPORTS: list[Callable[[], Transport]] = [
    GrpcTransport,
    GrpcOverTls,
    InprocTransport,
    LocalTransport,
    TcpTransport,
    TcpOverTls,
    MpiTransport,
]

BY_NAME: dict[str, Callable[[], Transport]] = {
    "inproc": InprocTransport,
    "grpc": GrpcTransport,
    "tcp": TcpTransport,
    "shm": LocalTransport,
    "mpi": MpiTransport,
}
"""What a whole job's correctness is tested over; see `running_job`."""

whole_jobs = pytest.mark.parametrize("transport", per_change(BY_NAME, keep=["inproc", "tcp"]))

sweeps = pytest.mark.parametrize(
    "world",
    per_change(TRANSPORTS, keep=[GrpcTransport, TcpTransport]),
    ids=lambda transport: transport.__name__,
    indirect=True,
)
"""For a test that repeats what it does with other sizes, or other codes."""


def read(incoming: Incoming) -> bytes:
    """The whole body."""
    body = bytearray(incoming.size)
    incoming.read_into(memoryview(body))
    return bytes(body)


def close(answers: Iterator[Incoming]) -> None:
    """What `contextlib.closing` does."""
    answers.close()  # type: ignore[attr-defined]


def echo(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Answer with what came."""
    yield Frame(incoming.header, memoryview(read(incoming)))


class Reading:
    """A handler that reads the body and answers; `errors` has what reading raised."""

    def __init__(self) -> None:
        self.errors: list[TransportError] = []

    def __call__(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        """Answer with an empty frame."""
        try:
            read(incoming)
        except TransportError as error:
            self.errors.append(error)
            raise
        yield Frame(b"")


class World:
    """What a test uses; all of it is closed after the test."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.released = threading.Event()
        self._stack = contextlib.ExitStack()

    def serve(self, handler: Handler, *, limits: Limits | None = None) -> Server:
        """A server that answers with `handler`."""
        server = self.transport.listen(limits=limits)
        self._stack.callback(server.close)
        server.serve(handler)
        return server

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        connection = self.transport.connect(server, limits=limits)
        self._stack.callback(connection.close)
        return connection

    def pair(self, handler: Handler, *, limits: Limits | None = None) -> Connection:
        """A connection to a server that answers with `handler`."""
        return self.connect(self.serve(handler, limits=limits))

    def block(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        """A handler that waits until the test is over."""
        assert self.released.wait(60)
        yield Frame(b"late")

    def close(self) -> None:
        """Let every handler go and close everything."""
        self.released.set()
        self._stack.close()
