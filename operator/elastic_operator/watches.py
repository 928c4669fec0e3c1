"""Whether the watches still deliver: a watcher may die, or hang, while the process lives.

A full listing now and then says which version each object has. A version that no watch has delivered for
too long means that the watch is dead. The clock is an argument; thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class WatchMonitor:
    """Compares what a watch has delivered with what listings say, for one kind of object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._late: dict[str, float] = {}

    def delivered(self, manifest: Mapping[str, Any], *, gone: bool) -> None:
        """The watch delivered this object, or that it is gone."""
        metadata = manifest["metadata"]
        with self._lock:
            self._late.pop(metadata["uid"], None)
            if gone:
                self._seen.pop(metadata["uid"], None)
            else:
                self._seen[metadata["uid"]] = metadata["resourceVersion"]

    def caught_up(self, versions: Mapping[str, str]) -> None:
        """The watch has begun where a listing had these versions, by uid."""
        with self._lock:
            self._seen |= versions
            for uid in versions:
                self._late.pop(uid, None)

    def listed(self, versions: Mapping[str, str], now: float) -> None:
        """A listing says that these versions, by uid, are all there are."""
        with self._lock:
            self._late = {uid: since for uid, since in self._late.items() if uid in versions}
            for uid, version in versions.items():
                if self._seen.get(uid) == version:
                    self._late.pop(uid, None)
                else:
                    self._late.setdefault(uid, now)

    def age(self, now: float) -> float:
        """Seconds since the oldest change that was listed and not delivered; 0 if there is none."""
        with self._lock:
            return max((now - since for since in self._late.values()), default=0.0)
