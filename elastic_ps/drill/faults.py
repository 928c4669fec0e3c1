"""The faults of a drill and their times, as plain values that are reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "kill-worker",
    "stop-worker",
    "freeze-worker",
    "kill-ps",
    "kill-standby",
    "kill-evaluator",
    "freeze-ps",
    "rival-ps",
    "corrupt-checkpoint",
    "fill-disk",
    "cut",
    "reset",
]

KINDS: tuple[Kind, ...] = get_args(Kind)

DESCRIPTIONS: dict[Kind, str] = {
    "kill-worker": "SIGKILL a worker",
    "stop-worker": "scale down by one worker (SIGTERM), then up again",
    "freeze-worker": "freeze a worker (SIGSTOP) for longer than its lease, then wake it",
    "kill-ps": "SIGKILL a parameter server",
    "kill-standby": "SIGKILL a parameter server's standby (durability: standby only)",
    "kill-evaluator": "SIGKILL the evaluator (spec.evaluator only)",
    "freeze-ps": "freeze the parameter server for longer than the workers' lease, then wake it",
    "rival-ps": "freeze the parameter server, let a second one take over, then wake the first",
    "corrupt-checkpoint": "change one byte of the newest checkpoint, then SIGKILL the parameter server",
    "fill-disk": "fill the checkpoints' disk until writing one fails, then make room (root only)",
    "cut": "cut a worker off from the network for longer than its lease, then reconnect it",
    "reset": "close all of a worker's connections with a TCP reset",
}

FIRST, LAST = 5.0, 65.0
"""Faults come between these percentages of the job's records, so that the job can recover in time."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: the kind of the fault.
        at: the percentage of the job's records in the model at which it comes.
        worker: the index of the affected worker or shard, modulo their number.
        place: the place of the changed byte in a file, from 0 to 1.
    """

    kind: Kind
    at: float
    worker: int = 0
    place: float = 0.5

    def __str__(self) -> str:
        who = f" {self.worker}" if self.kind in ("kill-worker", "freeze-worker", "cut", "reset") else ""
        return f"{self.kind}{who} at {self.at:.0f} %"


def schedule(seed: int, kinds: Sequence[Kind], *, workers: int) -> tuple[Fault, ...]:
    """Faults of these kinds. The seed alone determines their order, times and workers.

    A kind that is given twice happens twice.
    """
    rng = random.Random(seed)
    order = list(kinds)
    rng.shuffle(order)
    width = (LAST - FIRST) / max(1, len(order))
    return tuple(
        Fault(
            kind,
            at=round(FIRST + width * (i + 0.8 * rng.random()), 1),
            worker=rng.randrange(workers),
            place=round(rng.random(), 3),
        )
        for i, kind in enumerate(order)
    )
