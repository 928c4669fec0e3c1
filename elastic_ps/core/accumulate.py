"""Rounds of a fixed number of gradients, from whichever workers have them first.

This is TensorFlow's `ConditionalAccumulator` and its `SyncReplicasOptimizer` (Chen et al. 2016, "Revisiting
Distributed Synchronous SGD"): a version is the mean of `wanted` gradients that were all computed on the
version before, and a gradient of an older version is dropped.

In TensorFlow a worker draws a token for each step. Here shard 0 counts the steps of the round that are done
or under way. If they are enough, a worker whose step is done waits for the version; otherwise it computes
another step on the same version. With as many gradients as workers, the round is that of `sync`. With more,
fast workers compute more of them, and none is wasted. With fewer, the workers that begin last are left out,
as with backup workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ps.core.consistency import After, AskedRounds, Contribution, Entry
from elastic_ps.errors import RefusalCode, Refused


@dataclass
class AccumulateRounds(AskedRounds):
    """Rounds of `wanted` fresh gradients; the last one of a job may have fewer.

    Attributes:
        wanted: the number of steps in a version; at least 1.
        earlier: finished steps of the open round whose workers compute another one, or are gone; `done` has
            the others. If the round starts again they are dropped: their gradients are gone.
        behind: workers that compute on an old version. Their steps will be late.
    """

    wanted: int = 1
    earlier: list[Contribution] = field(default_factory=list)
    behind: set[int] = field(default_factory=set)

    # --- who takes part

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """See `SyncRounds.admit`. The worker takes part in the open round, unless that has all its steps."""
        super().admit(worker, at_once=at_once or not (self.decided or self._is_full()))

    def lose(self, worker: int) -> list[Contribution]:
        """See `SyncRounds`. Its finished steps stay, and a process that replaces it may add another one."""
        if worker in self.done and not self.decided:
            self._set_apart(worker)
        return super().lose(worker)

    def restart(self) -> list[Contribution]:
        void = super().restart()
        void += self.earlier
        self.earlier = []
        self.expected, self.waiting = self.expected | self.waiting, set()
        return void

    def _open_again(self) -> None:
        super()._open_again()
        self.behind &= self.expected

    def is_behind(self, worker: int) -> bool:
        return worker in self.behind

    # --- steps

    def _is_full(self, *, kept: int = 0) -> bool:
        """Return True if as many steps as wanted are done or being pushed.

        Args:
            kept: the number of places that are reserved for others.
        """
        return len(self.begun) + len(self.earlier) + kept >= self.wanted

    @property
    def under_way(self) -> int:
        """The number of steps of the open round that are done or under way."""
        return len((self.expected - self.behind) | self.done.keys()) + len(self.earlier)

    def begin(self, worker: int, *, version: int) -> Entry:
        """LATE if the round has enough other steps, or this one was computed on an old version."""
        fresh = self.takes_part(worker) and version == self.version
        reserved = self._reserved
        kept = 0 if worker in reserved else len(reserved - self.behind)  # else two would wait for each other
        if fresh and (worker in self.begun or not (self._is_full(kept=kept) or self.decided)):
            self.begun.add(worker)
            return Entry.IN
        return self._turn_away(worker)

    def finish(self, contribution: Contribution, *, version: int, attempt: int) -> bool:
        if version == self.version and contribution in self.earlier:
            return False
        return super().finish(contribution, version=version, attempt=attempt)

    def after(self, worker: int, *, attempt: int, step: int, anyway: bool) -> After | None:
        if not self.takes_part(worker):
            raise Refused(
                RefusalCode.LATE,
                f"step {step} of worker {worker} is dropped: the worker takes no part in the round",
            )
        if worker not in self.begun:  # it has asked before, and the answer was lost
            return After.COMPUTE
        if self.attempt > attempt:
            return After.PUSH
        return After.COMPUTE if self.goes_on(worker, step, anyway=anyway) else None

    def goes_on(self, worker: int, step: int, *, anyway: bool = False) -> bool:
        """Whether `worker`, whose step is finished, computes another one on the same version. If so, note it.

        Args:
            step: the worker's own count of the step.
            anyway: compute another step even if none is wanted.
        """
        finished = self.done.get(worker)
        if finished is None or finished.step != step or worker in self.gone:
            return False
        if self.decided or not (anyway or self.under_way < self.wanted):
            return False
        self._set_apart(worker)
        return True

    def _set_apart(self, worker: int) -> None:
        """The finished step of `worker` stays in the round, whatever the worker does now."""
        self.earlier.append(self.done.pop(worker))
        self.begun.discard(worker)

    # --- commits

    @property
    def contributions(self) -> list[Contribution]:
        return sorted([*self.done.values(), *self.earlier], key=lambda c: (c.worker, c.incarnation, c.step))

    @property
    def staleness(self) -> dict[int, int]:
        return dict.fromkeys((c.worker for c in self.contributions), 0)

    @property
    def resting(self) -> bool:
        return super().resting and not self.earlier

    @property
    def _complete(self) -> bool:
        return len(self.done) + len(self.earlier) >= self.wanted

    def end_commit(self) -> None:
        behind = self.expected - self.done.keys()
        super().end_commit()
        self.earlier = []
        self.behind = behind & self.expected
