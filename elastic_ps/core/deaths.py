"""Which deaths of a job's processes count as failures, against `runPolicy.backoffLimit`.

A process that is killed from outside (preemption, a drained node, a person) says nothing about the job,
however often that happens. A script that fails by itself does. In between are crashes: a segmentation fault
or an exit status that means nothing may be the machine's fault once. If the replacement then dies in the same
way, before it has done anything for the job, the next one will, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

Kind: TypeAlias = Literal["failed", "crashed", "killed"]
"""`failed`: the program says so itself. `killed`: from outside. `crashed`: neither is known."""


@dataclass(frozen=True)
class Death:
    """How a process ended that should not have.

    Attributes:
        kind: see `Kind`.
        cause: what it died of; two deaths with the same text are alike.
        useful: whether it had done anything for the job: a step that is in the model, an answer.
    """

    kind: Kind
    cause: str
    useful: bool


def counts(death: Death, before: Death | None) -> bool:
    """Whether a death is a failure; `before` is the last crash in the same place: of that worker's index."""
    if death.kind == "failed":
        return True
    alike = before is not None and before.cause == death.cause
    return death.kind == "crashed" and alike and not death.useful


P = TypeVar("P", bound=Hashable)


def failures(deaths: Iterable[tuple[P, Death]]) -> list[bool]:
    """For each death, given with its place and in the order of time, whether it counts."""
    crashes: dict[P, Death] = {}
    counted = []
    for place, death in deaths:
        counted.append(counts(death, crashes.get(place)))
        if death.useful:
            crashes.pop(place, None)
        if death.kind == "crashed":
            crashes[place] = death
    return counted
