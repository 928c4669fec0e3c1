"""The transports that an address may name. Apart, so that the command line knows them and loads little."""

from __future__ import annotations

from typing import Literal, get_args

Scheme = Literal["shm", "tcp", "grpc", "mpi"]
"""See `transport.ways`."""

WITHOUT_RANKS: tuple[Scheme, ...] = tuple(scheme for scheme in get_args(Scheme) if scheme != "mpi")
"""Those that need no `mpirun`."""
