"""Limits the share of a server's resources that one client may hold.

A client is identified by its network address, since its own claims are checked much later.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter

SHARE = 4
"""The resource is divided by this to get the share of one address."""

PART = 4
"""The process's file descriptors are divided by this to get the share of one transport. The others, which are
used if one is full, and checkpoints also need some."""


def descriptors_for(most: int) -> int:
    """The number of connections of a transport: `most`, or fewer if this process lacks descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if descriptors == resource.RLIM_INFINITY else min(most, descriptors // PART)


class Shares:
    """Counts the parts of `total` that each client holds. Each may hold at least `least`. Thread-safe."""

    def __init__(self, total: int, least: int) -> None:
        self._most = max(least, total // SHARE)
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, client: str) -> bool:
        """Count one more for the client; False, without counting it, if the client has its share already."""
        with self._lock:
            if self._held[client] >= self._most:
                return False
            self._held[client] += 1
            return True

    def give_back(self, client: str) -> None:
        """Count one less for the client."""
        with self._lock:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
