"""Rounds of the steps that are ready, with a bound on their staleness.

A worker computes on some version, its *base*, while other workers make new versions. When its step becomes
part of a version, its *staleness* is the number of versions in between. As in the stale synchronous
parallel model (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server"), fast workers wait for a slow one only when its step would become more stale than the bound. That
paper bounds the difference of the workers' step counts. Here the bound is on versions, so that it also holds
for a worker that joins late.

A worker asks when its step is complete, and delays the round only while it sends. Workers that send at the
same time share a round, as transactions share a group commit. That limits the wait and the number of
optimizer steps when many workers send, and lets any number of workers stay within any bound. With a bound of
0, all workers would share each round, as in `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ps.core.consistency import AskedRounds, Contribution, Entry
from elastic_ps.errors import RefusalCode, Refused


@dataclass
class BoundedRounds(AskedRounds):
    """Rounds of bounded staleness.

    Attributes:
        max_staleness: the largest staleness of a step, in versions; at least 1.
        bases: for each worker that takes part, the version that its step is computed on, or an older one.
        asking: the workers that were told to ask again for the next round, and have not been admitted since.
    """

    max_staleness: int = 1
    bases: dict[int, int] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """See `SyncRounds.admit`. The worker takes part in the open round, which does not wait for it."""
        super().admit(worker, at_once=at_once or not self.decided)
        self._set_bases()

    def restart(self) -> list[Contribution]:
        void = super().restart()
        self.expected, self.waiting = self.expected | self.waiting, set()
        self._set_bases()
        return void

    def _set_bases(self) -> None:
        """Set the base of workers that newly take part: they are told the open round's version."""
        self.bases = {worker: self.bases.get(worker, self.version) for worker in self.expected}
        self.asking &= self.expected

    @property
    def staleness(self) -> dict[int, int]:
        return {worker: self.version - self.bases[worker] for worker in self.done}

    def _open_again(self) -> None:
        super()._open_again()
        self._set_bases()

    @property
    def _at_the_bound(self) -> set[int]:
        """The workers whose steps would be too stale for the next round."""
        oldest = self.version + 1 - self.max_staleness
        return {worker for worker, base in self.bases.items() if base < oldest}

    @property
    def awaited(self) -> set[int]:
        return (self.begun | self._at_the_bound) - self.done.keys()

    @property
    def held_up(self) -> set[int]:
        return super().held_up | (self.asking - self.gone)

    def computes_on(self, worker: int, version: int) -> bool:
        """Note that `worker` has pulled a newer version than it was told, so others may go on for longer.

        Others make versions while a worker pulls. Without its report the bound would count from the version
        that it asked for, and the others would wait for it too early.
        """
        if not self.takes_part(worker) or worker in self.begun or version <= self.bases[worker]:
            return False
        self.bases[worker] = version
        return True

    def begin(self, worker: int, *, version: int) -> Entry:
        """IN, unless the open round has a finished step and waits only for workers that are sending theirs.

        Raises:
            Refused: INVALID: the worker takes no part, or has an older version than it was told to have.
        """
        if not self.takes_part(worker):
            reason = f"worker {worker} holds no records, so no step is expected from it"
            raise Refused(RefusalCode.INVALID, reason)
        if version < self.bases[worker]:
            reason = f"worker {worker} begins a step on version {version}, but was given {self.bases[worker]}"
            raise Refused(RefusalCode.INVALID, reason)
        if worker in self.begun:
            return Entry.IN
        if self._shut or version > self.version:
            self.asking.add(worker)
            return Entry.WAIT
        self.asking.discard(worker)
        self.bases[worker] = version
        self.begun.add(worker)
        return Entry.IN

    @property
    def _shut(self) -> bool:
        """Whether the round admits no more workers."""
        return self.decided or (bool(self.done) and not self._at_the_bound - self.begun)

    def end_commit(self) -> None:
        contributors = set(self.done)
        super().end_commit()
        self.bases = {worker: base for worker, base in self.bases.items() if worker not in contributors}
        self._set_bases()
