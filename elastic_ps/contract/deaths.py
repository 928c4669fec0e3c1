"""Which deaths of processes on one machine count as failures, against `runPolicy.backoffLimit`.

A process that is killed from outside (preemption, a drained node, a person) says nothing about the job,
however often that happens. A script that fails by itself does. In between are crashes: a segmentation fault
or an exit status that means nothing may be the machine's fault once. If the replacement then dies in the same
way, before it has done anything for the job, the next one will, too.

On a cluster a disruption is marked as one, so that the operator need not guess: there everything else counts
(`elastic_operator.failures`). Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from elastic_ps.contract import exits

Kind: TypeAlias = Literal["failed", "crashed", "killed"]
"""`failed`: the program says so itself. `killed`: from outside. `crashed`: neither is known."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Signals that a process does not bring upon itself. SIGKILL may mean that the memory was not enough, too."""


@dataclass(frozen=True)
class Death:
    """How a process ended that should not have.

    Attributes:
        kind: see `Kind`.
        cause: what it died of; two deaths with the same text are alike.
        useful: whether it had done anything for the job: a step that is in the model, an answer. None if
            that is not known.
    """

    kind: Kind
    cause: str
    useful: bool | None


def kind_of(status: int) -> Kind:
    """What an exit status other than 0 says; one below 0 or above 128 is a signal's."""
    if 0 < status < 128:
        return "failed"
    from_outside = _signal(status) in _FROM_OUTSIDE or status in (exits.FENCED, exits.LEFT, exits.LOST)
    return "killed" if from_outside else "crashed"


def describe_exit(status: int) -> str:
    """An exit status in words: `was killed by SIGKILL`, `exited with 1`."""
    if status == exits.LEFT:
        return "left because it was asked to"
    if status == exits.LOST:
        return "ended because the parameter server has lost the model, and there is no checkpoint"
    if status == exits.HUNG:
        return f"ended itself because it made no progress (exit status {exits.HUNG})"
    number = _signal(status)
    return f"was killed by {number.name}" if number is not None else f"exited with {status}"


def _signal(status: int) -> signal.Signals | None:
    try:
        return signal.Signals(-status if status < 0 else status - 128)
    except ValueError:
        return None


def counts(death: Death, before: str | None) -> bool:
    """Whether a death is a failure.

    `before` is the cause of the last crash in the same place, that is, of a process with the same role and
    index; None if there is none to compare with.
    """
    if death.kind == "failed":
        return True
    return death.kind == "crashed" and before == death.cause and death.useful is False


def to_compare(death: Death, before: str | None) -> str | None:
    """What the next death in the same place is to be compared with: `before` of the next call of `counts`."""
    if death.kind == "crashed":
        return death.cause
    return None if death.useful else before


P = TypeVar("P", bound=Hashable)


def failures(deaths: Iterable[tuple[P, Death]]) -> list[bool]:
    """For each death, given with its place and in the order of time, whether it counts."""
    crashes: dict[P, str | None] = {}
    counted = []
    for place, death in deaths:
        before = crashes.get(place)
        counted.append(counts(death, before))
        crashes[place] = to_compare(death, before)
    return counted
