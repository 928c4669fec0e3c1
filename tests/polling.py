"""Waiting in tests: poll until something is so, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT = 60.0
"""Seconds that anything in a test may take; it only ends a test that has failed."""

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, within: float = LIMIT) -> T:
    """The first true value of `condition`; fails the test, saying `what`, if there is none in time (s)."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.01)
    return value
