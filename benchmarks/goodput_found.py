"""What `benchmarks.goodput` finds out about a system, and how it is told. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

from benchmarks.goodput_systems import Kind
from benchmarks.goodput_there import Presence, Span


class Fault(NamedTuple):
    """What happens to a worker, or to the parameter server, at some seconds from the beginning."""

    at: float
    kind: Kind
    worker: int
    lasting: float


class Mark(NamedTuple):
    """How many samples counted at some moment, when a fault struck; the last one has none."""

    fault: Fault | None
    at: float
    samples: int


class Between(NamedTuple):
    """What came of a fault until the next one.

    Attributes:
        seconds: until the next one.
        samples: how many came to count in these.
        there: how much of that time the workers were there, from 0 to 1.
    """

    kind: Kind
    seconds: float
    samples: int
    there: float = 1.0


class Measured(NamedTuple):
    """What became of one system.

    Attributes:
        rate: samples that count per second.
        seconds: for how long it was measured; fewer than asked for if that was interrupted.
        struck: how many faults found somebody to strike.
        between: what came of each of these.
        audit: what is to be said of the records.
        standstill: the longest time, in seconds, in which no sample came to count.
        there: how much of the time of all workers they were there, from 0 to 1.
        nobody: the longest time, in seconds, in which no worker was there.
        stalled: the longest standstill, of which only the time counts in which a worker was there.
    """

    rate: float
    seconds: float
    struck: int
    between: Sequence[Between]
    audit: str
    standstill: float = 0.0
    there: float = 1.0
    nobody: float = 0.0
    stalled: float = 0.0


def measured(
    seen: Sequence[tuple[float, int]], marks: Sequence[Mark], audit: str, *, workers: int, gone: float
) -> Measured:
    """What became of a system.

    Args:
        seen: moments, from the beginning to the end, and how many samples counted then.
        marks: the faults that struck; the last one is the end.
        gone: seconds that the machine of a worker which is killed is away.
    """
    (began, first), (end, last) = seen[0], seen[-1]
    there = presence(marks, workers, gone)
    between = [
        Between(
            mark.fault.kind, after.at - mark.at, after.samples - mark.samples, there.share(mark.at, after.at)
        )
        for mark, after in pairwise(marks)
        if mark.fault is not None
    ]
    return Measured(
        rate=(last - first) / (end - began),
        seconds=end - began,
        struck=len(between),
        between=between,
        audit=audit,
        standstill=standstill(seen),
        there=there.share(began, end),
        nobody=there.longest_without(end),
        stalled=standstill(seen, there),
    )


def presence(marks: Iterable[Mark], workers: int, gone: float) -> Presence:
    """Which workers were there, of what struck them.

    A worker that is killed is away for `gone` seconds, and is not frozen afterwards. A slow one is there.
    """
    missing: list[list[Span]] = [[] for _ in range(workers)]
    for fault, at, _ in marks:
        if fault is None or fault.kind not in ("kill", "freeze"):
            continue
        spans = missing[fault.worker]
        if fault.kind == "freeze":
            spans.append(Span(at, at + fault.lasting))
        else:
            spans[:] = [span._replace(until=min(span.until, at)) for span in spans]
            spans.append(Span(at, at + gone))
    return Presence(missing)


def standstill(seen: Sequence[tuple[float, int]], there: Presence | None = None) -> float:
    """The longest time in which no sample came to count, of moments and how many counted then.

    What is trained again, after the model has gone back, counts once there are more samples than ever.
    With `there`, only the time counts in which a worker was there.
    """
    longest, since, most = 0.0, seen[0][0], seen[0][1]
    for at, samples in seen:
        longest = max(longest, at - since if there is None else there.seconds(since, at))
        if samples > most:
            since, most = at, samples
    return longest


def costs(quiet: Measured, disturbed: Measured, *, beside_absence: bool = False) -> dict[Kind, float]:
    """How many seconds of undisturbed training a fault of each kind has cost, on average.

    What one fault costs after the next one has struck is put down to that one.

    Args:
        beside_absence: leave out what the workers that were not there would have done. It may be below zero,
            since those that are left have the processor to themselves.
    """
    lost: dict[Kind, list[float]] = defaultdict(list)
    for kind, seconds, samples, there in disturbed.between:
        lost[kind].append(seconds * (there if beside_absence else 1.0) - samples / max(quiet.rate, 1e-9))
    return {kind: sum(lost[kind]) / len(lost[kind]) for kind in get_args(Kind) if kind in lost}


def rival(found: Mapping[str, tuple[Measured, Measured]]) -> float | None:
    """The rate with faults of the faster torchrun; None if none was measured."""
    theirs = [disturbed.rate for name, (_, disturbed) in found.items() if name.startswith("torchrun")]
    return max(theirs, default=None)


def rows(name: str, quiet: Measured, disturbed: Measured, torchrun: float | None) -> str:
    """What was measured of a system, in a line; and in others what its faults have cost, if it had any."""
    share = disturbed.rate / max(quiet.rate, 1e-9)
    ratio = "" if torchrun is None else f"{disturbed.rate / max(torchrun, 1e-9):.2f}"
    line = (
        f"{name:20} {quiet.rate:11.0f} {disturbed.rate:12.0f} {share:6.2f} "
        f"{ratio:>12} {disturbed.struck:7}  {disturbed.audit}"
    )
    if not disturbed.between:
        return line
    each = ", ".join(
        f"{kind} {seconds:.1f} s ({beside:.1f} s)"
        for (kind, seconds), beside in zip(
            costs(quiet, disturbed).items(),
            costs(quiet, disturbed, beside_absence=True).values(),
            strict=True,
        )
    )
    longest = f"the longest standstill: {disturbed.standstill:.1f} s ({disturbed.stalled:.1f} s)"
    there = (
        f"workers were there for {disturbed.there:.2f} of the time, and did "
        f"{share / max(disturbed.there, 1e-9):.2f} of what they can in it; "
        f"nobody was there for up to {disturbed.nobody:.1f} s"
    )
    return f"{line}\n{'':20} a fault has cost: {each}; {longest}\n{'':20} {there}"
