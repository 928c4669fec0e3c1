"""Threads that are late, as on a busy machine: each sleeps by chance where threads, calls and histories meet.

A delay is no defect: a test that fails under it has a race, or has found a bug. A thread draws anew for each
test how often it is late, so one worker of a job may be much slower than another. What a test polls for it
may see late. `ELASTIC_PS_JITTER=seed` turns it on, for what runs in the tests' process and in its forks. A
seed does not repeat an order of threads.
"""

from __future__ import annotations

import functools
import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic_ps.process.telemetry import History
from elastic_ps.transport.base import Connection
from tests.testing import polling

RATES = (0.0, 0.002, 0.02)
"""How often a thread is late, one of these."""

LATE = 0.5
"""Seconds, at most, but for one in fifty delays."""

STOPPED = 1.5
"""Seconds of such a delay."""

POLLS = (0.01, 0.01, 1.0)
"""Seconds between two looks of a test, one of these."""

_sleep = time.sleep  # some tests have a clock of their own


class Jitter:
    """Delays for the tests of this process from now on."""

    def __init__(self, seed: str) -> None:
        self._seed, self._test = seed, ""
        self._threads, self._here = itertools.count(), threading.local()
        sys.setswitchinterval(1e-4)
        places: tuple[tuple[type, str], ...] = (
            (threading.Thread, "run"),
            (threading.Event, "set"),
            (threading.Event, "wait"),
            (threading.Condition, "__enter__"),
            (queue.Queue, "get"),
            (queue.Queue, "put"),
            (ThreadPoolExecutor, "submit"),
            (History, "record"),
        )
        for owner, name in places:
            self._delay(owner, name)

    def pytest_collection_finish(self) -> None:
        """All transports are imported."""
        kinds = [Connection]
        for kind in kinds:
            kinds += kind.__subclasses__()
            if "call" in vars(kind):
                self._delay(kind, "call")

    def pytest_report_header(self) -> str:
        return f"jitter: ELASTIC_PS_JITTER={self._seed}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test, self._threads = item.nodeid, itertools.count()
        polling.PAUSE = random.Random(f"{self._seed} {self._test}").choice(POLLS)

    def _delay(self, owner: type, name: str) -> None:
        usual: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(usual)
        def late(*arguments: Any, **options: Any) -> Any:
            self._pause()
            result = usual(*arguments, **options)
            self._pause()
            return result

        setattr(owner, name, late)

    def _pause(self) -> None:
        here = self._here
        if getattr(here, "test", None) != self._test:
            here.test, here.draws = (
                self._test,
                random.Random(f"{self._seed} {self._test} {next(self._threads)}"),
            )
            here.rate = here.draws.choice(RATES)
        if here.draws.random() < here.rate:
            _sleep(STOPPED if here.draws.random() < 0.02 else LATE * here.draws.random() ** 2)
