"""Addresses of loopback for processes that a test starts, which listen on them some time later."""

from __future__ import annotations

import random
import socket

from elastic_ps.errors import CannotListen
from elastic_ps.local.processes import free_addresses

PORTS = range(20_000, 29_000, 2)
"""Launchers, outgoing connections and the test cluster have others. The odd ones are for data ports."""

_locks: list[socket.socket] = []


def addresses(count: int) -> list[str]:
    """That many `host:port` on which nobody listens, and which no other test gets before this process ends.

    The name of a Unix socket is the lock: one process of this host may have it at a time.
    """
    found: list[str] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0elastic-ps-tests-{port}")
            found += free_addresses(1, range(port, port + 1))
        except (OSError, CannotListen):
            lock.close()
        else:
            _locks.append(lock)
    return found
