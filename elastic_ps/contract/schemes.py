"""The transports that an address may name. The command line imports this module, so it loads little."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["shm", "tcp", "grpc", "mpi"]
"""The transports, which `transport.ways` explains."""


def is_loopback(host: str) -> bool:
    """Whether an address, IPv6 in brackets, belongs to this host alone."""
    return host in ("localhost", "[::1]") or host.startswith("127.")


def name_of(address: str) -> str | None:
    """The local socket of the server at `address`, `host:port`; None if it may be on another host."""
    host, _, port = address.rpartition(":")
    if host in ("", "0.0.0.0", "[::]", "localhost"):
        host = "127.0.0.1"
    return f"\0elastic-ps {host}:{port}" if is_loopback(host) else None
