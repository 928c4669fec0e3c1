"""Rounds of local steps that wait for some of the workers, and a little longer for the rest.

This is the synchroniser of Decoupled DiLoCo (2026, arXiv 2604.21428): a round has the exchanges of at least
`quorum` workers. Exchanges that arrive within a grace period after that also belong to it, so that a slightly
slower worker is not left out each time. Later ones belong to a later round, with the weight of their samples:
no training is lost.

The caller, which has a clock, decides how long the grace period is.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Contribution, Phase, RoundEvent


@dataclass
class QuorumRounds(BoundedRounds):
    """Rounds of the exchanges of a quorum, and of those that arrive soon after.

    If fewer workers take part, a round has the exchanges of all of them.

    Attributes:
        quorum: the number of workers that a round waits for, however long that takes; at least 1.

    A round is closed when the grace period is over.
    """

    quorum: int = 1

    @property
    def lagging(self) -> Set[int]:
        if len(self.done) < self.quorum or self.phase is not Phase.OPEN:
            return frozenset()
        return self.expected - self.done.keys()

    def hasten(self) -> None:
        self._note(RoundEvent.SHUT)

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
            self._note(RoundEvent.REOPEN)
        return super().restart()
