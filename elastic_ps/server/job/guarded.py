"""The state of a job under one lock, for all threads of shard 0."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum, auto
from typing import TypeVar

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.traffic import Traffic
from elastic_ps.core.all_reduce import StateHolders
from elastic_ps.core.membership import Member
from elastic_ps.core.stages import COURSES, ORDER_STATES, Course, CourseEvent, OrderEvent, OrderState
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.job.state import JobState
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.transport import messages_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Look(Enum):
    """The next action of `Guarded.poll`, if it has no answer."""

    AGAIN = auto()
    """Call `decide` again at once."""


class Guarded:
    """A job's state, its lock, and the conditions of the threads that share it.

    No I/O happens under the lock. Only a thread that holds the lock reads or changes an attribute, except
    `lock`, `changed`, `spec`, `clock` and the properties.

    Attributes:
        spec, mutable: the job's spec, with the mutable fields of this term, and these fields.
        clock: the monotonic time in seconds.
        lock: the lock. Entering it takes a third of the time of entering a condition.
        changed: a condition of the lock: the state has changed.
        ticking: another condition of the lock, for the ticker. A round does not notify it.
        grace_until: the time by `clock` until which the open round waits for late workers, as computed last;
            None: it does not wait for a certain time.
        state: replaced when the job goes back to a checkpoint; see `replace`.
        course: whether the job makes versions and answers calls.
        order: whether the shards know the state of the round.
    """

    def __init__(
        self,
        spec: TrainingJobSpec,
        term: int,
        *,
        clock: Callable[[], float] | None = None,
        mutable: MutableFields | None = None,
        limits: ServerLimits = USUAL,
    ) -> None:
        self.limits = limits
        self.mutable = mutable or MutableFields.of(spec)
        self.spec = self.mutable.applied_to(spec)
        self.clock = clock or time.monotonic
        self.lock = threading.RLock()
        self.changed, self.ticking = threading.Condition(self.lock), threading.Condition(self.lock)
        self.state, self._ended_traffic = self.blank(term), Traffic()
        self.grace_until: float | None = None
        self.course, self.order = Course.RUNNING, OrderState.SENT

    def note_course(self, event: CourseEvent) -> None:
        """Change the course, and notify waiting threads. The lock is held. Raises ImpossibleTransition."""
        self.course = COURSES.after(self.course, event)
        self.changed.notify_all()

    def note_order(self, event: OrderEvent) -> None:
        """Note an event of the orders to the shards. The lock is held. Raises ImpossibleTransition."""
        self.order = ORDER_STATES.after(self.order, event)

    @property
    def closing(self) -> bool:
        """Whether the parameter server is ending, and answers no calls."""
        return self.course in (Course.CLOSING, Course.CLOSING_LOST)

    @property
    def rolling_back(self) -> bool:
        """Whether the job has to go back to a checkpoint."""
        return self.course in (Course.ROLLING_BACK, Course.CLOSING_LOST)

    @property
    def sending(self) -> bool:
        """Whether a thread is sending an order to the shards."""
        return self.order in (OrderState.SENDING, OrderState.OUTDATED)

    @property
    def unsent(self) -> bool:
        """Whether something has changed that no order has sent."""
        return self.order in (OrderState.UNSENT, OrderState.OUTDATED)

    @property
    def behind(self) -> bool:
        """Whether the shards may not know the present state."""
        return self.order is not OrderState.SENT

    def blank(self, term: int) -> JobState:
        """The state of a job without a model, in this term."""
        spec, holders = self.spec, StateHolders() if self.spec.all_reduce else None
        lease = spec.worker.lease_duration
        state = JobState(
            term, lease, spec.consistency, spec.data, mutable=self.mutable, state_holders=holders
        )
        # If all checkpoints were lost, the same term was begun before. Its workers must not pass for members.
        state.members.last_incarnation += secrets.randbits(31)
        return state

    def replace(self, state: JobState) -> None:
        """Continue with this state, which has no members. The lock is held."""
        self.state, self._ended_traffic = state, self.traffic

    @property
    def traffic(self) -> Traffic:
        """The traffic of all workers since this object was created. It never falls. The lock is held."""
        live = self.state.members.live.values()
        return sum((Traffic(**member.traffic) for member in live), self._ended_traffic)

    def tune(self, mutable: MutableFields) -> None:
        """Use these mutable fields from now on. The lock is held."""
        self.mutable = self.state.mutable = mutable
        self.spec = mutable.applied_to(self.spec)

    @property
    def term(self) -> int:
        """The parameter server's term. It grows when the job goes back to a checkpoint."""
        with self.lock:
            return self.state.term

    @contextmanager
    def settled(self) -> Iterator[JobState]:
        """Hold the lock while no round is being committed. Blocks for `limits.settled` at most.

        Raises:
            Refused: NOT_READY; a round is still being committed, or the job is going back to a checkpoint.
        """
        with self.lock:
            yield self._settle()

    def _settle(self) -> JobState:
        """The state as soon as it is settled; see `settled`. The lock is held."""
        settled = self.changed.wait_for(
            lambda: self.closing or (self.course is Course.RUNNING and not self.state.rounds.committing),
            timeout=self.limits.settled.total_seconds(),
        )
        if self.closing:
            raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
        if not settled:
            doing = {
                Course.ROLLING_BACK: "going back to a checkpoint",
                Course.PAUSED: "writing a checkpoint to continue from",
            }.get(self.course, "committing a round")
            raise Refused(RefusalCode.NOT_READY, f"the parameter server is still {doing}; ask again")
        return self.state

    def check(self, caller: pb.Caller) -> Member:
        """The member that calls. The lock is held. Raises Refused: see `Members.check`."""
        return self.state.members.check(caller.worker, caller.incarnation, self.clock())

    @contextmanager
    def member(self, caller: pb.Caller) -> Iterator[tuple[JobState, Member]]:
        """`settled`, for the member that calls. Raises Refused, too, if the caller is not a member."""
        with self.lock:
            yield self._settle(), self.check(caller)

    def poll(self, decide: Callable[[JobState], T | Look | None], act: Callable[[], object]) -> T | None:
        """Answer a call that waits for the state: call `decide` until it returns an answer.

        Blocks for `limits.answer` at most. Then it returns None: nothing has happened, and the caller repeats
        the call.

        Args:
            decide: called while the state is `settled`.
            act: called before each `decide`, without the lock, to do what `decide` made necessary.

        Raises:
            Refused: as `settled`, or by `decide`.
        """
        deadline = self.clock() + self.limits.answer.total_seconds()
        while True:
            act()
            with self.settled() as state:
                found = decide(state)
                if found is Look.AGAIN:
                    continue
                if found is not None:
                    return found
                left = deadline - self.clock()
                if left <= 0:
                    return None
                self.changed.wait(min(left, self.limits.tick.total_seconds()))  # mutant: equal

    def note_change(self) -> None:
        """Note a change that shards or waiting threads have to know. The lock is held."""
        self.note_order(OrderEvent.CHANGE)
        self.changed.notify_all()

    def drop(self, worker: int, outcome: str, reason: str = "") -> None:
        """Remove a member. The lock is held."""
        state, attempt = self.state, self.state.rounds.attempt
        if (member := state.drop(worker, outcome, reason, self.clock())) is None:
            return
        self._ended_traffic += Traffic(**member.traffic)
        if state.model is None:  # there is no need to go back to a checkpoint
            self.note_course(CourseEvent.RESTORE)
        why = f": {reason}" if reason else ""
        gone = {"lost": "was lost", "hung": "was declared hung"}.get(outcome, outcome)
        logger.info("worker %d %s at version %d%s", worker, gone, state.version, why)
        if state.rounds.attempt != attempt:
            text = "the round on version %d starts again, as attempt %d"
            logger.info(text, state.version, state.rounds.attempt)
        self.note_change()

    def hasten(self) -> None:
        """See `JobState.hasten`. Call it when the round may have its quorum. The lock is held."""
        now, before = self.clock(), self.grace_until
        left = self.state.hasten(now)
        self.grace_until = now + left if left else None
        if left == 0:
            self.note_change()
        elif self.grace_until is not None and (before is None or self.grace_until < before):
            self.ticking.notify_all()

    def until_next_look(self, most: timedelta) -> float:
        """Seconds until the ticker has to look again, `most` at most. The lock is held."""
        left = math.inf if self.grace_until is None else max(0.0, self.grace_until - self.clock())
        return min(most.total_seconds(), left)

    def drop_silent_and_hung(self, queued: Set[int]) -> None:
        """Drop members whose lease has ended, or for which the others wait too long. The lock is held.

        Args:
            queued: see `JobState.hung`.
        """
        now = self.clock()
        for worker in self.state.members.expired(now):
            self.drop(worker, "lost", f"silent for {self.spec.worker.lease_duration.total_seconds():g} s")
        limit = self.spec.worker.progress_timeout
        for worker, seconds in self.state.hung(now, limit, queued=queued).items():
            self.drop(worker, "hung", f"the others have waited for its step for {seconds:.1f} s")
