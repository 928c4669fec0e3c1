"""Rounds without the slowest workers.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD") a round does not wait for the
slowest workers. In that paper the workers that finish first count; here, those that begin to push first. A
worker asks before its first push, and the round admits as many workers as it needs. A late worker has pushed
nothing, so nothing has to be removed from the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ps.core.consistency import AskedRounds, Entry, Phase, RoundEvent


@dataclass
class BackupRounds(AskedRounds):
    """Synchronous rounds with backup workers.

    Attributes:
        spare: the number of workers that a round leaves out.

    A round is closed once it has turned a worker away. Workers that come later wait for the next round, so
    that this one does not wait for them.
    """

    spare: int = 1

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """See `SyncRounds.admit`. The worker takes part in the open round, unless that is closed.

        Otherwise it would wait for a round whose workers may all be slow.
        """
        super().admit(worker, at_once=at_once or self.phase is Phase.OPEN)

    @property
    def wanted(self) -> int:
        """The number of steps that the open round needs, with the present number of workers.

        Workers that were turned away count, since they will be admitted again.
        """
        return max(1, len(self.expected | self.late) - self.spare)

    def begin(self, worker: int, *, version: int) -> Entry:
        """LATE if the round has enough other steps, or this one was computed on an old version."""
        if self.takes_part(worker) and version == self.version:
            reserved = self._reserved  # two of them would wait for each other if they counted each other
            known = worker in self.begun | reserved
            if self.phase is Phase.OPEN and not known and len(self.begun | reserved) >= self.wanted:
                self._note(RoundEvent.SHUT)
            if known or self.phase is Phase.OPEN:
                self.begun.add(worker)
                return Entry.IN
        return self._turn_away(worker)

    def _open_again(self) -> None:
        super()._open_again()
        if self.phase is Phase.SHUT and not self.begun:
            self.expected, self.waiting = self.expected | self.waiting, set()
            self._note(RoundEvent.REOPEN)

    @property
    def _complete(self) -> bool:
        enough = (self.phase is Phase.SHUT or len(self.done) >= self.wanted) and not self._reserved
        return (enough and self.begun <= self.done.keys()) or super()._complete
