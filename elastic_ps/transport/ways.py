"""Which transport leads to an address: the one within this host if it is there, gRPC otherwise."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

from elastic_ps.errors import CannotListen, ConnectionLost
from elastic_ps.transport import local
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Limits, Server

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds until a port of this host has answered that somebody listens, or that nobody does."""


def listen(bind: str) -> Server:
    """A server on `bind`, `host:port`, that clients reach in every way there is. Port 0 picks one.

    Raises:
        CannotListen: the port is taken, or the host is not an address of this machine.
    """
    from elastic_ps.transport.grpc import GrpcServer  # takes long to import, and not every process needs it

    # Before the port, if it is known: a client that finds the port alone would use it for good.
    near = None if bind.endswith(":0") else _listen_near(bind)
    try:
        remote = GrpcServer(bind)
    except BaseException:
        if near is not None:
            near.close()
        raise
    near = near or _listen_near(remote.address)
    return _Everywhere(remote, near) if near is not None else remote


def _listen_near(address: str) -> Server | None:
    try:
        return local.LocalServer(address)
    except CannotListen as error:
        logger.info("%s; everybody is served over TCP", error)
        return None


class _Everywhere(Server):
    """Two servers as one. Thread-safe."""

    def __init__(self, remote: Server, near: Server) -> None:
        self._remote, self._near = remote, near

    @property
    def address(self) -> str:
        return self._remote.address

    def serve(self, handler: Handler) -> None:
        self._near.serve(handler)
        self._remote.serve(handler)

    def close(self, grace: timedelta = timedelta(0)) -> None:
        near = threading.Thread(target=self._near.close, args=(grace,), name="close local")
        near.start()
        self._remote.close(grace)
        near.join()


def connect(address: str, *, limits: Limits | None = None) -> Connection:
    """A connection to the server at `address`, `host:port`. Nothing is sent before the first call."""
    return _Nearest(address, limits) if local.name_of(address) else _grpc(address, limits)


def _grpc(address: str, limits: Limits | None) -> Connection:
    from elastic_ps.transport.grpc import GrpcConnection

    return GrpcConnection(address, limits=limits)


class _Nearest(Connection):
    """Calls to a server of this host; the way that leads there first is kept. Thread-safe."""

    def __init__(self, address: str, limits: Limits | None) -> None:
        self._address, self._limits = address, limits
        self._lock = threading.Lock()
        self._way: Connection | None = None
        self._closed = False

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """See `Connection.call`."""
        return (self._way or self._find(method)).call(method, frame, timeout=timeout)

    def _find(self, method: str) -> Connection:
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{method} at {self._address}: the connection was closed")
            if self._way is None:
                self._way = self._near() or self._far(method)
            return self._way

    def _near(self) -> Connection | None:
        with contextlib.suppress(OSError):
            local.dial(self._address).close()
            return local.connect(self._address, limits=self._limits)
        return None

    def _far(self, method: str) -> Connection:
        """gRPC, if anybody listens; a server that is not up yet may still be found within this host."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK).close()
        except OSError as error:
            raise ConnectionLost(f"{method} at {self._address}: nobody serves there ({error})") from error
        return _grpc(self._address, self._limits)

    def close(self) -> None:
        """See `Connection.close`."""
        with self._lock:
            self._closed = True
            way = self._way
        if way is not None:
            way.close()
