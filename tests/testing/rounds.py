"""What the tests of rounds share: steps, and a machine whose workers push, vanish and have them committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from elastic_ps.core.bounded import BoundedRounds
from elastic_ps.core.consistency import Contribution, Entry, SyncRounds

R = TypeVar("R", bound=SyncRounds)


def step(worker: int, number: int = 0) -> Contribution:
    """A worker's step; its incarnation is the worker's index."""
    return Contribution(worker=worker, incarnation=worker, step=number, samples=8)


def push(rounds: BoundedRounds, *workers: int) -> None:
    """These workers' steps go into the open round, each on the version that it was handed."""
    for worker in workers:
        assert rounds.begin(worker, version=rounds.bases[worker]) is Entry.IN
        assert rounds.finish(step(worker), version=rounds.version, attempt=rounds.attempt)


def commit(rounds: SyncRounds) -> list[int]:
    """Commit the open round; the workers whose steps are in it."""
    made_of = [c.worker for c in rounds.begin_commit()]
    rounds.end_commit()
    return made_of


class RoundsMachine(RuleBasedStateMachine, Generic[R]):
    """Against a model that knows for each live worker on which version it computes.

    Attributes:
        on: that version; None for a worker that waits to take part.
        pushing: the workers that were let in to the open round.
        decided: the steps of the round that is being committed, if that has failed on the way.
    """

    rounds: R

    def __init__(self) -> None:
        super().__init__()
        self.on: dict[int, int | None] = {}
        self.pushing: set[int] = set()
        self.steps = 0
        self.decided: list[Contribution] = []

    def one_of(self, data: st.DataObject, workers: Iterable[int]) -> int:
        """Any of these workers."""
        chosen: int = data.draw(st.sampled_from(sorted(workers)))
        return chosen

    def computing(self) -> set[int]:
        """The workers that have a version and have not begun to push their step on it."""
        return {worker for worker, version in self.on.items() if version is not None} - self.pushing

    def sending(self) -> set[int]:
        """The workers that have begun to push their step and have not finished."""
        return self.pushing - self.rounds.done.keys()

    def take_up(self, worker: int) -> None:
        """The worker gets the open round's version."""
        self.on[worker] = self.rounds.version

    def open(self) -> None:
        """Who takes part and waited gets the version."""
        for worker, version in self.on.items():
            if version is None and self.rounds.takes_part(worker):
                self.take_up(worker)

    def vanished(self, worker: int) -> None:
        """The model forgets the worker."""
        del self.on[worker]
        self.pushing.discard(worker)

    @rule(worker=st.integers(0, 5))
    def come(self, worker: int) -> None:
        if worker not in self.on:
            self.rounds.admit(worker)
            self.on[worker] = None
        self.open()

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.computing())
        self.rounds.withdraw(worker)
        del self.on[worker]
        self.open()

    @precondition(lambda self: self.sending())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.steps += 1
        contribution = step(self.one_of(data, self.sending()), self.steps)
        assert self.rounds.finish(contribution, version=self.rounds.version, attempt=self.rounds.attempt)

    @precondition(lambda self: self.on)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        worker = self.one_of(data, self.on)
        in_the_sums = worker in self.sending()
        attempt = self.rounds.attempt
        self.rounds.lose(worker)
        assert self.rounds.can_commit() or not self.decided
        assert (self.rounds.attempt > attempt) == in_the_sums
        self.vanished(worker)
        self.open()

    @precondition(lambda self: self.rounds.can_commit())
    @rule(failures=st.integers(0, 2))
    def decide(self, failures: int) -> None:
        """A commit that fails on the way has been made by some shards: it can only be made again."""
        for _ in range(failures):
            self.decided = self.rounds.begin_commit()
            self.rounds.fail_commit()
