"""Rounds of a constant number of records, which the ledger counts.

As in `accumulate`, a worker whose step is done may compute another one on the same version: if it has more
records of that version, or if another worker has left some. So a version keeps its size when a worker is
lost. A worker with records of the open version is never turned away.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ps.core.accumulate import AccumulateRounds


@dataclass
class PortionedRounds(AccumulateRounds):
    """Rounds that are complete when all records of their version are in finished steps; see `can_commit`."""

    def can_commit(self, *, last: bool = False) -> bool:
        """Whether the round can be committed.

        Args:
            last: the version has no records but those of the round's steps. Expected workers without a step
                have no records either, and the round does not wait for them.
        """
        return bool(self.contributions) and not self.committing and (self.decided or last)

    def _is_full(self, *, kept: int = 0) -> bool:
        del kept
        return False

    @property
    def under_way(self) -> int:
        return self.wanted  # a worker computes another step only on records of its own
