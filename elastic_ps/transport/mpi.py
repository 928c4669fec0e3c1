"""The transport through MPI: `transport.stream` over a Unix socket to the rank that has started this process.

A worker does not use MPI. Its rank listens here, under a name of its own, for the server at each port, and
relays data as messages to rank 0 (`local.relay`), which connects to the server on its own host. So a worker
may die and be restarted while its rank lives, and no TCP port is needed. The address is `NAME:PORT`; the
server's own is `127.0.0.1:PORT`, on rank 0's host.

Bodies are sent, never shared, since the server is on another host. There is no TLS here: the rank has started
the worker, has its certificate, and accepts only processes of its own user.
"""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta

from elastic_ps.transport import local
from elastic_ps.transport.base import STALL, Limits
from elastic_ps.transport.sealed import hear
from elastic_ps.transport.stream import PROTOCOL, StreamConnection, StreamServer

SPEAK = timedelta(seconds=5)
"""How long a client waits for the server's greeting."""

_HELLO = PROTOCOL + b"\n"
"""The server's greeting: a rank accepts a connection before it knows whether there is a server."""

BUFFER = 512 * 1024
"""The buffer of a socket, and the largest message of MPI, in bytes."""


def name_of(address: str) -> str:
    """The Unix socket of the server at `address`, or of the rank that leads to it."""
    return f"\0elastic-ps mpi {address}"


def prepare(sock: socket.socket) -> None:
    """Enlarge a socket's buffer to the size of a message, as far as the system allows."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


class MpiServer(StreamServer):
    """Listens for the connections of rank 0, on this host. Thread-safe."""

    def __init__(self, address: str, *, limits: Limits | None = None, stall: timedelta = STALL) -> None:
        """Listen for `address`, `127.0.0.1:PORT`.

        Raises:
            CannotListen: another process does, or this system has no such sockets.
        """
        listener = local.listening(name_of(address), address)
        super().__init__(listener, address, limits=limits, stall=stall, admit=_admit, hello=_HELLO, way="mpi")


def _admit(sock: socket.socket) -> bool:
    prepare(sock)
    return local.same_user(sock)


def dial(address: str) -> socket.socket:
    """A socket that leads to the `MpiServer` of `address`, through a rank or directly.

    Blocks until the server's greeting, for at most `SPEAK`.

    Raises:
        OSError: there is no such rank or server, the server does not answer, or it belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        sock = local.connected(name_of(address), address)
        stack.callback(sock.close)
        prepare(sock)
        said = hear(sock, len(_HELLO), time.monotonic() + SPEAK.total_seconds())
        if len(said) < len(_HELLO):
            raise ConnectionRefusedError(f"no parameter server listens behind {address}")
        if said != _HELLO:
            raise ConnectionRefusedError(f"{address} is not a parameter server of this version")
        stack.pop_all()
    return sock


def connect(address: str, *, limits: Limits | None = None) -> StreamConnection:
    """Calls to the `MpiServer` of `address`. Nothing is sent before the first one."""
    return StreamConnection(lambda: dial(address), address, limits=limits, way="mpi")
