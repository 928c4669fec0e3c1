"""When the pushed gradients become a new version of the model.

`SyncRounds` is the synchronous mode. A *round* makes version v+1 out of version v: every worker that
computes on v contributes one step, and the sample-weighted mean of all contributions is one optimizer
step. The round does not wait for a worker that holds no records (it waits for some,
evaluates, or is about to leave).

Sums are formed in place on the shards, so a contribution that was begun cannot be taken out again. When a
contributor vanishes with its step unfinished, the round is started again: a new *attempt*, for which the
others push the same gradients once more (they keep them until the round is committed).

`AskedRounds` is the common part of the modes in which a round leaves workers out (`backup`, `bounded`,
`accumulate`). There a worker asks before its first push, so that the sums contain only steps that belong to
the round.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from elastic_ps.core.ledger import Range
from elastic_ps.core.transitions import Transitions
from elastic_ps.errors import RefusalCode, Refused


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One worker's finished step.

    Attributes:
        worker, incarnation, step: who, and the worker's own count.
        samples: weight in the mean; the number of records unless the script says otherwise.
        records: what it was computed on.
        skipped: records that the script has skipped before it.
        assigns: it was no step on records: its values become the version.
        settings: the optimizer's hyperparameters and scheduler states as JSON; "" if unchanged.
        metrics, reductions: what the script reported with this step; see `core.metrics.Metrics`.
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

    @property
    def ranges(self) -> tuple[Range, ...]:
        """All records that are done with when it is in a version."""
        return *self.records, *self.skipped

    def record(self, staleness: int) -> dict[str, Any]:
        """What histories say of it. `staleness`: in versions, when it went into one."""
        said = {"worker": self.worker, "incarnation": self.incarnation, "step": self.step}
        said |= {"samples": self.samples, "staleness": staleness}
        skipped = {"skipped": [list(r) for r in self.skipped]} if self.skipped else {}
        return {**said, "records": [list(r) for r in self.records], **skipped}


class Entry(enum.Enum):
    """The answer to a worker that is about to push a step."""

    IN = "in"
    """It pushes for the open round, which waits for it from now on."""
    LATER = "later"
    """It asks again for the next round."""
    LATE = "late"
    """The step is void, and the worker takes no part until it is admitted again."""


class After(enum.Enum):
    """What a worker does after a step, in mode `accumulate`."""

    PULL = "pull"
    """The step is in the model: it pulls the next version."""
    COMPUTE = "compute"
    """It computes another step on the version that it has."""
    PUSH = "push"
    """The round has started again: it pushes the step once more."""


class Phase(enum.Enum):
    """How far the open round is."""

    OPEN = "open"
    SHUT = "shut"
    """Nobody is let in any more: it is full, or has waited long enough for those that are late."""
    COMMITTING = "being committed"
    """Nothing else may be called before that has worked or failed."""
    DECIDED = "decided"
    """A commit has failed on the way. It is made again with the same steps: some shards may have applied
    them. Nobody is admitted to the round, and nothing starts it again, but `undecide`."""


class Event(enum.Enum):
    """What changes the phase of a round."""

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
        (Phase.OPEN, Event.SHUT): Phase.SHUT,
        (Phase.SHUT, Event.REOPEN): Phase.OPEN,
        (Phase.OPEN, Event.RESTART): Phase.OPEN,
        (Phase.SHUT, Event.RESTART): Phase.SHUT,
        (Phase.OPEN, Event.COMMIT): Phase.COMMITTING,
        (Phase.SHUT, Event.COMMIT): Phase.COMMITTING,
        (Phase.COMMITTING, Event.FAIL): Phase.DECIDED,
        (Phase.DECIDED, Event.COMMIT): Phase.COMMITTING,
        (Phase.DECIDED, Event.UNDECIDE): Phase.OPEN,
        (Phase.COMMITTING, Event.APPLY): Phase.OPEN,
    },
)


@dataclass
class SyncRounds:
    """The open round, and who takes part in it.

    Attributes:
        version: the version that the open round is to continue from.
        attempt: grows when the round is started again, and is 0 at a round's opening.
        expected: the workers that compute for the open round.
        done: the steps that are complete on all shards.
        waiting: workers that take part from the next round on.
        gone: workers among `done` that have left since; their step counts if the round is committed.
        phase: of the round.
        assigner: the worker whose values are to become the next version. Nobody else takes part in the round.
        visiting: that worker takes part for this alone, and not in the next round.
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
        """The same rounds; what is done to the one is not done to the other."""
        return replace(self, **{each.name: copy.copy(getattr(self, each.name)) for each in fields(self)})

    def _note(self, event: Event) -> None:
        """Raises ImpossibleTransition, which is a ValueError: the round is in no such phase."""
        self.phase = PHASES.after(self.phase, event)

    @property
    def committing(self) -> bool:
        """Whether it is between `begin_commit` and `end_commit` or `fail_commit`."""
        return self.phase is Phase.COMMITTING

    @property
    def decided(self) -> bool:
        """Whether it is settled of which steps the round is made."""
        return self.phase in (Phase.COMMITTING, Phase.DECIDED)

    # --- who takes part

    def admit(self, worker: int, *, at_once: bool = False) -> None:
        """`worker` has records to compute on and takes part from the next round; at once if none is open.

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
        """The workers that were too late with their last step and have not been admitted since."""
        return frozenset()

    def is_behind(self, worker: int) -> bool:
        """Whether `worker` has a version that is over, on which no step is of use any more."""
        del worker
        return False

    def withdraw(self, worker: int) -> None:
        """`worker`, which is between two steps, computes nothing for now."""
        self.waiting.discard(worker)
        if worker not in self.done:
            self.expected.discard(worker)
            if worker == self.assigner:  # some of its values may be in the sums
                self.restart()
            self._open_again()

    def lose(self, worker: int) -> list[Contribution]:
        """`worker` is gone. If its step was begun and not finished, the round starts again.

        Returns the steps that are void by that and that nobody will push again.
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
        """No shard has applied the decided round, and some shard cannot: it starts again; see `restart`."""
        self._note(Event.UNDECIDE)
        return self.restart()

    def restart(self) -> list[Contribution]:
        """Start the round again, as a new attempt. Returns the void steps that nobody will push again.

        A process that has come in the place of one that is gone, and waits for the next round, takes part in
        this one: the round may not be complete without the worker.

        Raises:
            ImpossibleTransition: the round is decided.
        """
        self._note(Event.RESTART)
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
        """If nobody is left whose step is to come, who waits for the next round takes part in this one."""
        if not (self.expected or self.decided):
            self.expected, self.waiting = self.waiting, set()

    def assign(self, worker: int) -> list[Contribution]:
        """The next version is to be made of values of `worker`. The steps of all others are void.

        They take no part until they are admitted again. Returns the void steps that nobody will push again.

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
        """`worker` is about to push the step that it has computed on `version`.

        Raises:
            Refused: INVALID: it need not ask, because each round is made of everybody's step.
        """
        reason = (
            f"worker {worker} asks before it pushes its step on version {version}, which it does not have to"
        )
        raise Refused(RefusalCode.INVALID, reason)

    def hand_out(self, worker: int) -> None:
        """`worker` is told the open round's version, to pull it and compute on it."""
        self.computes_on(worker, self.version)

    def computes_on(self, worker: int, version: int) -> bool:
        """`worker` has pulled `version`, to compute its next step on. Returns whether that was news.

        A contributor cannot find another version than the open round's where rounds wait for everybody.
        """
        del worker, version
        return False

    def _begun(self, worker: int) -> bool:
        """Whether something of the worker's step may be in the sums."""
        return worker in self.expected

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
            reason = f"worker {worker} holds no records, so no step is expected from it"
            raise Refused(RefusalCode.INVALID, reason)
        if not self._begun(worker):
            raise Refused(RefusalCode.INVALID, f"worker {worker} pushed its step without asking first")
        if contribution.assigns != (worker == self.assigner):
            reason = f"worker {worker} {'assigns no' if contribution.assigns else 'is to assign'} values"
            raise Refused(RefusalCode.LATE, reason)
        self.done[worker] = contribution
        return True

    # --- commits

    @property
    def contributions(self) -> list[Contribution]:
        """The finished steps of the open round, in order of worker, and of each worker's own count."""
        return [self.done[worker] for worker in sorted(self.done)]

    @property
    def staleness(self) -> dict[int, int]:
        """For each step in `done`, how many versions older its own is than the open round's."""
        return dict.fromkeys(self.done, 0)

    def after(self, worker: int, *, attempt: int, step: int, anyway: bool) -> After | None:
        """What `worker`, which has pushed its step, does where it may have to compute another one.

        Args:
            attempt: that the step was pushed for.
            step: the worker's own count of its steps.
            anyway: it need not wait for the version, as nobody is to compute any more.

        Returns None if it waits.

        Raises:
            Refused: INVALID: it need not ask, because it waits for the version. LATE: the step is void.
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
        """The open round waits no longer for those that are `lagging`."""

    @property
    def held_up(self) -> set[int]:
        """The workers that wait for the open round's commit: their step is done, or they come next."""
        return (self.done.keys() - self.gone) | self.waiting

    @property
    def resting(self) -> bool:
        """Whether nobody takes part, and no finished step waits for its version."""
        return not (self.expected or self.waiting)

    @property
    def ready(self) -> bool:
        """Whether the round can be committed."""
        return self.can_commit()

    def can_commit(self, *, last: bool = False) -> bool:
        """Whether the round can be committed.

        Args:
            last: there are no records to compute on but those of the round's steps.
        """
        complete = self.decided or self._complete or (last and not self.awaited)
        return complete and not self.committing and bool(self.contributions)

    @property
    def _complete(self) -> bool:
        return not self.awaited

    def begin_commit(self, *, last: bool = False) -> list[Contribution]:
        """Decide the round: exactly these contributions. `last`: see `can_commit`."""
        if not self.can_commit(last=last):
            raise ValueError("the round is not ready")
        self._note(Event.COMMIT)
        return self.contributions

    def fail_commit(self) -> None:
        """The commit has failed on the way; it is begun again, or the round is undecided."""
        self._note(Event.FAIL)

    @property
    def following(self) -> set[int]:
        """Who takes part in the next round, as far as is known."""
        leaving = {self.assigner} if self.visiting else set()
        return (self.expected - self.gone - leaving) | self.waiting

    def end_commit(self) -> None:
        """The shards have applied the round: open the next one."""
        self._note(Event.APPLY)
        self.expected = self.following
        self.version += 1
        self.attempt = 0
        self.assigner = None
        self.done.clear()
        self.waiting = set()
        self.gone.clear()


@dataclass
class AskedRounds(SyncRounds):
    """Rounds that are made of the steps of the workers that were let in.

    Attributes:
        begun: the workers that were let in to the open round. It waits for them, and only they push.
        late: the workers that were turned away and have not been admitted since.
        owed: workers with records whose steps were turned away too often: each has a place in the round.
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
        """The workers that have a place in the round, and have not begun."""
        return {worker for worker in self.owed - self.begun if self.takes_part(worker)}

    def _turn_away(self, worker: int) -> Entry:
        """`worker` has come too late with its step; it takes no part until it is admitted again."""
        took_part = self.takes_part(worker)
        self.withdraw(worker)
        if took_part:
            self.late.add(worker)
        return Entry.LATE

    def _begun(self, worker: int) -> bool:
        return worker in self.begun

    def restart(self) -> list[Contribution]:
        self.begun -= self.gone  # a process that has come in the place of one of them has not begun
        return super().restart()

    def _open_again(self) -> None:
        self.begun &= self.expected
        super()._open_again()

    def end_commit(self) -> None:
        super().end_commit()
        self.begun.clear()
