"""How long each worker takes for its part of a round, and for whom the others have waited how long.

Times are seconds of the caller's clock; workers are named by their incarnation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta


@dataclass
class Waiting:
    """For whom an open round waits, and since when.

    Level-triggered: it does not matter when it is asked, as long as that is often enough. The idea of a time
    limit for collectives, after which who did not come is named, is that of PyTorch's process groups.
    """

    _round: tuple[int, int] = (0, 0)
    _since: dict[int, float] = field(default_factory=dict)

    def overdue(
        self, round_: tuple[int, int], awaited: Iterable[int], now: float, limit: timedelta
    ) -> dict[int, float]:
        """Those who have kept the others waiting for longer than `limit`, and for how many seconds.

        Args:
            round_: version and attempt; with another one, waiting begins anew.
            awaited: whose steps the round lacks, while somebody waits for them.
            limit: zero for none.
        """
        before = self._since if round_ == self._round else {}
        self._round = round_
        self._since = {who: before.get(who, now) for who in awaited}
        if not limit:
            return {}
        return {who: now - since for who, since in self._since.items() if now - since > limit.total_seconds()}
