"""When the pushed gradients become a new version of the model.

`SyncRounds` is the synchronous mode. A *round* makes version v+1 out of version v: every worker that
computes on v contributes one step, and the sample-weighted mean of all contributions is one optimizer
step. Whoever holds no records (it waits for some, evaluates, is about to leave) is not waited for.

Sums are formed in place on the shards, so a contribution that was begun cannot be taken out again. When a
contributor vanishes with its step unfinished, the round is started again: a new *attempt*, for which the
others push the same gradients once more (they keep them until the round is committed).

With backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD") a round does not wait for the
slowest. There, the first to finish count; here, the first to begin: a worker asks before its first push, and
as many are let in as the round is to be made of. Who comes too late has put nothing into the sums, so that
nothing has to be taken out of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic_ps.core.ledger import Range
from elastic_ps.errors import RefusalCode, Refused


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One worker's finished step.

    Attributes:
        worker, incarnation, step: who, and the worker's own count.
        samples: weight in the mean; the number of records unless the script says otherwise.
        records: what it was computed on.
        settings: the optimizer's hyperparameters and scheduler states as JSON; "" if unchanged.
        metrics: what the script reported with this step.
    """

    worker: int
    incarnation: int
    step: int
    samples: int
    records: tuple[Range, ...] = ()
    settings: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class SyncRounds:
    """The open round, and who takes part in it.

    Attributes:
        version: the version that the open round's gradients are computed on.
        attempt: grows when the round is started again, and is 0 at a round's opening.
        expected: the workers whose step the round waits for.
        done: the steps that are complete on all shards.
        waiting: workers that take part from the next round on.
        gone: workers among `done` that have left since; their step counts if the round is committed.
        spare: backup workers: how many workers a round does without. 0: all are waited for.
        begun: with backup workers, who has been let in to the open round; nobody else pushes.
        late: with backup workers, who has been turned away and has not been admitted since. It will be, so it
            counts where the size of a round is determined.
        shut: with backup workers, somebody has been turned away because the open round was full. It stays as
            it is then: whoever comes now waits for the next round, and must not make this one wait for more.
        committing: between `begin_commit` and `end_commit`, when nothing else may be called.
        decided: the round has been decided. A commit that failed on the way is made again with the same
            steps: some shards may have applied them.
    """

    version: int = 0
    attempt: int = 0
    expected: set[int] = field(default_factory=set)
    done: dict[int, Contribution] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    committing: bool = False
    decided: bool = False
    spare: int = 0
    begun: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    shut: bool = False

    def copy(self) -> SyncRounds:
        """The same rounds; what is done to the one is not done to the other."""
        return replace(
            self,
            expected=set(self.expected),
            done=dict(self.done),
            waiting=set(self.waiting),
            gone=set(self.gone),
            begun=set(self.begun),
            late=set(self.late),
        )

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """`worker` has records to compute on and takes part from the next round; at once if none is open.

        With backup workers it takes part in the open round, as long as nobody was turned away from that: a
        round whose workers are all slow would keep it waiting.

        Args:
            at_once: it takes part in the open round, which waits for it.
        """
        self.late.discard(worker)
        at_once = at_once or (self.spare > 0 and not self.decided and not self.shut)
        if at_once and worker not in self.expected:
            self.expected.add(worker)
        elif worker not in self.expected or worker in self.gone:
            self.waiting.add(worker)
            self._open_again()

    def knows(self, worker: int) -> bool:
        """Whether `worker` takes part, in the open round or from the next one on."""
        return worker in self.waiting or self.takes_part(worker)

    def takes_part(self, worker: int) -> bool:
        """Whether the open round waits for `worker`, so that `version` is the one for it to compute on."""
        return worker in self.expected and worker not in self.gone

    @property
    def wanted(self) -> int:
        """With backup workers, how many steps the open round is made of, while there are so many workers."""
        return max(1, len(self.expected | self.late) - self.spare)

    def begin(self, worker: int, *, version: int) -> bool:
        """With backup workers, `worker` is about to push its step. Returns False if it comes too late.

        It then takes no part until it is admitted again, and its step is void.
        """
        took_part = self.takes_part(worker)
        if took_part and version == self.version:
            self.shut |= worker not in self.begun and len(self.begun) >= self.wanted
            if worker in self.begun or not (self.shut or self.decided):
                self.begun.add(worker)
                return True
        self.withdraw(worker)
        if took_part:
            self.late.add(worker)
        return False

    def withdraw(self, worker: int) -> None:
        """`worker`, which is between two steps, computes nothing for now."""
        self.waiting.discard(worker)
        self.late.discard(worker)
        if worker not in self.done:
            self.expected.discard(worker)
            self.begun.discard(worker)
            self._open_again()

    def lose(self, worker: int) -> list[Contribution]:
        """`worker` is gone. If its step was not finished, the round starts again.

        Returns the steps that are void by that and whose workers are not there to push them again.
        """
        self.waiting.discard(worker)
        self.late.discard(worker)
        if worker not in self.expected:
            return []
        if worker in self.done:
            self.gone.add(worker)
            return []
        if self.spare and worker not in self.begun:
            self.withdraw(worker)
            return []
        self.expected.discard(worker)
        return self.restart()

    def restart(self) -> list[Contribution]:
        """Start the round again, as a new attempt. Returns the void steps of workers that are gone."""
        void = [self.done[worker] for worker in sorted(self.gone)]
        self.expected -= self.gone
        self.begun &= self.expected
        self.attempt += 1
        self.decided = False
        self.done.clear()
        self.gone.clear()
        self._open_again()
        return void

    def _open_again(self) -> None:
        """If nobody is left whose step is to come, who waits for the next round takes part in this one."""
        if not self.expected or (self.shut and not self.begun):
            self.expected, self.waiting = self.expected | self.waiting, set()
            self.shut = False

    def finish(self, contribution: Contribution, *, version: int, attempt: int) -> bool:
        """A worker's step is complete on all shards. Returns False if that was known already.

        Raises:
            Refused: the step belongs to another version or attempt, or the worker takes no part.
        """
        worker = contribution.worker
        if version != self.version:
            raise Refused(
                RefusalCode.WRONG_VERSION,
                f"worker {worker} finished a step on version {version}; the open round is on {self.version}",
            )
        if self.done.get(worker) == contribution:
            return False
        if attempt != self.attempt:
            raise Refused(
                RefusalCode.STALE_ATTEMPT,
                f"attempt {attempt} of version {version} was replaced by {self.attempt}",
            )
        if not self.takes_part(worker):
            reason = f"worker {worker} holds no records, so no step is expected of it"
            raise Refused(RefusalCode.INVALID, reason)
        if self.spare and worker not in self.begun:
            raise Refused(RefusalCode.INVALID, f"worker {worker} has not asked before it pushed its step")
        self.done[worker] = contribution
        return True

    @property
    def ready(self) -> bool:
        """Whether the round can be committed."""
        if not self.done or self.committing:
            return False
        if self.decided:
            return True
        enough = bool(self.spare) and (self.shut or len(self.done) >= self.wanted)
        return (enough and self.begun <= self.done.keys()) or self.expected <= self.done.keys()

    def begin_commit(self) -> list[Contribution]:
        """Decide the round: exactly these contributions, in order of worker."""
        if not self.ready:
            raise ValueError("the round is not ready")
        self.committing = self.decided = True
        return [self.done[worker] for worker in sorted(self.done)]

    def end_commit(self) -> None:
        """The shards have applied the round: open the next one."""
        self.version += 1
        self.attempt = 0
        self.expected = (self.expected - self.gone) | self.waiting
        self.done.clear()
        self.waiting = set()
        self.gone.clear()
        self.begun.clear()
        self.committing = self.decided = self.shut = False
