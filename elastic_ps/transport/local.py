"""The transport within a host: `transport.stream` over Unix sockets, with bodies in shared memory.

A server that listens on a TCP port of this host also listens here, under a name derived from its address. So
no configuration is needed: a client of an address on this host tries here first. The name is in Linux's
abstract namespace: it leaves nothing in the file system, and belongs to the network namespace, like the port.
Processes of other users are refused.
"""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta

from elastic_ps.contract.schemes import is_loopback as is_loopback
from elastic_ps.contract.schemes import name_of as name_of
from elastic_ps.errors import CannotListen
from elastic_ps.transport.base import STALL, Limits
from elastic_ps.transport.stream import StreamConnection, StreamServer

_CREDENTIALS = struct.Struct("iII")  # process, user, group

_TIMEVAL = struct.Struct("ll")  # seconds, microseconds

BACKLOG = 512

CONNECT = timedelta(seconds=5)
"""How long a client waits for a server whose backlog is full."""


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this user, or of root."""
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user in (os.geteuid(), 0)


class LocalServer(StreamServer):
    """Listens for processes of this host and user. Thread-safe."""

    def __init__(self, address: str, *, limits: Limits | None = None, stall: timedelta = STALL) -> None:
        """Listen for `address`, `host:port`.

        Raises:
            CannotListen: another process does, or this system has no such sockets.
        """
        name = name_of(address)
        if name is None:
            raise CannotListen(f"{address} is not a loopback address, and shm works only within one host")
        super().__init__(listening(name, address), address, limits=limits, stall=stall, admit=same_user)


def listening(name: str, address: str) -> socket.socket:
    """A Unix socket that listens under a name, for the server at `address`. Raises CannotListen."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise CannotListen(f"cannot listen on this host for {address}: {error}") from error
    return listener


def dial(address: str) -> socket.socket:
    """A socket that is connected to the `LocalServer` of `address`.

    Raises:
        OSError: there is no such server, or it belongs to another user.
    """
    name = name_of(address)
    if name is None:
        raise ConnectionRefusedError(
            f"{address} is not a loopback address, and shm works only within one host"
        )
    return connected(name, address)


def connected(name: str, address: str, *, blocking: bool = True) -> socket.socket:
    """A socket that is connected to the one that listens under a name, for the server at `address`.

    Blocks for at most `CONNECT` while its backlog is full. If not `blocking`, a full backlog is an error, and
    the socket does not block later either. Raises OSError like `dial`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(blocking)
        if blocking:  # `settimeout` would not wait for room in the backlog
            limit = _TIMEVAL.pack(int(CONNECT.total_seconds()), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(name)
        if not same_user(sock):
            raise PermissionError(f"the server of {address} on this host belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def connect(address: str, *, limits: Limits | None = None) -> StreamConnection:
    """Calls to the `LocalServer` of `address`. Nothing is sent before the first one."""
    return StreamConnection(lambda: dial(address), address, limits=limits, near=True)
