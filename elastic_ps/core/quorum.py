"""Rounds of local steps that wait for some of the workers, and a little longer for the rest.

This is the synchroniser of Decoupled DiLoCo (2026, arXiv 2604.21428): a round is made of the exchanges of at
least `quorum` workers. Those that come within a grace period after that are part of it, too, so that a worker
that is a little slower is not left behind each time. What comes later is part of a later round, with the
weight of its samples: nothing that a worker has trained is dropped.

How long the grace period is, is decided outside, where there is a clock.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Contribution, Event, Phase


@dataclass
class QuorumRounds(BoundedRounds):
    """Rounds of the exchanges of a quorum, and of those that come soon after.

    If fewer workers take part, a round is made of the exchanges of all of them.

    Attributes:
        quorum: how many workers' exchanges a round waits for, however long that takes; at least 1.

    It is shut when the grace period is over.
    """

    quorum: int = 1

    @property
    def lagging(self) -> Set[int]:
        if len(self.done) < self.quorum or self.phase is not Phase.OPEN:
            return frozenset()
        return self.expected - self.done.keys()

    def hasten(self) -> None:
        self._note(Event.SHUT)

    @property
    def _enough(self) -> bool:
        return self.phase is Phase.SHUT and len(self.done) >= self.quorum

    @property
    def awaited(self) -> set[int]:
        return (self.begun if self._shut else self.expected) - self.done.keys()

    @property
    def _at_the_bound(self) -> set[int]:
        return set()

    @property
    def _shut(self) -> bool:
        return self.decided or self._enough

    def restart(self) -> list[Contribution]:
        if self.phase is Phase.SHUT:
            self._note(Event.REOPEN)
        return super().restart()
