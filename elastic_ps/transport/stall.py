"""Cuts off clients that stall in the middle of a frame, since they hold buffers and threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

SLOWEST = 16 * 1024
"""Bytes a second. A client that is slower for longer than it may be silent is cut off, too."""


class Watchdog:
    """Ends waits that take longer than `limit`, in a thread of its own. Thread-safe."""

    def __init__(self, limit: timedelta) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, cut_off: Callable[[], object]) -> Iterator[None]:
        """Watch a wait in the block. If it takes too long, `cut_off` is called once; it must not block."""
        number, until = next(self._numbers), time.monotonic() + self.limit.total_seconds()
        with self._lock:
            self._waits[number] = until, cut_off
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(number, None)

    def _run(self) -> None:
        while not self._closing.wait(self.limit.total_seconds() / 4):
            now = time.monotonic()
            with self._lock:
                overdue = [number for number, (until, _) in self._waits.items() if until < now]
                cut_off = [self._waits.pop(number)[1] for number in overdue]
            for cut in cut_off:
                cut()

    def close(self) -> None:
        """End the thread. Blocks for a moment."""
        self._closing.set()
        self._thread.join()
