"""The transports that an address may name. Apart, so that the command line knows them and loads little."""

from __future__ import annotations

from typing import Literal, get_args

Scheme = Literal["shm", "tcp", "grpc", "mpi"]
"""See `transport.ways`."""

WITHOUT_RANKS: tuple[Scheme, ...] = tuple(scheme for scheme in get_args(Scheme) if scheme != "mpi")
"""Those that need no `mpirun`."""


def is_loopback(host: str) -> bool:
    """Whether only this host has that address; IPv6 in brackets."""
    return host in ("localhost", "[::1]") or host.startswith("127.")


def name_of(address: str) -> str | None:
    """The socket of the server that listens on `address`, `host:port`; None if that may be another host."""
    host, _, port = address.rpartition(":")
    if host in ("", "0.0.0.0", "[::]", "localhost"):
        host = "127.0.0.1"
    return f"\0elastic-ps {host}:{port}" if is_loopback(host) else None
