"""One step on its way: which of its buckets may be pushed, and what of the version has not arrived.

What was begun before a `reset`, or for the step before, means nothing after it: who says what has come of it
names the generation in which it was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.partition import Bucket

E = TypeVar("E")

FINISH = -1
"""Among the missing buckets' indexes: the acknowledgement of the step's end."""


def end_of(shard: int) -> int:
    """Among the missing buckets' indexes: the end of a shard's answer to a pull."""
    return FINISH - 1 - shard


class PushTime(Enum):
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


class BeginTime(Enum):
    """When this worker asks for the round that its step goes into."""

    NEVER = auto()
    FIRST = auto()
    """Before the first push: the round may be made without it."""
    LAST = auto()
    """When the script has ended the step."""


class BaseReport(Enum):
    """When this worker says which version it computes on."""

    NEVER = auto()
    IF_NEWER = auto()
    """The version is newer than the parameter server believes."""
    ALWAYS = auto()
    """No version is made before all have read the one that they compute on."""


class PushPolicy(NamedTuple):
    """How steps are pushed.

    Attributes:
        several: after a step this worker asks whether the version needs another one of it.
        together: a version is made of the steps of all workers, which push them as soon as they can. So it is
            worth while to have several threads for a shard on another host, and drafts of the version.
    """

    pushes: PushTime
    begins: BeginTime
    reports_base: BaseReport
    several: bool
    together: bool

    @classmethod
    def of(cls, consistency: Consistency, *, small: bool) -> PushPolicy:
        """As the job's consistency has it. `small`: nothing could be pushed before backward ends."""
        several, stale = consistency.several_steps, consistency.may_be_stale
        one_call = small and not several
        late = consistency.may_be_late
        alone = consistency.each_alone and consistency.reads_one_version
        return cls(
            PushTime.IN_ONE_CALL if one_call else PushTime.AT_THE_END if stale else PushTime.EARLY,
            BeginTime.LAST if stale or (late and one_call) else BeginTime.FIRST if late else BeginTime.NEVER,
            BaseReport.ALWAYS if alone else BaseReport.IF_NEWER if stale else BaseReport.NEVER,
            several,
            consistency.waits_for_all and not one_call,
        )


class Progress(Generic[E]):
    """What of one step is pushed, and what of its version has not arrived.

    The methods that return buckets return those that are to be pushed now.

    Args:
        pushed: the buckets of a step, in their order.

    Attributes:
        pushing: how a step is pushed; changed between two steps.
        generation: of what is under way.
        attempt: of the round that the step is pushed for.
        ending: how the script has ended the step; None before it has.
        owing: the training thread is to push the step when it asks for the version.
        present: which pieces of a bucket that is complete have a gradient; empty: all.
        missing: the buckets that have not arrived, `FINISH`, and `end_of` shards.
        versions: of the buckets that have arrived; not of those that never change.
        error: what has gone wrong first.
    """

    def __init__(self, pushed: Sequence[Bucket], pushing: PushPolicy) -> None:
        self.pushing = pushing
        self.generation = self.attempt = 0
        self.ending: E | None = None
        self.owing = False
        self.present: dict[int, Sequence[bool]] = {}
        self.missing: set[int] = set()
        self.versions: dict[int, int] = {}
        self.error: BaseException | None = None
        self._pushed = pushed
        self._ready = self._begun = self._acknowledged = 0  # how many buckets, in their order

    def begin(self) -> None:
        """A step begins. A call for the one before may still be under way, if that was given up."""
        self.generation += 1
        self.attempt, self.ending, self.error = 0, None, None
        self._ready = self._begun = self._acknowledged = 0
        self.present.clear()

    def reset(self) -> None:
        """Forget the step under way and what went wrong."""
        self.generation += 1
        self.error, self.ending, self.owing = None, None, False
        self.missing.clear()

    # --- what is pushed

    @property
    def all_ready(self) -> bool:
        """Whether all buckets of the step are complete."""
        return self._ready == len(self._pushed)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> Sequence[Bucket]:
        """A bucket is complete. It is pushed when those before it are."""
        self.present[bucket.index] = () if all(present) else tuple(present)
        while not self.all_ready and self._pushed[self._ready].index in self.present:
            self._ready += 1
        return self._due()

    def end(self, ending: E) -> Sequence[Bucket]:
        """The script has ended the step."""
        self.ending = ending
        return self._rest()

    def restart(self, attempt: int, generation: int) -> Sequence[Bucket]:
        """The round starts again: everything is to be pushed once more, for another attempt."""
        if generation != self.generation or attempt <= self.attempt:
            return ()
        self.attempt = attempt
        self._begun = self._acknowledged = 0
        return self._rest()

    def _rest(self) -> Sequence[Bucket]:
        self.owing = self.pushing.pushes is PushTime.IN_ONE_CALL
        return self._due()

    def _due(self) -> Sequence[Bucket]:
        due = self._ready
        if self.pushing.pushes is PushTime.IN_ONE_CALL:
            return ()
        if self.ending is None:
            due = min(due, len(self._pushed) - 1) if self.pushing.pushes is PushTime.EARLY else 0
        first, self._begun = self._begun, max(self._begun, due)
        return self._pushed[first:due]

    def acknowledge(self) -> E | None:
        """A bucket is pushed; returns what is to be said of the step's end, if all are and it has ended."""
        self._acknowledged += 1
        return self.ending if self._acknowledged == len(self._pushed) else None

    @property
    def only_last_is_left(self) -> bool:
        """Whether all buckets but the last one are pushed."""
        return self._acknowledged >= len(self._pushed) - 1

    def is_due(self, generation: int, attempt: int) -> bool:
        """Whether a push that was begun in this generation, for this attempt, is of use."""
        return self.error is None and (generation, attempt) == (self.generation, self.attempt)

    # --- what arrives

    @property
    def over(self) -> bool:
        """Whether nothing is missing any more, or something has gone wrong."""
        return not self.missing or self.error is not None

    def arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        """A bucket, of this version if it has one, or the end of something."""
        if generation == self.generation:
            if version is not None:
                self.versions[what] = version
            self.missing.discard(what)

    def fail(self, error: BaseException, generation: int) -> None:
        """Something has gone wrong."""
        if generation == self.generation:
            self.error = self.error or error
