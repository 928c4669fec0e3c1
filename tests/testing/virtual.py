"""An event loop whose time passes only when nothing is left to do now, and then at once.

It is for code that waits, but for no other thread or process: what happens when is then exactly known.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """`now` is in seconds."""

    now = 0.0

    def monotonic(self) -> float:
        """In the place of `time.monotonic`."""
        return self.now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run it to its end in a loop with this clock."""
        loop = asyncio.SelectorEventLoop(_Selector(self))
        loop.time = self.monotonic  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)


class _Selector(selectors.SelectSelector):
    """Nobody writes to the loop's sockets, so that a wait is over when its time is."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for ever"
        self._clock.now += max(0.0, timeout)
        return []
