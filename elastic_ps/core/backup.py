"""Rounds that do without the slowest workers.

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD") a round does not wait for the
slowest workers. In that paper the workers that finish first count; here, those that begin first. A worker
asks before its first push, and the round lets in as many workers as it needs. A worker that comes too late
has pushed nothing, so nothing has to be taken out of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ps.core.consistency import AskedRounds, Entry, Event, Phase


@dataclass
class BackupRounds(AskedRounds):
    """Synchronous rounds with backup workers.

    Attributes:
        spare: how many workers a round does without.

    It is shut when a worker has been turned away because it was full. From then on workers that come wait for
    the next round, so that this one does not wait for more of them.
    """

    spare: int = 1

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """As of `SyncRounds`; but it takes part in the open round, if nobody was turned away from that.

        A round whose workers are all slow would keep it waiting.
        """
        super().admit(worker, at_once=at_once or self.phase is Phase.OPEN)

    @property
    def wanted(self) -> int:
        """How many steps the open round is made of, while there are so many workers.

        Those that were turned away count: they will be admitted again.
        """
        return max(1, len(self.expected | self.late) - self.spare)

    def begin(self, worker: int, *, version: int) -> Entry:
        """LATE if the round has enough others, or the step was computed on a version that is over."""
        if self.takes_part(worker) and version == self.version:
            others = self.begun | self._reserved - {worker}
            if self.phase is Phase.OPEN and worker not in self.begun and len(others) >= self.wanted:
                self._note(Event.SHUT)
            if worker in self.begun or self.phase is Phase.OPEN:
                self.begun.add(worker)
                return Entry.IN
        return self._turn_away(worker)

    def _open_again(self) -> None:
        super()._open_again()
        if self.phase is Phase.SHUT and not self.begun:
            self.expected, self.waiting = self.expected | self.waiting, set()
            self._note(Event.REOPEN)

    @property
    def _complete(self) -> bool:
        enough = (self.phase is Phase.SHUT or len(self.done) >= self.wanted) and not self._reserved
        return (enough and self.begun <= self.done.keys()) or super()._complete
