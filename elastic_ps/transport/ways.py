"""Chooses the transport for an address.

An address is `host:port`. The transport within this host is used if the server is there; else its data port
(`transport.tcp`), if that can be reached; else gRPC. A scheme before the address, as in `grpc:10.0.0.7:2222`,
names one of them, and no other is tried:

| scheme | transport |
| --- | --- |
| `shm` | within this host, with bodies in shared memory |
| `tcp` | a connection of our own; the port is the data port itself |
| `grpc` | gRPC |
| `mpi` | messages of MPI, between the ranks of an `mpirun` (`transport.mpi`) |
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import get_args

from elastic_ps.contract.schemes import Scheme
from elastic_ps.errors import CannotListen, ConnectionLost, UsageError
from elastic_ps.transport import local, mpi, tcp
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Limits, Server
from elastic_ps.transport.credentials import Credentials, UntrustedError

logger = logging.getLogger(__name__)

LOOK = 1.0
"""The seconds to wait for a port's answer whether somebody listens."""


def parse(address: str) -> tuple[str, str]:
    """The scheme of an address, "" if it has none, and `host:port`.

    Raises:
        UsageError: there is no such scheme, or the rest is not `host:port`.
    """
    scheme, _, place = address.partition(":")
    if place.count(":") == 0 or "[" in scheme:
        scheme, place = "", address
    host, _, port = place.rpartition(":")
    if scheme not in ("", *get_args(Scheme)) or not host or not port.isdigit() or int(port) > 65_535:
        raise UsageError(
            f"{address!r} is not an address. Expected host:port, or one of "
            f"{', '.join(get_args(Scheme))} before it, as in tcp:10.0.0.7:2222"
        )
    return scheme, place


_PICKS = 10
"""How many ports are tried where port 0 picks one: the port beside it has to be free, too."""


def listen(bind: str, *, credentials: Credentials | None = None) -> Server:
    """A server on `bind` with all transports, or with the one that its scheme names.

    An address of this host alone has no data port: all its clients can use the transport within the host.
    Port 0 picks one.

    Args:
        credentials: for TLS with clients that have a certificate of the job. Within the host, the socket
            accepts processes of the same user. None: the ports answer everybody.

    Raises:
        CannotListen: the port is taken, or the host is not an address of this machine.
        UsageError: see `parse`.
    """
    scheme, place = parse(bind)
    if (
        credentials is None
        and scheme not in ("shm", "mpi")
        and not local.is_loopback(place.rpartition(":")[0])
    ):
        logger.warning(
            "%s is unprotected: anyone who can reach it can read and change the model, because this process "
            "was started without a certificate (docs/guides/security.md)",
            place,
        )
    if scheme == "tcp":
        return tcp.TcpServer(place, credentials=credentials)
    if scheme == "shm":
        return local.LocalServer(place)
    if scheme == "mpi":
        return _beside_mpi(place)
    from elastic_ps.transport.grpc import GrpcServer  # slow to import, and not every process needs it

    if scheme == "grpc":
        return GrpcServer(place, credentials=credentials)
    if place.endswith(":0"):
        for picks_left in reversed(range(_PICKS)):
            server = GrpcServer(place, credentials=credentials)
            faster, left_out = _listen_faster(place, server.address, credentials)
            if not (left_out and picks_left):
                return _Everywhere(server, faster)
            _Everywhere(server, faster).close()  # the port beside it is taken
    # Before the port: a client that finds only the port would stay with gRPC.
    faster, _ = _listen_faster(place, place, credentials)
    try:
        server = GrpcServer(place, credentials=credentials)
    except BaseException:
        for each in faster:
            each.close()
        raise
    return _Everywhere(server, faster)


def _beside_mpi(place: str) -> Server:
    """A server for workers behind a rank, and with shared memory for other processes on this host."""
    near = local.LocalServer(place)
    try:
        return _Everywhere(near, [mpi.MpiServer(place)])
    except BaseException:
        near.close()
        raise


def _listen_faster(bind: str, address: str, credentials: Credentials | None) -> tuple[list[Server], bool]:
    """The servers of the faster transports that are possible, and whether one is not."""
    ways: list[Callable[[], Server]] = []
    if local.name_of(address):
        ways.append(lambda: local.LocalServer(address))
    host, _, _ = bind.rpartition(":")
    if not local.is_loopback(host):
        port = tcp.split(address)[1]  # in `bind` it may be 0
        data = tcp.data_address(f"{host}:{port}")
        ways.append(lambda: tcp.TcpServer(data, known=address, credentials=credentials))
    servers = []
    for way in ways:
        try:
            servers.append(way())
        except CannotListen as error:
            logger.warning("%s; gRPC is used instead, which is slower", error)
    return servers, len(servers) < len(ways)


class _Everywhere(Server):
    """Several servers as one, with the address of the first: gRPC's, and faster ones. Thread-safe."""

    def __init__(self, server: Server, faster: Sequence[Server]) -> None:
        self._server, self._faster = server, faster

    @property
    def address(self) -> str:
        return self._server.address

    def serve(self, handler: Handler) -> None:
        for each in (*self._faster, self._server):
            each.serve(handler)

    def close(self, grace: timedelta = timedelta(0)) -> None:
        closing = [threading.Thread(target=each.close, args=(grace,)) for each in self._faster]
        for thread in closing:
            thread.start()
        self._server.close(grace)
        for thread in closing:
            thread.join()


def connect(
    address: str, *, limits: Limits | None = None, credentials: Credentials | None = None
) -> Connection:
    """A connection to the server at `address`. Nothing is sent before the first call.

    Args:
        credentials: for TLS, except within the host, where the socket's user identifies the server.

    Raises:
        UsageError: see `parse`.
    """
    scheme, place = parse(address)
    return _make(scheme, place, limits, credentials) if scheme else _Fastest(place, limits, credentials)


def _make(scheme: str, place: str, limits: Limits | None, credentials: Credentials | None) -> Connection:
    if scheme == "shm":
        return local.connect(place, limits=limits)
    if scheme == "mpi":
        return mpi.connect(place, limits=limits)
    if scheme == "tcp":
        return tcp.connect(place, limits=limits, credentials=credentials)
    from elastic_ps.transport.grpc import GrpcConnection

    return GrpcConnection(place, limits=limits, credentials=credentials)


_Way = tuple[str, Callable[[], Connection]]
"""A scheme, and the function that makes a connection."""


class _Fastest(Connection):
    """Calls by the fastest possible transport, which is chosen again after the server was lost.

    Thread-safe.
    """

    def __init__(self, address: str, limits: Limits | None, credentials: Credentials | None) -> None:
        self._address, self._limits, self._credentials = address, limits or Limits(), credentials
        self._lock = threading.Lock()
        self._made: dict[str, Connection] = {}
        self._way: Connection | None = None
        self._closed = False

    @property
    def near(self) -> bool:
        """See `Connection.near`; False until a transport has been chosen."""
        way = self._way
        return way is not None and way.near

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """See `Connection.call`."""
        way = self._way
        if way is None:
            began = time.monotonic()
            way = self._find(method)
            timeout -= timedelta(seconds=time.monotonic() - began)
        try:
            return _Watched(way.call(method, frame, timeout=timeout), partial(self._forget, way))
        except ConnectionLost:
            self._forget(way)
            raise

    def _find(self, method: str) -> Connection:
        """Choose a transport. Threads do so independently, so neither they nor `close` wait."""
        scheme, make = self._near() or self._far(method)
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{method} at {self._address}: the connection was closed")
            if self._way is None:
                if scheme not in self._made:
                    self._made[scheme] = make()
                self._way = self._made[scheme]
            return self._way

    def _forget(self, way: Connection) -> None:
        """Forget a transport whose server was lost. Other calls may still be under way on it."""
        with self._lock:
            if self._way is way:
                self._way = None

    def _near(self) -> _Way | None:
        try:
            local.dial(self._address).close()
            return "shm", partial(local.connect, self._address, limits=self._limits)
        except PermissionError as error:
            logger.warning("%s; another transport is used instead, which is slower", error)
        except OSError:
            pass
        return None

    def _far(self, method: str) -> _Way:
        """The data port, or gRPC. A server that is not up yet may still get a faster transport later."""
        try:
            socket.create_connection(tcp.split(self._address), timeout=LOOK).close()
        except OSError as error:
            raise ConnectionLost(f"{method} at {self._address}: nobody serves there ({error})") from error
        data = tcp.data_address(self._address)
        try:
            speaks = self._limits.speaks
            tcp.dial(data, known=self._address, speaks=speaks, credentials=self._credentials).close()
        except OSError as error:
            if isinstance(error, tcp.SilentError) and "tcp" in self._made:
                # It has answered before, so the server stalls, and gRPC would stall, too.
                raise ConnectionLost(f"{method} at {self._address}: {error}") from error
            return "grpc", partial(self._over_grpc, error)
        way = partial(tcp.connect, data, known=self._address, limits=self._limits)
        return "tcp", partial(way, credentials=self._credentials)

    def _over_grpc(self, because: OSError) -> Connection:
        text = "%s is reached over gRPC, because its data port cannot be used: %s"
        level = logging.WARNING if isinstance(because, UntrustedError) else logging.INFO
        logger.log(level, text, self._address, because)
        return _make("grpc", self._address, self._limits, self._credentials)

    def close(self) -> None:
        """See `Connection.close`."""
        with self._lock:
            self._closed = True
            made = list(self._made.values())
        for each in made:
            each.close()


class _Watched(Iterator[Incoming]):
    """The answers to a call, which report the loss of the server.

    It is not a generator, which would close the answers when dropped, even in a forked child that may not.
    """

    def __init__(self, answers: Iterator[Incoming], lost: Callable[[], None]) -> None:
        self._answers, self._lost = answers, lost

    def __next__(self) -> Incoming:
        try:
            return next(self._answers)
        except ConnectionLost:
            self._lost()
            raise

    def close(self) -> None:
        """Cancel the call."""
        self._answers.close()  # type: ignore[attr-defined]  # as those of every transport
