"""The transports that an address may name. Apart, so that the command line knows them and loads little."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["shm", "tcp", "grpc"]
"""See `transport.ways`."""
