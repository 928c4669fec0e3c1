"""Pulls of buckets and of drafts: the next values of buckets, made before their round is decided.

As soon as a bucket has the gradients of all workers that take part, its next values can be computed and sent.
But the round may still be restarted, because another bucket may not become complete. So the step is made on a
copy of the bucket. If the round has the same contributions as the draft, the copy replaces the bucket, and
workers that have the draft do not get the values again. Otherwise the draft is dropped, and the bucket is
unchanged.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec import as_bytes
from elastic_ps.codec.changes import Delta
from elastic_ps.core.partition import Rule
from elastic_ps.core.sequence import PushLog
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.limits import ServerLimits
from elastic_ps.server.shards.values import BucketValues
from elastic_ps.transport.base import EMPTY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartedAs:
    """The answer to a pull when the round was restarted: push all buckets again, for this attempt."""

    attempt: int


@dataclass(frozen=True)
class Pulled:
    """A bucket that has reached the version asked for.

    Attributes:
        unchanged: the caller has these values already.
        copied: `data` is a copy, which never changes.
        stands: the version has the values of the draft that the caller has.
        draft: the number of the draft, if the bucket is one; 0 for the version itself.
        delta: the caller adds this to its values. `data` is empty then.
        last: the caller has all buckets with this one, and need not take part until then.
    """

    bucket: int
    version: int
    data: memoryview
    unchanged: bool = False
    copied: bool = False
    stands: bool = False
    draft: int = 0
    delta: Delta | None = None
    last: bool = False


@dataclass(frozen=True)
class Basis:
    """The inputs of a bucket's step.

    Attributes:
        version: the version that the step makes.
        attempt: the attempt of the round.
        contributors: (worker, incarnation, step) of all contributions.
        weight: the sum of their weights.
        groups: the optimizer's hyperparameters.
    """

    version: int
    attempt: int
    contributors: frozenset[tuple[int, int, int]]
    weight: float
    groups: Sequence[Mapping[str, Any]]


class DraftMaker:
    """The drafts of a shard's buckets. Thread-safe, if two threads never use the same bucket.

    Args:
        make: gives new values with an optimizer for each bucket, by its index. It is called once.
        fit: whether a second copy of the buckets is allowed. It is called once.
    """

    def __init__(self, make: Callable[[], dict[int, BucketValues]], fit: Callable[[], bool]) -> None:
        self._make, self._fit = make, fit
        self._spare: dict[int, BucketValues] = {}
        self._made: dict[int, tuple[BucketValues, Basis]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    @cached_property
    def fit(self) -> bool:
        """Whether drafts may be made. Raises what `usual_state` raises."""
        if not (fit := self._fit()):
            logger.info("no drafts are made: a copy of the model is larger than parameterServer.draftBytes")
        return fit

    def make(self, live: BucketValues, basis: Basis) -> BucketValues:
        """The draft of a bucket; `draft` is its number. A draft of the same gradients is used again.

        No number is used twice. So a worker never takes an older draft for this one, even if the memory was
        overwritten while it was sent. Blocks for the optimizer's step.
        """
        index = live.bucket.index
        there = self._made.get(index)
        if there is not None and replace(there[1], groups=basis.groups) == basis:  # of the same gradients
            return there[0]
        self._made.pop(index, None)
        with self._lock:
            if not self._spare:
                self._spare = self._make()
        values = self._spare[index]
        values.mirror(live)
        values.apply(basis.groups, basis.version)
        values.draft = next(self._numbers)
        self._made[index] = values, basis
        return values

    def take(self, live: BucketValues, basis: Basis) -> BucketValues | None:
        """The draft that replaces `live`, whose memory is reused; None if no draft has this `basis`."""
        index = live.bucket.index
        draft, made_of = self._made.pop(index, (None, None))
        if draft is None or made_of != basis:
            return None
        self._spare[index] = live
        return draft


@dataclass(frozen=True, kw_only=True)
class Pull:
    """The request of a worker for values.

    Attributes:
        buckets: their numbers. A caller that wants none still waits for the version.
        version: the version that the buckets must have reached.
        term: the term in which the caller joined.
        attempt: the attempt of the open round; None: do not say when the round is restarted.
        contributor: worker and incarnation of a caller that takes part in rounds. If rounds wait for it,
            values cannot change before its next push, so they are not copied. A small last bucket is copied.
        held: the caller has the values of this version and term, or newer ones. Unchanged buckets are not
            sent, and a delta may replace others.
        drafts: the numbers of the caller's drafts, by bucket. A draft that has become the version is not sent
            again.
        groups: the expected hyperparameters of the round, to get drafts of it; None: no drafts are wanted.
            Only for contributors, in modes whose rounds wait for all.
    """

    buckets: Sequence[int]
    version: int
    term: int
    attempt: int | None = None
    contributor: tuple[int, int] | None = None
    held: int | None = None
    drafts: Mapping[int, int] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] | None = None


class OpenRound:
    """A shard's record of the open round, under one lock, and the threads that wait for it to change.

    Attributes:
        buckets: the shard's buckets, by their numbers. A draft that stands replaces its bucket.
        stepping, adding: the locks of the buckets' values and sums; see `shard`.
        lock: guards everything else.
        changed: notified when a version is made or another round opens.
        added: notified then, too, and when a push ends.
        log: what has been pushed.
        torn: some buckets are stepped and others are not, so the values belong to no version.
    """

    def __init__(self, log: PushLog, buckets: dict[int, BucketValues], limits: ServerLimits) -> None:
        self.buckets = buckets
        self.stepping, self.adding = ({index: threading.Lock() for index in buckets} for _ in range(2))
        self.lock = threading.RLock()
        self.changed, self.added = threading.Condition(self.lock), threading.Condition(self.lock)
        self.log, self.torn = log, False
        self._limits = limits
        self._retired: RefusalCode | None = None

    def wait(self, ready: Callable[[], bool], *, on: threading.Condition | None = None) -> bool:
        """Wait for `ready`, for `shard_answer` at most. The lock is held. `ready` may raise."""

        def look() -> bool:
            if self._retired is not None:
                raise Refused(self._retired, f"term {self.log.term} of this shard is over")
            return ready()

        return look() or (on or self.changed).wait_for(
            look, timeout=self._limits.shard_answer.total_seconds()
        )

    def wake(self) -> None:
        """Wake all threads that wait. The lock is held."""
        self.changed.notify_all()
        self.added.notify_all()

    def retire(self, code: RefusalCode) -> None:
        """Refuse all waiting calls from now on."""
        with self.lock:
            self._retired = code
            self.wake()

    def require_part(self, contributor: tuple[int, int] | None) -> None:
        """Raise Refused (STALE_INCARNATION) if a contributor no longer takes part. The lock is held."""
        if contributor is not None and self.log.expected.get(contributor[0]) != contributor[1]:
            worker, incarnation = contributor
            text = f"worker {worker} with incarnation {incarnation} no longer takes part"
            raise Refused(RefusalCode.STALE_INCARNATION, text)


class Pulls:
    """Hands out a shard's buckets. Thread-safe."""

    def __init__(
        self,
        open_round: OpenRound,
        drafts: DraftMaker,
        *,
        consistency: Consistency,
        limits: ServerLimits,
        trace: Trace,
    ) -> None:
        self._round, self._drafts = open_round, drafts
        self._consistency, self._limits, self._trace = consistency, limits, trace

    def pull(self, asked: Pull) -> Iterator[Pulled | RestartedAs | None]:
        """Yield drafts if they are wanted, as soon as they can be made. Then yield each bucket. Blocks.

        Yields None if nothing happens for `ServerLimits.shard_answer`.

        Raises:
            Refused: STALE_TERM: the values are of another term. STALE_INCARNATION: a contributor no longer
                takes part, so its drafts, and values that were not copied, may belong to several versions.
                NOT_READY: the shard is about to end.
        """
        have = dict(asked.drafts)
        stable = asked.contributor is not None and self._consistency.reads_one_version
        if asked.groups is not None and (yield from self._ahead(asked, asked.groups, have)):
            return
        wanted: Sequence[int | None] = asked.buckets or [None]
        for index in wanted:
            there = self._await(asked, index)
            if there is not True:
                yield there or None
                return
            if index is not None:
                yield self._read(asked, index, have, stable=stable)
        if stable:
            with self._round.lock:
                self._round.require_part(asked.contributor)

    def _await(
        self, asked: Pull, index: int | None, may_be_made: Callable[[int], bool] | None = None
    ) -> RestartedAs | bool | None:
        """Wait for a bucket, or for the version. True: it is there. False: a draft of it may be made.

        None: nothing has happened for `ServerLimits.shard_answer`.
        """
        log = self._round.log

        def reached() -> bool:
            if index is None:
                return log.version >= asked.version
            values = self._round.buckets[index]  # a constant one is the same at every version
            return values.bucket.rule is Rule.CONSTANT or values.version >= asked.version

        def restarted() -> bool:
            return asked.attempt is not None and (
                log.version == asked.version - 1 and log.attempt > asked.attempt
            )

        def ready() -> bool:
            if reached() or restarted():
                return True
            if index is None or may_be_made is None:
                return False
            self._round.require_part(asked.contributor)
            return may_be_made(index)

        with self._round.lock:
            if asked.term != log.term:
                text = f"the pull is of term {asked.term}, not {log.term}"
                raise Refused(RefusalCode.STALE_TERM, text)
            arrived = self._round.wait(ready, on=None if may_be_made is None else self._round.added)
            if reached():  # and it stays so
                return True
            if not arrived:
                return None
            return RestartedAs(log.attempt) if restarted() else False

    def _read(self, asked: Pull, index: int, have: Mapping[int, int], *, stable: bool) -> Pulled:
        small = self._limits.small_pull
        with self._round.stepping[index]:
            with self._round.lock:
                if stable:
                    self._round.require_part(asked.contributor)
                values = self._round.buckets[index]
            unchanged = asked.held is not None and values.changed <= asked.held
            stands = not unchanged and have.get(index, 0) == values.draft > 0
            delta = None if unchanged or stands else values.delta_for(asked.held)
            last = index == asked.buckets[-1]
            copied = not stable or (last and len(values.memory) <= small)
            data = EMPTY
            if not (unchanged or stands or delta):
                data = values.memory
                if copied and len(data) > small:
                    data = as_bytes(values.values.clone())
                elif copied:  # torch would give up Python's lock, for longer than this takes
                    data = memoryview(bytes(data))
            version = values.version
        last = last and (copied or not data)
        return Pulled(index, version, data, unchanged, copied=copied, stands=stands, delta=delta, last=last)

    def _ahead(
        self, asked: Pull, groups: Sequence[Mapping[str, Any]], have: dict[int, int]
    ) -> Generator[Pulled | RestartedAs | None, None, bool]:
        """Yield drafts, and note their numbers in `have`. Returns whether the pull is answered."""

        def may_be_made(index: int) -> bool:
            log = self._round.log
            return log.version == asked.version - 1 and not self._round.torn and log.has_all(index)

        for index in asked.buckets:
            if index in have or not self._round.buckets[index].may_be_drafted:
                continue
            there = self._await(asked, index, may_be_made)
            if there is True:
                break
            if there is not False:
                yield there
                return True
            try:
                draft = self._draft(index, groups, may_be_made)
            except Exception as error:  # noqa: BLE001 (the round's own step will tell what is wrong)
                logger.info("no draft of bucket %d can be made: %s", index, error)
                break
            if draft is None:
                break
            have[index] = number = draft.draft
            unchanged = asked.held is not None and draft.changed <= asked.held
            delta = None if unchanged else draft.delta_for(asked.held)
            data = EMPTY if unchanged or delta else draft.memory
            yield Pulled(index, asked.version, data, unchanged, draft=number, delta=delta)
        return False

    def _draft(
        self, index: int, groups: Sequence[Mapping[str, Any]], may_be_made: Callable[[int], bool]
    ) -> BucketValues | None:
        """The draft of a bucket; None if it may not be made. Blocks for the optimizer's step.

        Meanwhile nobody steps the bucket or adds to its sum. Others may push and pull.
        """
        if not self._drafts.fit:
            return None
        with self._round.stepping[index], self._round.adding[index]:
            with self._round.lock:
                if not may_be_made(index):
                    return None
                live, log, version = self._round.buckets[index], self._round.log, self._round.log.version + 1
                contributors = frozenset(log.added[index])
                basis = Basis(version, log.attempt, contributors, log.weight(index), tuple(groups))
            started = time.monotonic_ns()
            draft = self._drafts.make(live, basis)
            self._trace.complete("draft", started, time.monotonic_ns(), bucket=index, version=version)
            return draft
