"""The state of a step that is being pushed: which buckets may go, and which parts of the version are missing.

A call that began before a `reset`, or for the previous step, means nothing afterwards. So its result is
reported with the generation in which it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.partition import Bucket

E = TypeVar("E")

FINISH = -1
"""Stands among the missing buckets for the acknowledgement of the step's end."""


def end_of(shard: int) -> int:
    """Stands among the missing buckets for the end of a shard's answer to a pull."""
    return FINISH - 1 - shard


class PushTime(Enum):
    """When the buckets of a step are pushed. They always go in the layout's order."""

    EARLY = auto()
    """During backward. The last bucket waits for the end of the step, which it carries with a single
    shard."""

    AT_THE_END = auto()
    """When the script has ended the step. Its round waits from the first push on, so with earlier pushes
    others would wait for a slow backward."""

    IN_ONE_CALL = auto()
    """Likewise, by the training thread itself, and the version is the answer to the last push. For a single
    bucket of gradients: handing it to other threads would take longer."""


class BeginTime(Enum):
    """When this worker asks for admission to the round of its step."""

    NEVER = auto()
    FIRST = auto()
    """Before the first push, since the round may leave the step out."""
    LAST = auto()
    """When the script has ended the step."""


class BaseReport(Enum):
    """When this worker reports the version that it computes on."""

    NEVER = auto()
    IF_NEWER = auto()
    """If the version is newer than the parameter server believes."""
    ALWAYS = auto()
    """Always: no version is made before all workers have read the one that they compute on."""


class PushPolicy(NamedTuple):
    """How steps are pushed.

    Attributes:
        several: whether this worker asks after a step if the version needs another one.
        together: whether a version has the steps of all workers, which push as soon as they can. Then several
            threads for a shard on another host, and drafts of the version, pay off.
    """

    pushes: PushTime
    begins: BeginTime
    reports_base: BaseReport
    several: bool
    together: bool

    @classmethod
    def of(cls, consistency: Consistency, *, small: bool) -> PushPolicy:
        """The choice for a job's consistency. `small`: nothing can be pushed before the end of backward."""
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
    """The pushed buckets of a step, and the missing parts of its version.

    Methods that return buckets return those to push now.

    Args:
        pushed: the buckets of a step, in order.

    Attributes:
        pushing: how a step is pushed. It may change between two steps.
        generation: the number of the calls under way.
        attempt: the attempt of the round that the step is pushed for.
        ending: how the script has ended the step; None before it has.
        owing: whether the training thread has to push the step when it asks for the version.
        present: for each complete bucket, which pieces have a gradient; empty: all.
        missing: the buckets that have not arrived, `FINISH`, and `end_of` shards.
        versions: the versions of buckets that have arrived, except for those that never change.
        error: the first error.
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
        self._ready = self._begun = self._acknowledged = 0  # the number of buckets, in order

    def begin(self) -> None:
        """Begin a step. A call for the previous one may still be under way if that was given up."""
        self.generation += 1
        self.attempt, self.ending, self.error = 0, None, None
        self._ready = self._begun = self._acknowledged = 0
        self.present.clear()

    def reset(self) -> None:
        """Forget the step under way and its error."""
        self.generation += 1
        self.error, self.ending, self.owing = None, None, False
        self.missing.clear()

    # --- what is pushed

    @property
    def all_ready(self) -> bool:
        """Whether all buckets of the step are complete."""
        return self._ready == len(self._pushed)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> Sequence[Bucket]:
        """Note that a bucket is complete. It is pushed after those before it."""
        self.present[bucket.index] = () if all(present) else tuple(present)
        while not self.all_ready and self._pushed[self._ready].index in self.present:
            self._ready += 1
        return self._due()

    def end(self, ending: E) -> Sequence[Bucket]:
        """The script has ended the step."""
        self.ending = ending
        return self._rest()

    def restart(self, attempt: int, generation: int) -> Sequence[Bucket]:
        """Start over for another attempt of the round: everything is pushed once more."""
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
        """Note a pushed bucket. Returns how the step has ended, if it has and all buckets are pushed."""
        self._acknowledged += 1
        return self.ending if self._acknowledged == len(self._pushed) else None

    @property
    def only_last_is_left(self) -> bool:
        """Whether all buckets but the last one are pushed."""
        return self._acknowledged >= len(self._pushed) - 1

    def is_due(self, generation: int, attempt: int) -> bool:
        """Whether a push of this generation and attempt is still useful."""
        return self.error is None and (generation, attempt) == (self.generation, self.attempt)

    # --- what arrives

    @property
    def over(self) -> bool:
        """Whether nothing is missing, or an error has occurred."""
        return not self.missing or self.error is not None

    def arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        """Note the arrival of a bucket, with its version if it has one, or of an end."""
        if generation == self.generation:
            if version is not None:
                self.versions[what] = version
            self.missing.discard(what)

    def fail(self, error: BaseException, generation: int) -> None:
        """Note an error."""
        if generation == self.generation:
            self.error = self.error or error
