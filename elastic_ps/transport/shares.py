"""How much of what all clients of a server need may be held by one of them, so that none takes all of it.

A client is told by its network address: what it says of itself is checked much later, by whom it calls.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter

SHARE = 4
"""One address may hold one of so many parts."""

PART = 4
"""One way to a server has one of so many of the process's descriptors at most. Others need some: the other
ways, which are used instead where one is full, and checkpoints."""


def descriptors_for(most: int) -> int:
    """How many connections one way may have: `most`, or as many as this process has descriptors for."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if descriptors == resource.RLIM_INFINITY else min(most, descriptors // PART)


class Shares:
    """Counts what each client holds of `total`; each may hold `least` in any case. Thread-safe."""

    def __init__(self, total: int, least: int) -> None:
        self._most = max(least, total // SHARE)
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, client: str) -> bool:
        """Count one more for the client; False, without counting it, if it holds its share already."""
        with self._lock:
            if self._held[client] >= self._most:
                return False
            self._held[client] += 1
            return True

    def give_back(self, client: str) -> None:
        """The client holds one less."""
        with self._lock:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
