"""The transport between hosts for bodies: `transport.stream` over TCP.

A body is sent and received in place; only the kernel copies it. A server with gRPC at a port answers the same
calls on the next port, its *data port*. A client that cannot connect to that port, because of a firewall or a
Service, uses gRPC. The server sends a greeting that names its gRPC port, so that no other program is taken
for it.

A host that vanished without closing its connections is noticed after `GONE`. With credentials, both sides
first show a certificate and agree on keys (TLS 1.3, see `transport.sealed`); without, the server answers
everybody in plain text.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from datetime import timedelta
from typing import overload

from elastic_ps.errors import CannotListen
from elastic_ps.process.listening import listen_address
from elastic_ps.transport.base import STALL, Limits
from elastic_ps.transport.credentials import Credentials, UntrustedError
from elastic_ps.transport.sealed import SECRET, Sealed, begin, finish, hear
from elastic_ps.transport.stream import PROTOCOL, StreamConnection, StreamServer

BACKLOG = 512

CONNECT = timedelta(seconds=1)
"""How long a client waits for a data port before it takes the port for blocked."""

SPEAK = timedelta(seconds=5)
"""How long a client waits for the greeting at its chosen data port, since the server may be busy."""

PROBE = timedelta(seconds=10)
"""An idle connection is probed after this time."""

GONE = timedelta(seconds=30)
"""A host that does not acknowledge probes or data for this long is gone."""

_PROBES = 4

_HELLO = PROTOCOL + b" %05d\n"
"""The server's greeting: the port that its clients know."""


class SilentError(TimeoutError):
    """A data port has accepted a connection, but sends nothing."""


def split(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def data_address(address: str) -> str:
    """The address of the data port of the server whose gRPC port is at `address`."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


class TcpServer(StreamServer):
    """Listens on a TCP port. Thread-safe."""

    def __init__(
        self,
        bind: str,
        *,
        known: str = "",
        limits: Limits | None = None,
        stall: timedelta = STALL,
        credentials: Credentials | None = None,
    ) -> None:
        """Listen on `bind`, `host:port`; port 0 picks one; see `listen_address`.

        Args:
            known: the address that clients know, if this is its data port. Default: `bind`.
            limits: the limits for clients.
            stall: how long a client may send or take nothing in the middle of a frame.
            credentials: see `StreamServer`.

        Raises:
            CannotListen: the port is taken, or the host is not an address of this machine.
            UsageError: the credentials are not those of a server.
        """
        if credentials is not None:
            credentials.accepting()
        host, port = split(bind)
        address = listen_address(host)
        try:
            listener = socket.create_server(
                (address.host, port), family=address.family, backlog=BACKLOG, dualstack_ipv6=address.both
            )
        except (OSError, OverflowError) as error:
            raise CannotListen(f"cannot listen on {bind}: {error}") from error
        _, at, *_ = listener.getsockname()
        here = f"{'127.0.0.1' if address.everywhere else bind.rpartition(':')[0]}:{at}"
        _, number = split(known or here)
        super().__init__(
            listener,
            here,
            limits=limits,
            stall=stall,
            admit=_admit,
            hello=_HELLO % number,
            credentials=credentials,
        )


def _admit(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # the client has gone already
        _prepare(sock)
        return True
    return False


def _prepare(sock: socket.socket) -> None:
    """Send data without delay, and notice a host that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = int((GONE - PROBE).total_seconds()) // _PROBES
    for name, value in (
        ("TCP_KEEPIDLE", int(PROBE.total_seconds())),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", int(GONE.total_seconds() * 1000)),
    ):
        if option := getattr(socket, name, None):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


@overload
def dial(address: str, *, known: str = "", speaks: timedelta | None = None) -> socket.socket: ...
@overload
def dial(
    address: str, *, known: str = "", speaks: timedelta | None = None, credentials: Credentials | None
) -> socket.socket | Sealed: ...
def dial(
    address: str,
    *,
    known: str = "",
    speaks: timedelta | None = None,
    credentials: Credentials | None = None,
) -> socket.socket | Sealed:
    """A socket that is connected to the `TcpServer` at `address`, `host:port`.

    Blocks while the host's name is looked up, for at most `CONNECT` for each of its addresses, and for at
    most `speaks` until the server's greeting.

    Args:
        known: the address whose data port this must be. Default: any server will do, since a relay or a
            forwarded port has another number.
        speaks: default: `CONNECT`, with TLS `SPEAK`: handshakes take CPU time of a server to which hundreds
            may connect at once.
        credentials: for TLS; the data is encrypted then.

    Raises:
        SilentError: the server sends no greeting.
        UntrustedError: one side does not accept the other's certificate.
        OSError: nobody answers, or it is another server.
    """
    expected = _HELLO % split(known)[1] if known else _HELLO % 0
    with contextlib.ExitStack() as stack:
        sock = socket.create_connection(split(address), timeout=CONNECT.total_seconds())
        stack.callback(sock.close)
        _prepare(sock)
        limit = speaks or (CONNECT if credentials is None else SPEAK)
        until = time.monotonic() + limit.total_seconds()
        result: socket.socket | Sealed = sock
        try:
            if credentials is None:
                said = hear(sock, len(expected), until)
            else:
                encrypted = _secured(sock, address, credentials, limit)
                stack.callback(encrypted.close)
                mine = begin(encrypted)
                said, theirs = hear(encrypted, len(expected), until), hear(encrypted, SECRET, until)
                if len(theirs) < SECRET:
                    raise ConnectionRefusedError(f"{address} closed the connection")
                result = finish(encrypted, mine, theirs, until)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionRefusedError(f"{address} closed the connection") from error
        except ssl.SSLError as error:  # the other side checks our certificate after it has shown its own
            raise UntrustedError(f"{address} does not accept this process: {_reason(error)}") from error
        except TimeoutError:
            raise SilentError(f"{address} does not answer") from None
        if len(said) < len(expected):
            raise ConnectionRefusedError(f"{address} closed the connection")
        if said != expected and (known or not said.startswith(PROTOCOL)):
            raise ConnectionRefusedError(f"{address} is not the data port of {known or 'a parameter server'}")
        stack.pop_all()
    return result


def _secured(sock: socket.socket, address: str, credentials: Credentials, limit: timedelta) -> ssl.SSLSocket:
    """The socket with TLS, after the handshake. Takes ownership of `sock`. Raises OSError."""
    context, name = credentials.current().client, credentials.server_name
    encrypted = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    encrypted.settimeout(limit.total_seconds())
    try:
        encrypted.do_handshake()
    except TimeoutError:
        encrypted.close()
        raise SilentError(f"{address} does not answer") from None
    except ssl.SSLCertVerificationError as error:
        encrypted.close()
        raise UntrustedError(f"{address} is not a server of this job: {error.verify_message}") from error
    except ssl.SSLError as error:
        encrypted.close()
        raise UntrustedError(f"{address} and this process do not agree on TLS: {_reason(error)}") from error
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


def connect(
    address: str,
    *,
    known: str = "",
    limits: Limits | None = None,
    credentials: Credentials | None = None,
) -> StreamConnection:
    """Calls to the `TcpServer` at `address`. Nothing is sent before the first one."""
    return StreamConnection(
        lambda: dial(address, known=known, speaks=SPEAK, credentials=credentials), address, limits=limits
    )
