"""One step on its way: which buckets may be pushed, and what of the version has not arrived.

The training thread says here what is ready, and how the script ends the step; `Exchange`'s threads that push,
and `Receiving`'s, say what has arrived, or what has gone wrong. What was begun before a `reset` means nothing
after it: each of their calls says in which generation it was begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import ConnectionLost
from elastic_ps.worker.dialogue import Ending, Step

FINISH = -1
"""Among the missing buckets' indexes: the acknowledgement of the step's end."""


def end_of(shard: int) -> int:
    """Among the missing buckets' indexes: the end of a shard's answer to a pull."""
    return FINISH - 1 - shard


class When(Enum):
    """When a step's buckets are pushed, always in the layout's order."""

    EARLY = auto()
    """While backward runs. The last one waits for the script to end the step: with a single shard it carries
    the end with it."""

    AT_THE_END = auto()
    """When the script has ended the step: the round that the step goes into waits for it from its first push
    on, so others would have to wait for the rest of a slow backward."""

    IN_ONE_CALL = auto()
    """Likewise, by the training thread itself, and the version is the answer to the last push. For a single
    bucket of gradients: handing it to other threads would take longer."""


class Asks(Enum):
    """When this worker asks for the round that its step goes into."""

    NEVER = auto()
    FIRST = auto()
    """Before the first push: the round may be made without it."""
    LAST = auto()
    """When the script has ended the step."""


class Says(Enum):
    """When this worker says which version it computes on."""

    NEVER = auto()
    IF_NEWER = auto()
    """The version is newer than the parameter server believes."""
    ALWAYS = auto()
    """No version is made before all have read the one that they compute on."""


class Pushing(NamedTuple):
    """How steps are pushed.

    Attributes:
        several: after a step this worker asks whether the version needs another one of it.
        together: a version is made of the steps of all workers, which push them as soon as they can. So it is
            worth while to have several threads for a shard on another host, and drafts of the version.
    """

    when: When
    asks: Asks
    says: Says
    several: bool
    together: bool

    @classmethod
    def of(cls, consistency: Consistency, *, small: bool) -> Pushing:
        """As the job's consistency has it. `small`: nothing could be pushed before backward ends."""
        several, stale = consistency.several_steps, consistency.may_be_stale
        one_call = small and not several
        late = consistency.may_be_late
        alone = consistency.each_alone and consistency.reads_one_version
        return cls(
            When.IN_ONE_CALL if one_call else When.AT_THE_END if stale else When.EARLY,
            Asks.LAST if stale or (late and one_call) else Asks.FIRST if late else Asks.NEVER,
            Says.ALWAYS if alone else Says.IF_NEWER if stale else Says.NEVER,
            several,
            consistency.waits_for_all and not one_call,
        )


class Awaited:
    """One step, and what of a version has not arrived. Thread-safe.

    Who reads several attributes, or changes one, holds `lock`.

    Args:
        pushed: the buckets of a step, in their order.
        push: called with a bucket that is to be pushed now; the lock is held.

    Attributes:
        lock: that of `changed`; without that it is entered in a third of the time.
        changed: notified when nothing is missing any more, when something goes wrong, and by who pushes.
        closing: set when everything is to end.
        pushing: how a step is pushed; changed between two steps.
        generation: of what is under way.
        step: whose pushes have begun.
        attempt: of the round that the step is pushed for.
        ending: how the script has ended the step; None before it has.
        owing: the training thread is to push the step when it asks for the version.
        present: which pieces of a bucket that is complete have a gradient; empty: all.
        ready_at: when a bucket was complete, by the monotonic clock in ns.
        missing: the buckets that have not arrived, `FINISH`, and `end_of` shards.
        versions: of the buckets that have arrived; not of those that never change.
        error: what has gone wrong.
    """

    def __init__(self, pushed: Sequence[Bucket], push: Callable[[Bucket], object]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closing = threading.Event()
        self.pushing: Pushing
        self.generation = 0
        self.step: Step | None = None
        self.attempt = 0
        self.ending: Ending | None = None
        self.owing = False
        self.present: dict[int, Sequence[bool]] = {}
        self.ready_at: dict[int, int] = {}
        self.missing: set[int] = set()
        self.versions: dict[int, int] = {}
        self.error: BaseException | None = None
        self._pushed, self._push = pushed, push
        self._ready = self._begun = self._acknowledged = 0  # how many buckets, in their order

    def begin(self, step: Step) -> None:
        """A step begins; the lock is held."""
        self.generation += 1  # a call for the step before may still be under way, if that was given up
        self.step, self.attempt, self.ending, self.error = step, 0, None, None
        self._ready = self._begun = self._acknowledged = 0
        self.present.clear()

    def reset(self) -> None:
        """Forget the step under way and what went wrong."""
        with self.lock:
            self.generation += 1
            self.step, self.error, self.ending, self.owing = None, None, None, False
            self.missing.clear()
            self.changed.notify_all()

    def close(self) -> None:
        """Everything is to end."""
        with self.lock:
            self.closing.set()
            self.changed.notify_all()

    # --- what is pushed

    @property
    def all_ready(self) -> bool:
        """Whether all buckets of the step are complete."""
        return self._ready == len(self._pushed)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket is complete. Pushes it when those before it are pushed."""
        with self.lock:
            self.present[bucket.index] = () if all(present) else tuple(present)
            self.ready_at[bucket.index] = time.monotonic_ns()
            while self._ready < len(self._pushed) and self._pushed[self._ready].index in self.present:
                self._ready += 1
            self._push_due()

    def end(self, ending: Ending) -> None:
        """The script has ended the step: push the rest. The lock is held."""
        self.ending = ending
        self._owe()

    def restart(self, attempt: int, generation: int) -> None:
        """The round starts again: everything is to be pushed once more, for another attempt."""
        with self.lock:
            if generation == self.generation and attempt > self.attempt:
                self.attempt = attempt
                self._begun = self._acknowledged = 0
                self._owe()

    def _owe(self) -> None:
        self.owing = self.pushing.when is When.IN_ONE_CALL
        self._push_due()
        self.changed.notify_all()

    def _push_due(self) -> None:
        """Push what may be pushed by now; the lock is held."""
        due = self._ready
        if self.pushing.when is When.IN_ONE_CALL:
            return
        if self.ending is None:
            due = min(due, len(self._pushed) - 1) if self.pushing.when is When.EARLY else 0
        for bucket in self._pushed[self._begun : due]:
            self._push(bucket)
        self._begun = max(self._begun, due)

    def acknowledged(self) -> bool:
        """A bucket is pushed; returns whether all are, and the step has ended. The lock is held."""
        self._acknowledged += 1
        self.changed.notify_all()
        return self._acknowledged == len(self._pushed) and self.ending is not None

    def only_last_is_left(self, generation: int, attempt: int) -> bool:
        """Wait, holding the lock, until only the last bucket is left. False if its push is not due."""
        others = len(self._pushed) - 1
        self.changed.wait_for(lambda: self._acknowledged >= others or not self.is_due(generation, attempt))
        return self.is_due(generation, attempt)

    def is_due(self, generation: int, attempt: int) -> bool:
        """Whether a push that was begun in this generation, for this attempt, is of use."""
        if self.error is not None or self.closing.is_set():
            return False
        return (generation, attempt) == (self.generation, self.attempt)

    # --- what arrives

    def expect(self, what: Collection[int]) -> None:
        """Nothing of it has arrived. The lock is held."""
        self.missing = set(what)

    def arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        """A bucket, of this version if it has one, or the end of something."""
        with self.lock:
            if generation == self.generation:
                if version is not None:
                    self.versions[what] = version
                self.missing.discard(what)
                if not self.missing:
                    self.changed.notify_all()

    def fail(self, error: BaseException, generation: int) -> None:
        """Something has gone wrong; the first counts."""
        with self.lock:
            if generation == self.generation:
                self.error = self.error or error
                self.changed.notify_all()

    def goes_on(self, generation: int) -> bool:
        """Whether what was begun in this generation is of use."""
        return generation == self.generation and not self.closing.is_set()

    def wait(self, seconds: float) -> bool:
        """Block until nothing is missing any more. Returns False if something still is.

        Raises:
            BaseException: what has gone wrong.
        """
        with self.lock:
            over = self.changed.wait_for(
                lambda: not self.missing or self.error is not None or self.closing.is_set(), timeout=seconds
            )
            if self.error is not None:
                raise self.error
            if self.missing and self.closing.is_set():
                raise ConnectionLost("this worker has left the job")
            return over
