"""Which machines were there while `benchmarks.goodput` injected faults. Pure.

A machine that is away computes nothing, nor does a worker that is frozen, whatever trains on them. What a
system makes of the faults can only be seen beside what was left to train with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple


class Span(NamedTuple):
    """A time, in seconds of one clock."""

    since: float
    until: float


class Presence:
    """When which workers were there.

    Args:
        missing: for each worker, when it was not there: spans in any order, which may overlap.
    """

    def __init__(self, missing: Sequence[Iterable[Span]]) -> None:
        self._missing = [merged(spans) for spans in missing]
        self.nobody = reduce(common, self._missing) if self._missing else []
        """When no worker was there, in the order of time."""

    def share(self, since: float, until: float) -> float:
        """How much of the time of all workers they were there, from 0 to 1; 1 of no time."""
        whole = len(self._missing) * (until - since)
        missing = sum(covered(spans, since, until) for spans in self._missing)
        return 1.0 - missing / whole if whole > 0 else 1.0

    def longest_without(self, until: float) -> float:
        """The longest time in which nobody was there, before a moment."""
        return max((min(span.until, until) - span.since for span in self.nobody), default=0.0)

    def seconds(self, since: float, until: float) -> float:
        """How long somebody was there."""
        return until - since - covered(self.nobody, since, until)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans in order, of which no two meet."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.since <= found[-1].until:
            found[-1] = Span(found[-1].since, max(found[-1].until, span.until))
        elif span.since < span.until:
            found.append(span)
    return found


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time that is in both."""
    both = [Span(max(a.since, b.since), min(a.until, b.until)) for a in some for b in others]
    return merged(span for span in both if span.since < span.until)


def covered(spans: Iterable[Span], since: float, until: float) -> float:
    """How many seconds of a time are in the spans, of which no two meet."""
    return sum(max(0.0, min(span.until, until) - max(span.since, since)) for span in spans)
