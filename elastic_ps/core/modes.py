"""The rounds of each mode of `consistency`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.accumulate import AccumulateRounds
from elastic_ps.core.asynchronous import AsyncRounds
from elastic_ps.core.backup import BackupRounds
from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import SyncRounds
from elastic_ps.core.portioned import PortionedRounds
from elastic_ps.core.quorum import QuorumRounds

ROUNDS: Mapping[str, Callable[[Consistency], SyncRounds]] = {
    "sync": lambda c: _rounds_of_all(c),
    "bounded": lambda c: BoundedRounds(max_staleness=c.max_staleness or 1),
    "async": lambda c: AsyncRounds(consistent=c.reads != "inconsistent"),
    "accumulate": lambda c: AccumulateRounds(wanted=c.gradients or 1),
    "local": lambda c: _rounds_of_exchanges(c),
}


def _rounds_of_all(consistency: Consistency) -> SyncRounds:
    """The rounds of mode `sync`, with or without backup workers."""
    if consistency.global_batch_size is not None:
        return PortionedRounds()
    return BackupRounds(spare=consistency.backup_workers) if consistency.backup_workers else SyncRounds()


def _rounds_of_exchanges(consistency: Consistency) -> SyncRounds:
    """The rounds of mode `local`, in which a step is an exchange."""
    if consistency.quorum is not None:
        return QuorumRounds(quorum=consistency.quorum)
    return SyncRounds() if consistency.waits_for_all else AsyncRounds()


def rounds_of(consistency: Consistency) -> SyncRounds:
    """The rounds of a new job."""
    return ROUNDS[consistency.mode](consistency)
