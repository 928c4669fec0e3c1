"""Waiting in tests: poll until something is so, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT = 120.0
"""Seconds that anything in a test may take; it only ends a test that has failed."""

PAUSE = 0.02
"""Seconds between two looks. Many tests wait at once, and each look takes the processor from others."""

LOOK = 3.0
"""Seconds, at least, between two looks at whether anything moves: a job computes a status for each."""

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, within: float = LIMIT) -> T:
    """The first true value of `condition`; fails the test, saying `what`, if there is none in time (s)."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(PAUSE)
    return value


def while_moving(
    condition: Callable[[], T | None], moving: Callable[[], object], what: str, still: float = LIMIT
) -> T:
    """The first true value of `condition`, however long it takes, as long as something moves.

    Fails the test, saying `what` and how it stands, when `moving` has returned equal values for `still`
    seconds. For work whose time depends on how busy the machine is.
    """
    began = since = looked = time.monotonic()
    seen = moving()
    while not (value := condition()):
        now = time.monotonic()
        if now - looked > LOOK:
            looked, state = now, moving()
            if state != seen:
                seen, since = state, now
            assert now - since < still, (
                f"{what}: nothing has moved for {still:g} s, {now - began:.0f} s after the start: {seen}"
            )
        time.sleep(PAUSE)
    return value
