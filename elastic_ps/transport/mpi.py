"""The transport through MPI: `transport.stream` over a Unix socket to the rank that has started this process.

A worker speaks no MPI. Its rank listens here, under a name that the rank has made up, for the server at each
port; it hands on what arrives as messages to rank 0 (`local.relay`), which connects to the server on its own
host. So a worker may die and be started again while its rank lives, and no port of TCP is needed. The
address is `NAME:PORT`; the server's own is `127.0.0.1:PORT`, on rank 0's host.

Bodies are sent, never shared: who is at the other end is on another host. Nobody talks TLS here: a rank has
started the worker, has its certificate, and answers processes of its own user only.
"""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta

from elastic_ps.transport import local
from elastic_ps.transport.base import Limits
from elastic_ps.transport.stream import PROTOCOL, STALL, StreamConnection, StreamServer

SPEAK = timedelta(seconds=5)
"""How long a client waits for the server to speak."""

_HELLO = PROTOCOL + b"\n"
"""What a server says first: a rank takes a connection before it knows whether there is a server."""

BUFFER = 512 * 1024
"""Bytes that a socket shall take at once, and a message of MPI has at most."""

_AT_ONCE = 0.001
"""Seconds. Zero would mean that a socket does not block."""


def name_of(address: str) -> str:
    """The Unix socket of the server at `address`, or of the rank through which it is reached."""
    return f"\0elastic-ps mpi {address}"


def prepare(sock: socket.socket) -> None:
    """Let a socket take as much as a message has, as far as the system allows: fewer and larger messages."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


class MpiServer(StreamServer):
    """Listens for the connections of rank 0, on this host. Thread-safe."""

    def __init__(self, address: str, *, limits: Limits | None = None, stall: timedelta = STALL) -> None:
        """Listen in the place of `address`, `127.0.0.1:PORT`.

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

    Blocks until the server has spoken, for `SPEAK` at most.

    Raises:
        OSError: there is no such rank or no server, the server does not speak, or it is another user's.
    """
    with contextlib.ExitStack() as stack:
        sock = local.connected(name_of(address), address)
        stack.callback(sock.close)
        prepare(sock)
        said, until = b"", time.monotonic() + SPEAK.total_seconds()
        while len(said) < len(_HELLO):
            sock.settimeout(max(until - time.monotonic(), _AT_ONCE))
            received = sock.recv(len(_HELLO) - len(said))
            if not received:
                raise ConnectionRefusedError(f"no parameter server listens behind {address}")
            said += received
        if said != _HELLO:
            raise ConnectionRefusedError(f"{address} is not a parameter server of this version")
        stack.pop_all()
    return sock


def connect(address: str, *, limits: Limits | None = None) -> StreamConnection:
    """Calls to the `MpiServer` of `address`. Nothing is sent before the first one."""
    return StreamConnection(lambda: dial(address), address, limits=limits, way="mpi")
