"""Measures how long steps are being encoded and pushed, so that `auto` can choose a codec by it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ps.codec.auto import CANDIDATES, Auto
from elastic_ps.core.choice import Choice
from elastic_ps.worker.traffic import Traffic

logger = logging.getLogger(__name__)


class Tuner:
    """Chooses for one worker. Thread-safe, but for `begin` and `end`, which belong to the main thread.

    Args:
        auto: the codec that is told what is chosen; None: nothing is chosen.
        traffic: is told what is measured and chosen.
    """

    def __init__(self, auto: Auto | None, traffic: Traffic) -> None:
        self._traffic = traffic
        self._auto = auto
        self._choice = Choice(tuple(CANDIDATES), auto.max_error) if auto is not None else None
        self._lock = threading.Lock()
        self._busy, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def active(self) -> bool:
        """Whether it chooses."""
        return self._auto is not None

    def begin(self) -> None:
        """A step begins."""
        if self._auto is None or self._choice is None:
            return
        with self._lock:
            self._seconds, self._since = 0.0, time.monotonic()
        self._auto.begin(self._choice.now)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block encodes and pushes a bucket."""
        with self._lock:
            self._busy += 1
            if self._busy == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy:
                    seconds = time.monotonic() - self._since
                    self._seconds += seconds
                    self._traffic.busy(seconds)

    def end(self) -> None:
        """The step that has begun is in the model."""
        if self._auto is None or self._choice is None or not self._seconds:
            return
        before = self._choice.present
        self._choice.note(self._seconds, self._auto.error)
        self._seconds = 0.0
        self._traffic.chose(self._choice.present)
        if self._choice.present != before:
            logger.info("gradients are sent as %s from now on: %s", self._choice.present, self._choice.reason)
