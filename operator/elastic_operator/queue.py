"""Which jobs wait for a pass, and when: each at most once, never two passes over one job at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, str]
"""(namespace, name) of a job."""

Pass: TypeAlias = Callable[[Key], timedelta | None]
"""One pass over a job; blocking. Returns when to look again. What it raises leads to another try."""

_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0


class Queue:
    """Runs passes in threads. To be used from one event loop only."""

    def __init__(self, run: Pass, *, concurrency: int) -> None:
        self._run = run
        self._concurrency = concurrency
        self._due: dict[Key, float] = {}
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.last_turn = time.monotonic()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, after: timedelta = timedelta(0)) -> None:
        """Ask for a pass over `key` no later than `after` from now."""
        due = time.monotonic() + after.total_seconds()
        self._due[key] = min(due, self._due.get(key, due))
        self._wake.set()

    async def run(self) -> None:
        """Serve until cancelled; passes that have begun are waited for."""
        try:
            while True:
                self.last_turn = now = time.monotonic()
                self._start_due(now)
                ready = [due for key, due in self._due.items() if key not in self._busy]
                wait = 5.0 if not ready or len(self._busy) >= self._concurrency else min(ready) - now
                self._wake.clear()
                # Not `wait_for`: before Python 3.12 it may swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(5.0, max(0.0, wait))):
                        await self._wake.wait()
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _start_due(self, now: float) -> None:
        for key, due in sorted(self._due.items(), key=lambda item: item[1]):
            if due > now or len(self._busy) >= self._concurrency:
                return
            if key in self._busy:
                continue
            del self._due[key]
            self._busy.add(key)
            task = asyncio.create_task(self._serve(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, key: Key) -> None:
        try:
            again = await asyncio.to_thread(self._run, key)
            self._failures.pop(key, None)
        except Exception as error:  # whatever it is, it must not end the queue
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again = timedelta(seconds=min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(count - 1, 10)))
            logger.warning(
                "%s/%s: the pass failed, next try in %g s: %s",
                *key,
                again.total_seconds(),
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        self._busy.discard(key)
        if again is not None:
            self.add(key, again)
        self._wake.set()
