"""A connection that a test watches: it may note a call, delay it or its answer, or have it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from elastic_ps.transport.base import Connection, Frame, Incoming

Look = Callable[[str, Frame], object]
"""What is told of a call; what it raises is raised to the caller."""


def _nothing(method: str, frame: Frame) -> None:
    pass


class Watched(Connection):
    """Calls `before` before each call, and `after` when it is answered, before the caller has all of that.

    `answer` is called with the header of each part of an answer, before the caller has it.
    """

    def __init__(
        self,
        inner: Connection,
        before: Look = _nothing,
        *,
        answer: Callable[[str, bytes], object] = lambda *_: None,
        after: Look = _nothing,
    ) -> None:
        self._inner, self._before, self._answer, self._after = inner, before, answer, after

    @property
    def near(self) -> bool:
        return self._inner.near

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self._before(method, frame)
        answers = self._inner.call(method, frame, timeout=timeout)
        return self._answered(answers, method, frame)

    def _answered(self, answers: Iterator[Incoming], method: str, frame: Frame) -> Iterator[Incoming]:
        for incoming in answers:
            self._answer(method, incoming.header)
            yield incoming
        self._after(method, frame)

    def close(self) -> None:
        self._inner.close()
