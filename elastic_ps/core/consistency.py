"""Decides when pushed gradients become a new version of the model.

`SyncRounds` is the synchronous mode. A *round* makes version v+1 from version v: every worker that computes
on v contributes one step, and the sample-weighted mean of all contributions is one optimizer step. The round
does not wait for a worker without records, which waits for some, evaluates, or is about to leave.

Shards add contributions in place, so an unfinished contribution cannot be removed from the sums. If worker 2
vanishes in the middle of its step, the round starts again as a new *attempt*, and the others push the same
gradients once more. They keep them until the round is committed.

`AskedRounds` is the common part of the modes in which a round leaves workers out (`backup`, `bounded`,
`accumulate`). There a worker asks before its first push, so that the sums contain only steps that belong to
the round.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Self

from elastic_ps.core.ledger import Range
from elastic_ps.core.transitions import Symbol, Transitions
from elastic_ps.errors import RefusalCode, Refused


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One worker's finished step.

    Attributes:
        worker, incarnation, step: the worker, its incarnation, and its own number of the step.
        samples: how many records it counts as: its own, or in mode `local` with fragments those that the
            fragment was trained on.
        weight: the weight in the mean; 0: `samples`.
        records: the records that it was computed on.
        skipped: the records that the script has skipped before it.
        assigns: whether its values were assigned and become the version, without a step on records.
        settings: the optimizer's hyperparameters and scheduler states as JSON; "" if unchanged.
        metrics, reductions: what the script reported with this step; see `core.metrics.Metrics`.
        weighed: whether the script has said the weight; see `Session.weigh`.
    """

    worker: int
    incarnation: int
    step: int
    samples: int
    records: tuple[Range, ...] = ()
    settings: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reductions: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[Range, ...] = ()
    assigns: bool = False
    weight: float = 0.0
    weighed: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weighed", self.weight != 0)
        if not self.weighed:
            object.__setattr__(self, "weight", float(self.samples))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All records that the step completes, trained or skipped."""
        return *self.records, *self.skipped

    def record(self, staleness: int) -> dict[str, Any]:
        """The entry for histories. `staleness`: the step's staleness in its version."""
        said: dict[str, Any] = {"worker": self.worker, "incarnation": self.incarnation, "step": self.step}
        said |= {"samples": self.samples, "staleness": staleness}
        said |= {} if self.weight == self.samples else {"weight": self.weight}
        skipped = {"skipped": [list(r) for r in self.skipped]} if self.skipped else {}
        return {**said, "records": [list(r) for r in self.records], **skipped}


_is_weighed = attrgetter("weighed")


def _mixed(plain: Contribution, weighed: Contribution) -> str:
    """Why these steps cannot be in one version."""
    return (
        f"step {weighed.step} of worker {weighed.worker} was weighed with session.weigh, but step "
        f"{plain.step} of worker {plain.worker} was not, and one version cannot count both tokens and "
        "records. Call session.weigh before the backward() of each step in all workers, or in none"
    )


class Entry(enum.Enum):
    """The answer to a worker that is about to push a step."""

    IN = "in"
    """It pushes for the open round, which waits for it."""
    WAIT = "wait"
    """It asks again for the next round."""
    LATE = "late"
    """The step is dropped, and the worker takes no part until it is admitted again."""


class After(enum.Enum):
    """The next action of a worker after a step, in mode `accumulate`."""

    PULL = "pull"
    """The step is in the model: it pulls the next version."""
    COMPUTE = "compute"
    """It computes another step on the version that it has."""
    PUSH = "push"
    """The round has started again: it pushes the step once more."""


class Phase(Symbol):
    """The phase of the open round."""

    OPEN = "open"
    SHUT = "shut"
    """The round admits nobody: it is full, or has waited long enough for late workers."""
    COMMITTING = "being committed"
    """The commit is under way. Until it has succeeded or failed, no other method may be called."""
    DECIDED = "decided"
    """A commit has failed. It is repeated with the same steps, since some shards may have applied them.
    Nobody is admitted to the round, and only `undecide` can start it again."""


class RoundEvent(Symbol):
    """An event that changes the phase of a round."""

    SHUT = "shut"
    REOPEN = "reopen"
    RESTART = "restart"
    COMMIT = "commit"
    FAIL = "fail"
    UNDECIDE = "undecide"
    APPLY = "apply"


PHASES = Transitions(
    "the round",
    {
        (Phase.OPEN, RoundEvent.SHUT): Phase.SHUT,
        (Phase.SHUT, RoundEvent.REOPEN): Phase.OPEN,
        (Phase.OPEN, RoundEvent.RESTART): Phase.OPEN,
        (Phase.SHUT, RoundEvent.RESTART): Phase.SHUT,
        (Phase.OPEN, RoundEvent.COMMIT): Phase.COMMITTING,
        (Phase.SHUT, RoundEvent.COMMIT): Phase.COMMITTING,
        (Phase.COMMITTING, RoundEvent.FAIL): Phase.DECIDED,
        (Phase.DECIDED, RoundEvent.COMMIT): Phase.COMMITTING,
        (Phase.DECIDED, RoundEvent.UNDECIDE): Phase.OPEN,
        (Phase.COMMITTING, RoundEvent.APPLY): Phase.OPEN,
    },
)


@dataclass
class SyncRounds:
    """The open round, and the workers that take part in it.

    Attributes:
        version: the version that the open round is to continue from.
        attempt: the number of restarts of the round; 0 at first.
        expected: the workers that compute for the open round.
        done: the steps that are complete on all shards.
        waiting: workers that take part from the next round on.
        gone: workers among `done` that have left since. Their steps still count.
        phase: the phase of the round.
        assigner: the worker whose values are to become the next version. Nobody else takes part in the round.
        visiting: whether the assigner takes part only in this round.
    """

    version: int = 0
    attempt: int = 0
    expected: set[int] = field(default_factory=set)
    done: dict[int, Contribution] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    phase: Phase = Phase.OPEN
    assigner: int | None = None
    visiting: bool = False

    def copy(self) -> Self:
        """An independent copy."""
        return replace(self, **{each.name: copy.copy(getattr(self, each.name)) for each in fields(self)})

    def _note(self, event: RoundEvent) -> None:
        """Change the phase. Raises ImpossibleTransition (a ValueError) if the phase does not allow it."""
        self.phase = PHASES.after(self.phase, event)

    @property
    def committing(self) -> bool:
        """Whether the round is between `begin_commit` and `end_commit` or `fail_commit`."""
        return self.phase is Phase.COMMITTING

    @property
    def decided(self) -> bool:
        """Whether the steps of the round are fixed."""
        return self.phase in (Phase.COMMITTING, Phase.DECIDED)

    # --- who takes part

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """Let `worker`, which has records, take part from the next round on, or at once if none is open.

        Args:
            at_once: it takes part in the open round, which waits for it, unless that is decided.
        """
        if at_once and not self.decided and worker not in self.expected:
            self.expected.add(worker)
        elif worker not in self.expected or worker in self.gone:
            self.waiting.add(worker)
            self._open_again()

    def knows(self, worker: int) -> bool:
        """Whether `worker` takes part, in the open round or from the next one on."""
        return worker in self.waiting or self.takes_part(worker)

    def takes_part(self, worker: int) -> bool:
        """Whether `worker` computes for the open round, so that it may compute on `version`."""
        return worker in self.expected and worker not in self.gone

    @property
    def late_workers(self) -> Set[int]:
        """The workers whose last step was late, and that have not been admitted since."""
        return frozenset()

    def is_behind(self, worker: int) -> bool:
        """Whether `worker` has an old version, on which no step is useful any more."""
        del worker
        return False

    def withdraw(self, worker: int) -> None:
        """Let `worker`, which is between two steps, take no part for now."""
        self.waiting.discard(worker)
        if worker not in self.done:
            self.expected.discard(worker)
            if worker == self.assigner:  # some of its values may be in the sums
                self.restart()
            self._open_again()

    def lose(self, worker: int) -> list[Contribution]:
        """Remove `worker`, which is gone. If its step was unfinished, the round starts again.

        Returns the dropped steps that nobody will push again.
        """
        self.waiting.discard(worker)
        if worker not in self.expected:
            return []
        if worker in self.done or self.decided:
            self.gone.add(worker)
            return []
        if not self._begun(worker):
            self.withdraw(worker)
            return []
        self.expected.discard(worker)
        return self.restart()

    def undecide(self) -> list[Contribution]:
        """Start the decided round again, which some shard cannot apply, and none has. See `restart`."""
        self._note(RoundEvent.UNDECIDE)
        return self.restart()

    def restart(self) -> list[Contribution]:
        """Start the round again, as a new attempt. Returns the dropped steps that nobody will push again.

        A process that has replaced a departed one, and waits for the next round, takes part in this one: the
        round may need its worker.

        Raises:
            ImpossibleTransition: the round is decided.
        """
        self._note(RoundEvent.RESTART)
        if self.assigner not in self.expected - self.gone:
            self.assigner = None
        void = [self.done[worker] for worker in sorted(self.gone) if worker in self.done]
        returned = self.gone & self.waiting
        self.expected = (self.expected - self.gone) | returned
        self.waiting -= returned
        self.attempt += 1
        self.done.clear()
        self.gone.clear()
        self._open_again()
        return void

    def _open_again(self) -> None:
        """If the round expects no more steps, let the workers that wait for the next one take part in it."""
        if not (self.expected or self.decided):
            self.expected, self.waiting = self.waiting, set()

    def assign(self, worker: int) -> list[Contribution]:
        """Let the values of `worker` become the next version. The steps of all others are dropped.

        They take no part until they are admitted again. Returns the dropped steps that nobody will push
        again.

        Raises:
            ValueError: the round is decided (ImpossibleTransition), or another worker assigns.
        """
        if self.assigner is not None:
            raise ValueError(f"worker {self.assigner} assigns already")
        void = self.restart()
        self.assigner, self.visiting = worker, worker not in self.expected | self.waiting
        self.waiting.discard(worker)
        self.expected = {worker}
        return void

    # --- steps

    def begin(self, worker: int, *, version: int) -> Entry:
        """Answer `worker`, which is about to push the step that it has computed on `version`.

        Raises:
            Refused: INVALID: it need not ask, because each round has the steps of all workers.
        """
        reason = (
            f"worker {worker} asks before it pushes its step on version {version}, which it does not have to"
        )
        raise Refused(RefusalCode.INVALID, reason)

    def tell_version(self, worker: int) -> None:
        """Note that `worker` is told the open round's version, to pull it and compute on it."""
        self.computes_on(worker, self.version)

    def computes_on(self, worker: int, version: int) -> bool:
        """Note that `worker` has pulled `version` for its next step. Returns whether that was new.

        Where rounds wait for everybody, this is always the open round's version.
        """
        del worker, version
        return False

    def _begun(self, worker: int) -> bool:
        """Whether a part of the worker's step may be in the sums."""
        return worker in self.expected

    def finish(self, contribution: Contribution, *, version: int, attempt: int) -> bool:
        """Note that a step is complete on all shards. Returns False if that was known already.

        Raises:
            Refused: the step belongs to another version or attempt, or the worker takes no part. INVALID: its
                weight counts records, and that of another step tokens, or the other way round.
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
            reason = f"worker {worker} holds no records, so no step is expected from it"
            raise Refused(RefusalCode.INVALID, reason)
        if not self._begun(worker):
            raise Refused(RefusalCode.INVALID, f"worker {worker} pushed its step without asking first")
        if contribution.assigns != (worker == self.assigner):
            reason = f"worker {worker} {'assigns no' if contribution.assigns else 'is to assign'} values"
            raise Refused(RefusalCode.LATE, reason)
        for other in self.contributions:
            if other.weighed != contribution.weighed:
                raise Refused(RefusalCode.INVALID, _mixed(*sorted((other, contribution), key=_is_weighed)))
        self.done[worker] = contribution
        return True

    # --- commits

    @property
    def contributions(self) -> list[Contribution]:
        """The finished steps of the open round, ordered by worker and step."""
        return [self.done[worker] for worker in sorted(self.done)]

    @property
    def staleness(self) -> dict[int, int]:
        """Return by how many versions each step in `done` is older than the open round."""
        return dict.fromkeys(self.done, 0)

    def after(self, worker: int, *, attempt: int, step: int, anyway: bool) -> After | None:
        """Decide what `worker`, which has pushed its step, does next in mode `accumulate`.

        Args:
            attempt: the attempt that the step was pushed for.
            step: the worker's own number of the step.
            anyway: it need not wait for the version, since nobody computes any more.

        Returns None if it waits.

        Raises:
            Refused: INVALID: it need not ask, because it waits for the version. LATE: the step is dropped.
        """
        del attempt, anyway
        reason = f"worker {worker} asks what to do after step {step}, which it does not have to"
        raise Refused(RefusalCode.INVALID, reason)

    @property
    def awaited(self) -> set[int]:
        """The workers whose steps the open round lacks."""
        return self.expected - self.done.keys()

    @property
    def lagging(self) -> Set[int]:
        """The workers that the open round waits for, but not for long; see `hasten`."""
        return frozenset()

    def hasten(self) -> None:
        """Stop waiting for the workers that are `lagging`."""

    @property
    def held_up(self) -> set[int]:
        """The workers that wait for the open round's commit: their step is done, or they come next."""
        return (self.done.keys() - self.gone) | self.waiting

    @property
    def resting(self) -> bool:
        """Whether nobody takes part, and no finished step waits for its version."""
        return not (self.expected or self.waiting)

    def can_commit(self, *, last: bool = False) -> bool:
        """Whether the round can be committed.

        Args:
            last: no records are left but those of the round's steps.
        """
        complete = self.decided or self._complete or (last and not self.awaited)
        return complete and not self.committing and bool(self.contributions)

    @property
    def _complete(self) -> bool:
        return not self.awaited

    def begin_commit(self, *, last: bool = False) -> list[Contribution]:
        """Decide the round: it has exactly these contributions. `last`: see `can_commit`."""
        if not self.can_commit(last=last):
            raise ValueError("the round is not ready")
        self._note(RoundEvent.COMMIT)
        return self.contributions

    def fail_commit(self) -> None:
        """Note that the commit has failed. Begin it again, or undecide the round."""
        self._note(RoundEvent.FAIL)

    @property
    def following(self) -> set[int]:
        """The workers that are known to take part in the next round."""
        leaving = {self.assigner} if self.visiting else set()
        return (self.expected - self.gone - leaving) | self.waiting

    def end_commit(self) -> None:
        """Open the next round, after all shards have applied this one."""
        self._note(RoundEvent.APPLY)
        self.expected = self.following
        self.version += 1
        self.attempt = 0
        self.assigner = None
        self.done.clear()
        self.waiting = set()
        self.gone.clear()


@dataclass
class AskedRounds(SyncRounds):
    """Rounds of the steps of admitted workers.

    Attributes:
        begun: the workers that were admitted to the open round. It waits for them, and only they push.
        late: the workers that were turned away and have not been admitted since.
        owed: workers with records whose steps were late too often. Each has a place in the round.
    """

    begun: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        self.late.discard(worker)
        super().admit(worker, at_once=at_once)

    @property
    def late_workers(self) -> Set[int]:
        return self.late

    def withdraw(self, worker: int) -> None:
        self.late.discard(worker)
        super().withdraw(worker)

    def lose(self, worker: int) -> list[Contribution]:
        self.late.discard(worker)
        return super().lose(worker)

    @property
    def _reserved(self) -> set[int]:
        """The workers that have a place in the round, but have not begun."""
        return {worker for worker in self.owed - self.begun if self.takes_part(worker)}

    def _turn_away(self, worker: int) -> Entry:
        """Turn away `worker`, whose step is late. It takes no part until it is admitted again."""
        took_part = self.takes_part(worker)
        self.withdraw(worker)
        if took_part:
            self.late.add(worker)
        return Entry.LATE

    def _begun(self, worker: int) -> bool:
        return worker in self.begun

    def restart(self) -> list[Contribution]:
        self.begun -= self.gone  # a process that has replaced one of them has not begun
        return super().restart()

    def _open_again(self) -> None:
        self.begun &= self.expected
        super()._open_again()

    def end_commit(self) -> None:
        super().end_commit()
        self.begun.clear()
