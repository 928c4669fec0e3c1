"""Decides which deaths of processes on one machine count against `runPolicy.backoffLimit`. Pure.

A process that is killed from outside (by preemption, a drained node or a person) never counts. A script that
fails by itself does. A crash (a segmentation fault, a lack of memory) may be the machine's fault once. It
counts if the previous process died in the same way, and this one had done nothing.

On a cluster, disruptions are marked, and everything else counts (`elastic_operator.failures`).
"""

from __future__ import annotations

import signal
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from elastic_ps.contract import exits

Kind: TypeAlias = Literal["failed", "crashed", "killed"]
"""`failed`: the program reports a failure. `killed`: from outside. `crashed`: neither is known."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that come from outside. The kernel sends SIGKILL for lack of memory, too: that is a crash."""


@dataclass(frozen=True)
class Death:
    """The unexpected end of a process.

    Attributes:
        kind: see `Kind`.
        cause: the cause in words. Deaths with the same cause are alike.
        useful: whether it had done anything for the job: a step in the model, values served. None if
            that is not known.
    """

    kind: Kind
    cause: str
    useful: bool | None


def kind_of(status: int) -> Kind:
    """The kind of an exit status other than 0. For a signal N, it is -N or 128 + N."""
    number = _signal(status)
    if number in _FROM_OUTSIDE or status in (exits.FENCED, exits.LEFT, exits.LOST, exits.SILENT):
        return "killed"
    return "failed" if status > 0 and number is None else "crashed"


def is_sigkill(status: int) -> bool:
    """Whether a process with this exit status was killed by SIGKILL."""
    return _signal(status) is signal.SIGKILL


def describe_exit(status: int) -> str:
    """An exit status in words: `was killed by SIGKILL`, `exited with 1`."""
    if status == exits.LEFT:
        return "left because it was asked to"
    if status == exits.LOST:
        return "ended because the parameter server has lost the model, and there is no checkpoint"
    if status == exits.SILENT:
        return "ended because the parameter server has not answered for too long"
    if status == exits.HUNG:
        return f"ended itself because it made no progress (exit status {exits.HUNG})"
    number = _signal(status)
    return f"was killed by {number.name}" if number is not None else f"exited with {status}"


def cause_of(output: str) -> str:
    """The error message or exception in the last lines that a process printed; "" if there is none.

    Warnings of libraries that are closed may follow it.
    """
    lines = output.splitlines()
    for number in reversed(range(len(lines))):
        if lines[number].startswith("error: "):
            return "\n".join(lines[number:]).removeprefix("error: ")
        if lines[number].startswith("Traceback (most recent call last):"):
            return "\n".join(line for line in lines[number + 1 :] if line and not line.startswith(" "))
    return ""


def _signal(status: int) -> signal.Signals | None:
    try:
        return signal.Signals(-status if status < 0 else status - 128)
    except ValueError:
        return None


def counts(death: Death, before: str | None) -> bool:
    """Whether a death is a failure.

    `before` is the cause of the last crash of a process with the same role and index; None if there is none
    to compare with.
    """
    if death.kind == "failed":
        return True
    return death.kind == "crashed" and before == death.cause and death.useful is False


def to_compare(death: Death, before: str | None) -> str | None:
    """The `before` for the next death of a process with the same role and index."""
    if death.kind == "crashed":
        return death.cause
    return None if death.useful else before


P = TypeVar("P", bound=Hashable)


def failures(deaths: Iterable[tuple[P, Death]]) -> list[bool]:
    """Whether each death counts. Deaths are given with their process's role and index, in order of time."""
    crashes: dict[P, str | None] = {}
    counted = []
    for place, death in deaths:
        before = crashes.get(place)
        counted.append(counts(death, before))
        crashes[place] = to_compare(death, before)
    return counted
