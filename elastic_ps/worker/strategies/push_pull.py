"""The strategy with a parameter server: gradients are pushed, and the versions that it makes of them pulled.

The training thread, in which backward runs, says here which buckets are ready, and when the step ends.
Threads push them while backward goes on, and others, one for each shard, receive the new version. A bucket is
pushed when all before it are, so every worker pushes in the same order. A shard on another host has several
threads for that, so that the network is not idle while one of them waits for an answer.

Buckets stay as they are until the new version is there, so that a round that starts again is pushed again
without computing anything again.

With mode `accumulate`, and with a global batch size, a worker that has pushed a step asks what is next before
it pulls: it may have to compute another one on the same version.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec import as_bytes, checksum
from elastic_ps.codec.base import Payload
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.pushing import FINISH, BaseReport, BeginTime, Progress, PushPolicy, PushTime, end_of
from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed, RefusalCode, Refused, UsageError
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Incoming
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.values import Values
from elastic_ps.worker.strategies.strategy import Future, Queue, Strategy
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import Answers, MemberId, Step

logger = logging.getLogger(__name__)

FETCHES = 10
"""How often buckets are fetched that are older than the rest, because new versions are made meanwhile."""

SENDERS = 3
"""Threads that push to a shard on another host."""


class _Push(NamedTuple):
    """A bucket to push. It is void in a later generation of the step's progress."""

    generation: int
    attempt: int
    step: Step
    bucket: Bucket


class _Pull(NamedTuple):
    """Buckets to receive from a shard. The pull is void in a later generation."""

    member_id: MemberId
    shard: int
    generation: int
    wanted: pb.PullRequest


class PushPull(Strategy):
    """One worker's pushes and pulls, of a parameter server that makes the steps.

    Args:
        values: receives the values that are pulled.
        drafts: whether to take drafts, in modes that allow it.
        consistency: the job's. If rounds may be made without this worker, it asks before each step.
    """

    def __init__(
        self,
        client: Client,
        flat: Flat,
        consistency: Consistency,
        encoder: Encoder,
        values: Values,
        *,
        drafts: bool = True,
    ) -> None:
        super().__init__()
        self.encoder, self.flat = encoder, flat
        self._client, self._values = client, values
        self._trace, self._history = client.trace, client.history
        self._wants_drafts = drafts
        self._drafts = values.drafts
        self._pushed = flat.layout.pushed
        # With a single bucket of gradients nothing is there to be sent before backward ends.
        gradients = sum(bucket.rule is Rule.GRADIENT for bucket in self._pushed)
        self._small = client.shards == 1 and gradients == 1
        self._changing = [b for b in flat.layout.pull_order if b.rule is not Rule.CONSTANT]
        self._to_ask: list[_Pull] | None = None  # the rest, if some were asked when the step began
        self._excluded: Set[int] = frozenset()  # buckets that the step is not about
        self._pulled: dict[int, int] = {}  # of which version a bucket is, or was when it was pulled last
        self._latest = self.info  # as of the last pull
        self._standing: pb.Standing | None = None  # which steps were in the model then, if that was said
        self._ready_at: dict[int, int] = {}  # when a bucket was complete, by the monotonic clock in ns
        self._failing = [math.inf] * client.shards  # since when pulls fail, by the monotonic clock
        self._asking = threading.Lock()
        self._let_in: Step | None = None
        self._lock = threading.RLock()  # without its condition it is entered in a third of the time
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._progress = Progress[pb.FinishRequest](self._pushed, self._policy(consistency))
        shards = range(client.shards)
        self._senders = [Queue(f"send-{shard}", self._try_to_send) for shard in shards]
        self._receivers = [Queue(f"pull-{shard}", self._receive) for shard in shards]

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._changed.notify_all()
        for senders, receivers in zip(self._senders, self._receivers, strict=True):
            senders.close()
            receivers.close()

    def _policy(self, consistency: Consistency) -> PushPolicy:
        return PushPolicy.of(consistency, small=self._small and not self.encoder.selection.active)

    def adopt(self, consistency: Consistency, codecs: Plan | None = None) -> None:
        if codecs is not None:
            self.encoder.adopt(codecs)
            self._values.adopt(codecs)
        self._progress.pushing = self._policy(consistency)

    def reset(self) -> None:
        with self._lock:
            self.under_way = None
            self._progress.reset()
            self._changed.notify_all()

    # --- a step

    def begin(self, step: Step, settings: str = "", *, excluded: Set[int] = frozenset()) -> None:
        """See `Strategy`. The settings are for drafts."""
        progress = self._progress
        with self._lock:
            progress.begin()
            self.under_way, self._excluded, self._to_ask = step, excluded, None
            self.encoder.begin(step.number, step.member_id.term)
            self._drafts.forget()
            if progress.pushing.several:  # the round may start again before the script ends the step
                progress.missing = {FINISH}
            if progress.pushing.together:
                for shard in self._far:
                    self._senders[shard].grow(SENDERS)
            if settings:
                pulls = self._expect_next(step)
                early, self._to_ask = [], []
                for pull in pulls:
                    sent = sorted({b.index for b in self._pushed if b.shard == pull.shard} - excluded)
                    if sent and pull.shard in self._far:
                        pull.wanted.buckets[:], pull.wanted.draft_settings = sent, settings
                        early.append(pull)
                    else:
                        self._to_ask.append(pull)
                self._ask_for(early)

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts are of use: a shard is on another host."""
        asks = self._wants_drafts and self._progress.pushing.together
        return asks and self._drafts.pay and bool(self._far)

    @property
    def _far(self) -> list[int]:
        """The shards on other hosts."""
        return [shard for shard in range(self._client.shards) if not self._client.is_near(shard)]

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        with self._lock:
            self._ready_at[bucket.index] = time.monotonic_ns()
            self._enqueue(self._progress.ready(bucket, present))

    def backward_ended(self) -> None:
        if self.under_way is not None:
            self.encoder.selection.backward_ended()

    def finish(self, ending: pb.FinishRequest, *, publish: bool = True) -> bool:
        """See `Strategy`.

        Args:
            publish: give the values to the model; else they stay in flat memory, and this may run on another
                thread than the training thread.
        """
        progress, step = self._progress, self.under_way
        pushing = progress.pushing
        assert step is not None, "begin was called"
        if not progress.all_ready:
            raise UsageError("not all buckets are ready")
        if pushing.begins is BeginTime.LAST:
            version, progress.attempt = self._client.begin(step)
            self.under_way = step = replace(step, version=version)
        if pushing.several and not self._push_and_ask(step, ending):
            self.under_way = None
            self.encoder.applied(in_sums=True)
            return False
        in_one_call = pushing.pushes is PushTime.IN_ONE_CALL
        with self._lock:
            progress.versions.clear()
            self.flat.expect()
            pulls = self._expect_next(step) if self._to_ask is None else self._to_ask
            if not in_one_call:
                self._ask_for(pulls)
                if not pushing.several:
                    progress.missing.add(FINISH)
            self._enqueue(progress.end(ending))
            self._changed.notify_all()
        if in_one_call:
            self._receive(pulls[0])
        self._wait()
        self.under_way = None
        self.encoder.applied()
        self._arrived_at(step.version + 1, self._excluded, publish=publish)
        if self._history.enabled:
            self._history.record("applied", **step.applied(ending))
        self.computes_on(step.version + 1)
        return True

    def start(self, ending: pb.FinishRequest) -> Future:
        """See `Strategy`: `finish`, without giving the values to the model."""
        return Future(partial(self.finish, ending, publish=False), give_up=self.give_up)

    def give_up(self) -> None:
        """Give up the step under way."""
        self._fail(ConnectionLost("the script was interrupted"), self._progress.generation)

    def _restart(self, attempt: int, generation: int) -> None:
        """The round starts again: everything is to be pushed once more, for another attempt."""
        with self._lock:
            self._enqueue(self._progress.restart(attempt, generation))
            self._changed.notify_all()

    def _push_and_ask(self, step: Step, ending: pb.FinishRequest) -> bool:
        """Push the rest, and block until the step is in a version. False: another one is to be computed."""
        progress = self._progress
        with self._lock:
            self._enqueue(progress.end(ending))
            self._changed.notify_all()
        while True:
            self._wait()
            with self._lock:
                attempt, generation = progress.attempt, progress.generation
            reply = self._client.ask_after_step(step, attempt)
            kind = reply.WhichOneof("kind")
            if kind == "attempt":
                with self._lock:
                    progress.missing.add(FINISH)
                    self._restart(reply.attempt, generation)
            elif kind != "pending":
                self._latest.stopped = self._latest.stopped or reply.stopped
                return reply.made

    # --- versions

    def fetch(self, version: int, *, contributor: bool, excluded: Set[int] = frozenset()) -> None:
        """See `Strategy`.

        A worker that takes part in the round gets all of one version. Otherwise new versions may be made
        meanwhile; what is older than the rest is then fetched again, some times: the script may look at it,
        though nothing is computed on it before the worker takes part.
        """
        every = wanted = [b for b in self.flat.layout.pull_order if b.index not in excluded]
        self.flat.check(thorough=True)
        self.reset()  # answers for what was given up, and what went wrong with it, mean nothing here
        versions = self._progress.versions
        versions.clear()
        for _ in range(FETCHES):
            with self._lock:
                self.flat.expect()
                self._ask_for(self._expect(version, wanted, contributor=contributor))
            self._wait()
            newest = max(versions.values(), default=version)
            wanted = [b for b in every if versions.get(b.index, newest) < newest]
            if contributor or not wanted:
                break
            version = newest
        else:  # versions were made all the time
            version = min(versions.values())
        if (standing := self._standing) is not None:
            self.encoder.settle(made=standing.steps, term=self._client.term, version=standing.version)
        self._arrived_at(version, excluded)
        if contributor:
            self.computes_on(version)

    def _arrived_at(self, version: int, excluded: Set[int], *, publish: bool = True) -> None:
        """The values of `version` are there, or newer ones, but for the buckets `excluded`.

        The version of newer ones is that of the oldest bucket.
        """
        versions = self._progress.versions
        arrived = [b for b in self._changing if b.index not in excluded]
        self._pulled |= {b.index: versions.get(b.index, version) for b in arrived}
        if self._history.enabled:
            values = [(b.index, self._pulled[b.index], checksum(self.flat.value_bytes(b))) for b in arrived]
            self._history.record("values", term=self._client.member_id.term, values=values)
        if publish:
            self.flat.publish(excluded=excluded)
        self.version = max(version, min(versions.values(), default=version))

    def computes_on(self, version: int) -> None:
        """See `Strategy`. Tell the parameter server which version was read, if it has to know that."""
        report = self._progress.pushing.reports_base
        if report is BaseReport.ALWAYS or (report is BaseReport.IF_NEWER and self.version > version):
            try:
                self._client.heartbeat(computes_on=self.version)
            except Refused as refusal:
                logger.debug("%s", refusal)  # the next call is refused, too

    def _expect(
        self, version: int, buckets: Sequence[Bucket], *, contributor: bool, held: int | None = None
    ) -> list[_Pull]:
        """Expect these buckets; returns the pulls to make. The lock is held."""
        self._progress.missing = {bucket.index for bucket in buckets}
        pulls = []
        for shard in range(self._client.shards):
            own = [b.index for b in buckets if b.shard == shard]
            if own or shard == 0:
                self._progress.missing.add(end_of(shard))
                wanted = pb.PullRequest(version=version, buckets=own, contributor=contributor, held=held)
                pulls.append(_Pull(self._client.member_id, shard, self._progress.generation, wanted))
        return pulls

    def _expect_next(self, step: Step) -> list[_Pull]:
        """See `_expect`: of the version that the step is to be part of."""
        wanted = [b for b in self._changing if b.index not in self._excluded]
        held = min((self._pulled.get(b.index, self.version) for b in wanted), default=self.version)
        return self._expect(step.version + 1, wanted, contributor=True, held=min(held, self.version))

    def _ask_for(self, pulls: Iterable[_Pull]) -> None:
        for pull in pulls:
            self._receivers[pull.shard].put(pull)

    def _wait(self) -> None:
        """Until nothing is missing any more. Blocks. Raises what has gone wrong."""
        progress = self._progress
        while True:
            with self._lock:
                self._changed.wait_for(lambda: progress.over or self._closing.is_set(), timeout=5)
                if progress.error is not None:
                    raise progress.error
                if not progress.missing:
                    return
                if self._closing.is_set():
                    raise ConnectionLost("this worker has left the job")
                nobody_tells = end_of(0) not in progress.missing
            if nobody_tells:
                self._client.heartbeat()  # raises if this worker was declared gone

    # --- progress

    def _arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        with self._lock:
            self._progress.arrived(what, generation, version=version)
            if self._progress.over:
                self._changed.notify_all()

    def _fail(self, error: BaseException, generation: int) -> None:
        with self._lock:
            self._progress.fail(error, generation)
            self._changed.notify_all()

    def _is_due(self, push: _Push) -> bool:
        """Whether a push is still wanted."""
        return self._progress.is_due(push.generation, push.attempt) and not self._closing.is_set()

    def _goes_on(self, pull: _Pull) -> bool:
        """Whether answers to a pull are still wanted."""
        return pull.generation == self._progress.generation and not self._closing.is_set()

    # --- the threads that push

    def _enqueue(self, buckets: Iterable[Bucket]) -> None:
        """Push these buckets; the lock is held."""
        for bucket in buckets:
            assert self.under_way is not None
            push = _Push(self._progress.generation, self._progress.attempt, self.under_way, bucket)
            self._senders[bucket.shard].put(push)

    def _try_to_send(self, push: _Push) -> None:
        try:
            self._send(push)
        except Refused as refusal:
            if refusal.code is not RefusalCode.STALE_ATTEMPT:
                self._fail(refusal, push.generation)
            elif self._progress.pushing.several:  # no pull tells this worker the new attempt: it has to ask
                with self._lock:
                    if self._is_due(push):
                        self._arrived(FINISH, push.generation)
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            self._fail(error, push.generation)

    def _send(self, push: _Push) -> None:
        """Push a bucket, and end the step with the last one. Blocks."""
        progress, bucket, step = self._progress, push.bucket, push.step
        if progress.pushing.begins is BeginTime.FIRST:
            self._ask(push)
        with self._lock:
            if not self._is_due(push):
                return
            last = bucket is self._pushed[-1]
            along = progress.ending if last and self._client.shards == 1 else None
            if along is not None:
                self._changed.wait_for(lambda: progress.only_last_is_left or not self._is_due(push))
                if not self._is_due(push):
                    return
        self._push(bucket, step, push.attempt, along)
        with self._lock:
            if not self._is_due(push):
                return
            ending = progress.acknowledge()
            self._changed.notify_all()
        if ending is not None:
            if along is None:
                self._client.finish(step, push.attempt, ending)
            self._arrived(FINISH, push.generation)

    def _ask(self, push: _Push) -> None:
        """Before the first push of a step, ask whether the round takes it."""
        with self._asking:
            if self._is_due(push) and self._let_in is not push.step:
                try:
                    _, attempt = self._client.begin(push.step)
                except Refused as refusal:
                    self._fail(refusal, push.generation)  # before another thread asks as well
                    raise
                self._let_in = push.step
                self._restart(attempt, push.generation)

    def _push(self, bucket: Bucket, step: Step, attempt: int, ending: pb.FinishRequest | None) -> None:
        self.flat.wait_for(bucket)  # a codec is not chosen by how long a device computes
        with self.encoder.selection.busy():
            payload = self._contribution(bucket, step, attempt)
            with self._traced(bucket, step, attempt, payload):
                self._client.push(bucket, step, attempt, payload, ending)

    def _contribution(self, bucket: Bucket, step: Step, attempt: int) -> Payload:
        """A bucket's payload, recorded as sent."""
        if self._history.enabled:
            self._history.record("push", **step.pushed(bucket.index, attempt))
        present = self._progress.present[bucket.index]
        if present and not any(present):
            return Payload(EMPTY, present=present)
        rows = self.flat.rows_of(bucket)
        return self.encoder.encode(
            bucket,
            self.flat.contribution_of(bucket) if rows is None else rows,
            present,
            step=step.number,
            version=step.base,
            into=(step.version, attempt),
        )

    def _traced(
        self, bucket: Bucket, step: Step, attempt: int, payload: Payload
    ) -> AbstractContextManager[None]:
        """The block pushes a bucket."""
        index, ready, row = bucket.index, self._ready_at[bucket.index], f"queue-{bucket.shard}"
        self._trace.complete("queue", ready, time.monotonic_ns(), row=row, bucket=index)
        size = len(payload.body)
        return self._trace.span("push", bucket=index, step=step.number, attempt=attempt, bytes=size)

    def assign(self, step: Step, attempt: int) -> None:
        for bucket in self._pushed:
            self._history.record("push", **step.pushed(bucket.index, attempt))
            payload = Payload(as_bytes(self.flat.contribution_of(bucket)), plain=True)
            self._client.push(bucket, step, attempt, payload, None)
        self._client.finish(step, attempt, pb.FinishRequest(assigns=True))

    # --- the threads that receive; with a step in one call, the training thread

    def _receive(self, pull: _Pull) -> None:
        """Ask until all has arrived, or something has gone wrong. Blocks."""
        shard = pull.shard
        self._failing[shard] = math.inf
        while pull.generation == self._progress.generation and self._progress.error is None:
            try:
                if self._pull_once(pull):
                    break
                self._failing[shard] = math.inf
            except (ConnectionLost, DeadlineExceeded) as error:
                self._failing[shard] = since = min(self._failing[shard], time.monotonic())
                lost = self._client.lost(since, error)
                if lost or self._closing.wait(0.1):
                    self._fail(lost or error, pull.generation)
            except Refused as refusal:
                again = refusal.code in (RefusalCode.NOT_READY, RefusalCode.NOT_YOUR_TURN)
                if not again or self._closing.wait(0.1):
                    self._fail(refusal, pull.generation)
            except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
                self._fail(error, pull.generation)

    def _pull_once(self, pull: _Pull) -> bool:
        """One try to get what is still missing. Returns whether all of it has arrived."""
        wanted = pb.PullRequest()
        wanted.CopyFrom(pull.wanted)
        with self._lock:
            wanted.buckets[:] = missing = [b for b in wanted.buckets if b in self._progress.missing]
            wanted.drafts.update(self._drafts.numbers(missing))
            wanted.attempt = self._progress.attempt
        started = time.monotonic_ns()
        ended = complete = False
        for reply, incoming in self._answers(pull, wanted):
            # To the end of the call, so that its connection can be used again.
            kind = reply.WhichOneof("kind")
            early = reply.draft or kind not in ("bucket", "done")
            with self._lock:
                # A version without this worker may come in the middle of its step.
                if pull.wanted.draft_settings and not early:
                    self._changed.wait_for(
                        lambda: self._progress.ending is not None or not self._goes_on(pull)
                    )
                if not self._goes_on(pull):
                    return False
                self.has_newer |= kind == "bucket" and not reply.draft and reply.version > 0
            if kind == "bucket":
                self._receive_bucket(pull, self.flat.layout.buckets[reply.bucket], reply, incoming)
                self._failing[pull.shard] = math.inf
                now = time.monotonic_ns()
                what: dict[str, Any] = {"bucket": reply.bucket, "version": reply.version}
                self._trace.complete("pull", started, now, **what, draft=reply.draft, bytes=incoming.size)
                started = now
            ended |= reply.last or kind != "bucket"
            if kind == "attempt":
                self._drafts.forget(pull.wanted.buckets)
                self._restart(reply.attempt, pull.generation)
            elif kind == "done" or reply.last:
                if pull.shard == 0:
                    latest = self._latest
                    latest.settings, latest.stopped, latest.steps = reply.settings, reply.stopped, reply.steps
                    self._standing = reply.standing if reply.HasField("standing") else None
                complete = True
        if not ended:
            raise Malformed(f"shard {pull.shard} ended a reply before all values were sent")
        if complete:
            self._arrived(end_of(pull.shard), pull.generation)
        return complete

    def _answers(self, pull: _Pull, wanted: pb.PullRequest) -> Answers:
        """The answers to one call for what is wanted; it makes the step's pushes before, if they are due."""
        size = sum(self.flat.layout.buckets[index].nbytes for index in wanted.buckets)
        if not self._progress.owing:
            yield from self._client.pull(pull.member_id, pull.shard, wanted, size)
            return
        step, ending, attempt = self.under_way, self._progress.ending, wanted.attempt
        assert step is not None
        assert ending is not None
        *others, last = self._pushed
        try:
            for bucket in others:
                self._push(bucket, step, attempt, None)
            payload = self._contribution(last, step, attempt)
            with self._traced(last, step, attempt, payload):
                answers = self._client.push_and_pull(last, step, attempt, payload, ending, wanted, size)
                first = next(answers, None)
        except Refused as refusal:
            if refusal.code is not RefusalCode.STALE_ATTEMPT:
                raise
            answers = self._client.pull(pull.member_id, last.shard, wanted, size)  # it tells which is open
            first = None
        self._progress.owing = False
        if first is not None:
            yield first
        yield from answers

    def _receive_bucket(self, pull: _Pull, bucket: Bucket, reply: pb.PullReply, incoming: Incoming) -> None:
        if reply.draft:
            self._values.take_draft(bucket, reply, incoming)
            with self._lock:
                if pull.generation == self._progress.generation:
                    self._drafts.note(bucket.index, reply.draft)
            return
        # In a later attempt drafts are void because the round has started again.
        self._values.take(bucket, reply, incoming, counts=not self._progress.attempt)
        constant = bucket.rule is Rule.CONSTANT
        self._arrived(bucket.index, pull.generation, version=None if constant else reply.version)
