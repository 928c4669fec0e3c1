"""The rounds of each mode of `consistency`."""

from __future__ import annotations

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.accumulate import AccumulateRounds
from elastic_ps.core.asynchronous import AsyncRounds
from elastic_ps.core.backup import BackupRounds
from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import SyncRounds
from elastic_ps.core.portioned import PortionedRounds
from elastic_ps.core.quorum import QuorumRounds


def rounds_of(consistency: Consistency) -> SyncRounds:
    """The rounds of a new job. In mode `local`, a step is an exchange."""
    if consistency.global_batch_size is not None:
        return PortionedRounds()
    if consistency.backup_workers:
        return BackupRounds(spare=consistency.backup_workers)
    if consistency.quorum is not None:
        return QuorumRounds(quorum=consistency.quorum)
    if consistency.waits_for_all:
        return SyncRounds()
    if consistency.mode == "accumulate":
        return AccumulateRounds(wanted=consistency.gradients or 1)
    if consistency.mode == "bounded":
        return BoundedRounds(max_staleness=consistency.max_staleness or 1)
    return AsyncRounds(consistent=consistency.reads != "inconsistent")
