"""The queue of jobs that wait for a pass. A job has one pass at a time, and waits at most once."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias

logger = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, str]
"""(namespace, name) of a job."""

Pass: TypeAlias = Callable[[Key], Awaitable[timedelta | None]]
"""One pass over a job. Returns when to look again. After an exception it is repeated."""

_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0


class Queue:
    """Runs passes, taking namespaces in turn. For one event loop only."""

    def __init__(self, run: Pass, *, concurrency: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = run
        self._concurrency = concurrency
        self._due: dict[Key, float] = {}
        self._later: list[tuple[float, Key]] = []
        self._ready: dict[str, dict[Key, None]] = {}
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.last_turn = self._clock()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, after: timedelta = timedelta(0)) -> None:
        """Ask for a pass over `key` no later than `after` from now."""
        due = self._clock() + after.total_seconds()
        if key not in self._due or due < self._due[key]:
            self._due[key] = due
            heapq.heappush(self._later, (due, key))
            self._wake.set()

    async def run(self) -> None:
        """Run passes until cancelled, then wait for those that have begun."""
        try:
            while True:
                self.last_turn = now = self._clock()
                self._start_due(now)
                wait = self._later[0][0] - now if self._later else 5.0
                self._wake.clear()
                # Before Python 3.12, `wait_for` may swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(5.0, max(0.0, wait))):
                        await self._wake.wait()
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _start_due(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            due, key = heapq.heappop(self._later)
            # A busy job becomes ready when its pass is over.
            if self._due.get(key) == due and key not in self._busy:
                self._ready.setdefault(key[0], {})[key] = None
        while self._ready and len(self._busy) < self._concurrency:
            # This namespace goes to the end, so that one with many jobs delays no other.
            namespace = next(iter(self._ready))
            waiting = self._ready.pop(namespace)
            key = next(iter(waiting))
            del waiting[key], self._due[key]
            if waiting:
                self._ready[namespace] = waiting
            self._busy.add(key)
            task = asyncio.create_task(self._serve(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, key: Key) -> None:
        try:
            again = await self._run(key)
            self._failures.pop(key, None)
        except Exception as error:  # no error of a pass may end the queue
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again = timedelta(seconds=min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(count - 1, 10)))
            logger.warning(
                "%s/%s: the pass failed; trying again in %g s: %s",
                *key,
                again.total_seconds(),
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        self._busy.discard(key)
        if key in self._due:
            heapq.heappush(self._later, (self._due[key], key))
        if again is not None:
            self.add(key, again)
        self._wake.set()
