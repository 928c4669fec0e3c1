"""Where the workers of a job with `strategy: all-reduce` meet: shard 0 says who makes a round, and when.

The decisions are `core.reduced`'s. Gradients and values do not come here, but for a version that is to be
written to disk, which one worker sends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ps.core.reduced import Custody, Peer, Place, ReducedRounds
from elastic_ps.core.stages import CourseEvent
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.checkpointer import Checkpointer
from elastic_ps.server.commit import CommitCoordinator
from elastic_ps.server.guarded import Guarded, Look
from elastic_ps.server.state import JobState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Met:
    """The open round, for a worker that makes it or is to make it.

    Attributes:
        version, attempt: of the round.
        lacking: the group meets at `Place.STATE` first.
        group: who makes it, as worker, incarnation and where it is found; a worker's rank is its place here.
        together: all of the group have come to the place that was asked for.
        all_hold: with `together` at `Place.STATE`: nobody has to get the version.
        source: with `together` at `Place.STATE`: of whom the others get the version; None: of the parameter
            server.
        values_are_here: the parameter server has the values of the version.
        send: the worker is to send its values, which are of the version, to the parameter server now.
    """

    version: int
    attempt: int
    lacking: bool
    group: Sequence[tuple[int, int, Peer]]
    together: bool = False
    all_hold: bool = False
    source: int | None = None
    values_are_here: bool = False
    send: bool = False


class Meeting:
    """Answers the calls of the workers that make the steps themselves. Thread-safe; methods may block."""

    def __init__(self, job: Guarded, commit: CommitCoordinator, checkpoints: Checkpointer) -> None:
        self._job, self._commit, self._checkpoints = job, commit, checkpoints

    def meet(
        self,
        worker: int,
        incarnation: int,
        *,
        version: int,
        attempt: int | None,
        place: Place | None,
        holds: bool,
        broken: bool = False,
    ) -> Met | None:
        """Come to a place of the open round, and wait for the others; or learn that another round is open.

        Args:
            version, attempt: of the round that the worker knows; without an attempt it is answered at once.
            place: None: the worker has come to the end of its step, and waits for the next round.
            holds: the worker has the values of `version`.
            broken: the group of this attempt cannot speak to each other, so that there has to be another.

        Returns None if nothing has happened: ask again.

        Raises:
            Refused: STALE_INCARNATION; LATE: the worker does not make the open round.
        """

        def decide(state: JobState) -> Met | Look | None:
            stay = state.members.check(worker, incarnation, self._job.clock())
            rounds, custody = _of(state)
            if (rounds.version, rounds.attempt) != (version, attempt):
                return None if self._job.behind else self._met(state, worker)
            if broken and not rounds.decided:
                text = "the group of version %d, attempt %d, has lost the connection: worker %d tells it"
                logger.info(text, version, attempt, worker)
                state.begin_again()
                self._job.told()
                return Look.AGAIN
            if place is None:
                return None
            if not rounds.takes_part(worker):
                text = f"worker {worker} does not make the round on version {version}"
                raise Refused(RefusalCode.LATE, text)
            if rounds.meet(worker, place, holds=holds):
                if place is Place.GRADIENTS:
                    custody.holders.add(stay.incarnation)
                self._job.changed.notify_all()
            if not rounds.together(place) or self._job.behind:
                return None
            if place is Place.GRADIENTS or rounds.source is not None or state.values_are_here:
                return self._met(state, worker, place)
            self._job.turn(CourseEvent.SPOIL)  # nobody of the group has the version
            return Look.AGAIN

        return self._job.poll(decide, self._commit.drive)

    def _met(self, state: JobState, worker: int, place: Place | None = None) -> Met:
        rounds, custody = _of(state)
        live = state.members.live
        group = [(live[other], live[other].incarnation) for other in rounds.group if other in live]
        wanted = custody.wanted == rounds.version and not state.values_are_here
        return Met(
            rounds.version,
            rounds.attempt,
            rounds.lacking,
            [(stay.worker, number, custody.peers[number]) for stay, number in group],
            together=place is not None,
            all_hold=all(rounds.arrived.get(Place.STATE, {}).values()),
            source=rounds.source if place is Place.STATE else None,
            values_are_here=state.values_are_here,
            send=wanted and worker == min(rounds.holders, default=None),
        )

    def parts(self, worker: int, incarnation: int, *, version: int) -> bool:
        """A worker that has the values of `version` stops making rounds: is it to send them first?

        If no other worker of the open round has them, they would be lost with this one.
        """
        with self._job.settled() as state:
            self._job.state.members.check(worker, incarnation, self._job.clock())
            rounds, _ = _of(state)
            return rounds.version == version and rounds.part(worker) and not state.values_are_here

    def sent(self, worker: int, incarnation: int, *, version: int) -> None:
        """A worker has sent the values of `version`, and the shard has them all.

        They are written to disk if that was wanted. Blocks for the copy in memory.

        Raises:
            Refused: WRONG_VERSION; another version has been made meanwhile.
        """
        with self._job.settled() as state:
            self._job.state.members.check(worker, incarnation, self._job.clock())
            _, custody = _of(state)
            if version != state.version:
                text = f"values of version {version} came, but version {state.version} is there"
                raise Refused(RefusalCode.WRONG_VERSION, text)
            custody.version = version
            wanted = custody.wanted == version
            self._job.changed.notify_all()
        if wanted:
            self._checkpoints.order()


def _of(state: JobState) -> tuple[ReducedRounds, Custody]:
    rounds, custody = state.rounds, state.custody
    if custody is None or not isinstance(rounds, ReducedRounds):
        raise Refused(RefusalCode.INVALID, "workers meet only in a job with strategy all-reduce")
    return rounds, custody
