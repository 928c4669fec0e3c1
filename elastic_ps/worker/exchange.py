"""The threads that push gradients while backward goes on, and receive the new version.

For each shard there is a send thread and a pull thread. The main thread (in which backward runs) says which
buckets are ready; a bucket is sent when all before it are, so every worker pushes in the same order. The
last bucket of a step is held back until the script calls `optimizer.step()`, because with a single shard
it carries the end of the step with it. A shard on another host has several send threads, so that the network
is not idle while one of them waits for an answer.

Buckets stay as they are until the new version is there, so that a round that starts again is pushed again
without computing anything again.

In mode `sync`, a shard on another host is asked for the new version when the step begins. It then sends
*drafts*: the next values of those buckets that have the gradients of all workers. So values arrive while
other gradients leave. Drafts are kept beside the model, and become its values when the shard says that they
stand. Those of a script that changes hyperparameters between backward and `optimizer.step()` never do, so
after some steps it is sent none.

If the model's gradients are one bucket on one shard, the training thread itself pushes the step when it is
complete, and the new version is the answer to its last push: handing it to other threads would take longer.

With mode `accumulate`, and with a global batch size, a worker that has pushed a step asks what is next before
it pulls: it may have to compute another one on the same version.

With bounded staleness nothing is sent before the script calls `optimizer.step()`: the round that the step
goes into waits for it from its first push on, so others would have to wait for the rest of a slow backward.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from elastic_ps.codec import checksum
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.errors import (
    ConnectionLost,
    DeadlineExceeded,
    Malformed,
    RefusalCode,
    Refused,
    UsageError,
)
from elastic_ps.telemetry import History, Trace
from elastic_ps.training import Consistency
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Incoming
from elastic_ps.worker.ahead import Ahead
from elastic_ps.worker.client import PATIENCE, Client
from elastic_ps.worker.dialogue import Answers, Ending, Stay, Step, Wanted
from elastic_ps.worker.encoder import Encoder, Payload
from elastic_ps.worker.model import Flat
from elastic_ps.worker.values import Values

logger = logging.getLogger(__name__)

_FINISH = -1
"""Among the missing buckets' indexes: the acknowledgement of the step's end."""


SENDERS = 3
"""Send threads for a shard on another host."""

FETCHES = 10
"""How often buckets are fetched that are older than the rest, because new versions are made meanwhile."""


class _Push(NamedTuple):
    """A bucket to be sent. `generation`: what was begun before a `reset` means nothing after it."""

    generation: int
    attempt: int
    step: Step
    bucket: Bucket


class _Pull(NamedTuple):
    """Buckets to be received. `ahead`: hyperparameters, with which drafts of them are taken; see `Wanted`."""

    stay: Stay
    generation: int
    version: int
    contributor: bool
    buckets: list[int]
    held: int | None
    ahead: str = ""


class Exchange:
    """One worker's pushes and pulls. `ready`, `finish` and `fetch` belong to the main thread.

    Args:
        encoder: of the gradients.
        values: where those that are pulled are received.
        ahead: take drafts, where the mode allows it.
        consistency: the job's. Where rounds may be made without this worker, it asks before each step.

    Attributes:
        version: of the values that the model has; with bounded staleness, some may be newer.
        settings: the settings in force, as JSON, as of the last pull.
        stopped: why a script has ended the training, as of the last pull; "" if none has.
        steps: in mode `local`, how many this worker makes by itself until its next exchange, as of the last
            pull; 0 if that has not been said.
    """

    def __init__(
        self,
        client: Client,
        flat: Flat,
        consistency: Consistency,
        encoder: Encoder,
        values: Values,
        *,
        ahead: bool = True,
        trace: Trace,
        history: History,
    ) -> None:
        self.version = 0
        self.settings = ""
        self.stopped = ""
        self.steps = 0
        self._client = client
        self._encoder = encoder
        self._values = values
        self._flat = flat
        self._sends_ahead = ahead
        self._asking = threading.Lock()
        self._let_in: Step | None = None
        self._trace = trace
        self._history = history
        self._pushed = flat.layout.pushed
        # With a single bucket of gradients nothing is there to be sent before backward ends.
        gradients = sum(bucket.rule is Rule.GRADIENT for bucket in self._pushed)
        self._small = client.shards == 1 and gradients == 1 and not encoder.tuner.active
        self.adopt(consistency)
        self._to_ask: dict[int, _Pull] | None = None  # the rest, if some were asked when the step began
        self._ahead = Ahead()
        self._stepped = [b for b in flat.layout.pull_order if b.rule is not Rule.CONSTANT]
        self._besides: Set[int] = frozenset()  # buckets that the step is not about
        self._held: dict[int, int] = {}  # of which version a bucket is, or was when it was pulled last
        self._changed = threading.Condition()
        self._step: Step | None = None
        self._attempt = 0
        self._ready = 0
        self._queued = 0
        self._ready_at: dict[int, int] = {}
        self._present: dict[int, Sequence[bool]] = {}
        self._acknowledged = 0
        self._owing = False  # the pull thread, or who is in its place, is to push the step first
        self._ending: Ending | None = None
        self._missing: set[int] = set()
        self._versions: dict[
            int, int
        ] = {}  # of the buckets that have arrived; not of those that never change
        self._error: BaseException | None = None
        self._generation = 0
        self._closing = threading.Event()
        self._to_send: list[queue.SimpleQueue[_Push | None]] = []
        self._to_pull: list[queue.SimpleQueue[_Pull | None]] = []
        self._threads: list[threading.Thread] = []
        self._senders = [1] * client.shards
        self._heard = [0.0] * client.shards  # when the last answer to a pull came, by the monotonic clock
        for shard in range(client.shards):
            self._to_send.append(queue.SimpleQueue())
            self._to_pull.append(queue.SimpleQueue())
            self._start("send", self._send_loop, shard)
            self._start("pull", self._pull_loop, shard)

    def _start(self, name: str, target: Callable[[int], None], shard: int) -> None:
        thread = threading.Thread(target=target, args=(shard,), name=f"{name}-{shard}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End the threads. The client must be closed before, so that nothing of theirs blocks."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        for shard, (sending, pulling) in enumerate(zip(self._to_send, self._to_pull, strict=True)):
            for _ in range(self._senders[shard]):
                sending.put(None)
            pulling.put(None)
        for thread in self._threads:
            thread.join()

    # --- the main thread

    def adopt(self, consistency: Consistency) -> None:
        """The job's consistency is this one from now on; there is no step under way."""
        self._may_be_stale = consistency.may_be_stale
        self._may_be_late = consistency.may_be_late
        self._holds_up = consistency.each_alone and consistency.reads_one_version
        self._accumulates = consistency.several_steps
        self._at_once = self._small and not self._accumulates
        self._waits_for_all = consistency.waits_for_all
        self._may_ask_ahead = self._sends_ahead and self._waits_for_all and not self._at_once

    def reset(self) -> None:
        """Forget the step under way and what went wrong: this worker has joined again."""
        with self._changed:
            self._generation += 1
            self._step, self._error, self._ending, self._owing = None, None, None, False
            self._missing.clear()
            self._changed.notify_all()

    @property
    def under_way(self) -> Step | None:
        """The step whose pushes have begun."""
        return self._step

    def begin(self, step: Step, settings: str = "", *, besides: Set[int] = frozenset()) -> None:
        """The first gradient of a step is there.

        Args:
            settings: the hyperparameters that the step will probably end with, as JSON; "" for no drafts.
            besides: buckets that the step is not about. Nothing is there of them, and they are not pulled.
        """
        with self._changed:
            self._generation += 1  # a call for the step before may still be under way, if that was given up
            self._step, self._attempt, self._ending = step, 0, None
            self._besides = besides
            self._ready = self._queued = self._acknowledged = 0
            self._present.clear()
            self._encoder.begin(step.number, step.stay.term)
            self._ahead.forget()
            self._to_ask = None
            self._send_to_far_shards()
            if settings:
                pulls = self._expect_next(step)
                for shard in self._far:
                    sent = [b.index for b in self._pushed if b.shard == shard]
                    if buckets := [index for index in sent if index not in besides]:
                        self._ask_for({shard: pulls.pop(shard)._replace(buckets=buckets, ahead=settings)})
                self._to_ask = pulls

    @property
    def asks_ahead(self) -> bool:
        """Whether drafts are of use: a shard is on another host."""
        return self._may_ask_ahead and self._ahead.pays and bool(self._far)

    @property
    def _far(self) -> list[int]:
        """The shards on other hosts."""
        return [shard for shard in range(self._client.shards) if not self._client.is_near(shard)]

    def _send_to_far_shards(self) -> None:
        """Start the other send threads of shards that are found to be on other hosts."""
        for shard in self._far if self._waits_for_all and not self._at_once else ():
            while self._senders[shard] < SENDERS:
                self._senders[shard] += 1
                self._start("send", self._send_loop, shard)

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket's contribution is complete; send it when those before it are sent. Does not block."""
        with self._changed:
            self._present[bucket.index] = () if all(present) else tuple(present)
            self._ready_at[bucket.index] = time.monotonic_ns()
            while self._ready < len(self._pushed) and self._pushed[self._ready].index in self._present:
                self._ready += 1
            self._queue_ready()

    def _queue_ready(self) -> None:
        if self._at_once:
            return
        if self._ending is not None:
            limit = self._ready
        else:
            limit = 0 if self._may_be_stale else min(self._ready, len(self._pushed) - 1)
        while self._queued < limit:
            bucket = self._pushed[self._queued]
            assert self._step is not None
            self._to_send[bucket.shard].put(_Push(self._generation, self._attempt, self._step, bucket))
            self._queued += 1

    def finish(self, ending: Ending) -> bool:
        """End the step: push the rest and wait for the version that it is part of. Blocks.

        Returns whether that version is here. If not, this worker computes another step on the one before.

        Raises:
            Refused, ConnectionLost: the step could not be taken; the model keeps its version.
        """
        step = self._step
        assert step is not None, "begin was called"
        if self._ready < len(self._pushed):
            raise UsageError("not all buckets are ready")
        if self._may_be_stale:
            version, self._attempt = self._client.begin(step)
            self._step = step = replace(step, version=version)
        elif self._may_be_late and self._at_once:
            self._client.begin(step)
        if self._accumulates and not self._push_alone(step, ending):
            self._step = None
            self._encoder.applied()  # it is in the sums, and void only if the round starts again
            return False
        with self._changed:
            self._ending = ending
            self._changed.notify_all()
            self._versions.clear()
            self._flat.expect()
            pulls = self._expect_next(step) if self._to_ask is None else self._to_ask
            self._owing = self._at_once
            if not self._at_once:
                self._ask_for(pulls)
            if not (self._at_once or self._accumulates):
                self._missing.add(_FINISH)
                self._queue_ready()
        if self._at_once:
            self._receive(0, pulls[0])
        self._wait()
        self._step = None
        self._encoder.applied()
        self._arrived_at(step.version + 1, self._besides)
        self._history.record(
            "applied",
            step=step.number,
            version=step.version + 1,
            records=ending.ranges,
            samples=step.samples,
            worker=step.stay.worker,
            incarnation=step.stay.incarnation,
            term=step.stay.term,
        )
        self.computes_on(step.version + 1)
        return True

    def _push_alone(self, step: Step, ending: Ending) -> bool:
        """Push the rest, and block until the step is in a version. False: another one is to be computed."""
        with self._changed:
            self._ending, self._missing = ending, {_FINISH}
            self._queue_ready()
        while True:
            self._wait()
            with self._changed:
                attempt, generation = self._attempt, self._generation
            reply = self._client.await_version(step, attempt)
            kind = reply.WhichOneof("kind")
            if kind == "attempt":
                with self._changed:
                    self._missing.add(_FINISH)
                    self._restart(reply.attempt, generation)
            elif kind != "pending":
                self.stopped = self.stopped or reply.stopped
                return reply.made

    def assign(self, step: Step, attempt: int) -> None:
        """Push the values that the contributions hold, for the round of `step`. Blocks.

        Raises:
            Refused: STALE_ATTEMPT, LATE: the round has started again; ask what to do.
        """
        for bucket in self._pushed:
            self._record_push(step, bucket, attempt)
            payload = Payload(self._flat.contribution_bytes(bucket))
            self._client.push(bucket.index, bucket.shard, step, attempt, payload, None)
        self._client.finish(step, attempt, Ending(ranges=(), settings="", metrics={}, assigns=True))

    def fetch(self, version: int, *, contributor: bool, besides: Set[int] = frozenset()) -> None:
        """Get all values of (at least) `version`, but for the buckets `besides`. Blocks.

        A worker that takes part in the round gets all of one version. Otherwise new versions may be made
        meanwhile; what is older than the rest is then fetched again, some times: the script may look at it,
        though nothing is computed on it before the worker takes part.
        """
        every = wanted = [b for b in self._flat.layout.pull_order if b.index not in besides]
        self._flat.check(thorough=True)
        self._versions.clear()
        for _ in range(FETCHES):
            with self._changed:
                self._flat.expect()
                self._ask_for(self._expect(version, wanted, contributor=contributor))
            self._wait()
            newest = max(self._versions.values(), default=version)
            wanted = [b for b in every if self._versions.get(b.index, newest) < newest]
            if contributor or not wanted:
                break
            version = newest
        self._arrived_at(version, besides)
        if contributor:
            self.computes_on(version)

    def _arrived_at(self, version: int, besides: Set[int]) -> None:
        """The values of `version` are there, or newer ones: their version is the oldest bucket's.

        Those of the buckets `besides` were not pulled.
        """
        self.version = max(version, min(self._versions.values(), default=version))
        arrived = [b for b in self._stepped if b.index not in besides]
        self._held |= {b.index: self._versions.get(b.index, version) for b in arrived}
        if self._history.enabled:
            values = [(b.index, self._held[b.index], checksum(self._flat.value_bytes(b))) for b in arrived]
            self._history.record("values", term=self._client.stay.term, values=values)
        self._flat.publish(besides=besides)

    def computes_on(self, version: int) -> None:
        """The values are there for the next step. The parameter server believes that they are of `version`.

        It has to know if they are newer, or if it makes no version before it knows that they are read.
        """
        if self._holds_up or (self._may_be_stale and self.version > version):
            try:
                self._client.heartbeat(computes_on=self.version)
            except Refused as refusal:
                logger.debug("%s", refusal)  # the next call is refused, too

    def _expect(
        self, version: int, wanted: Sequence[Bucket], *, contributor: bool, held: int | None = None
    ) -> dict[int, _Pull]:
        """Nothing of `wanted` has arrived; returns what to ask which shard for. The lock is held."""
        self._missing = {bucket.index for bucket in wanted}
        pulls = {}
        for shard in range(self._client.shards):
            own = [b.index for b in wanted if b.shard == shard]
            if own or shard == 0:
                self._missing.add(_FINISH - 1 - shard)
                pulls[shard] = _Pull(self._client.stay, self._generation, version, contributor, own, held)
        return pulls

    def _expect_next(self, step: Step) -> dict[int, _Pull]:
        """See `_expect`: of the version that the step is to be part of."""
        wanted = [b for b in self._stepped if b.index not in self._besides]
        held = min((self._held.get(b.index, self.version) for b in wanted), default=self.version)
        return self._expect(step.version + 1, wanted, contributor=True, held=min(held, self.version))

    def _ask_for(self, pulls: Mapping[int, _Pull]) -> None:
        for shard, pull in pulls.items():
            self._to_pull[shard].put(pull)

    def _wait(self) -> None:
        """Until nothing is missing any more, or something has gone wrong."""
        while True:
            with self._changed:
                over = self._changed.wait_for(lambda: not self._missing or self._error is not None, timeout=5)
                if self._error is not None:
                    raise self._error
                if over:
                    return
                alone = self._missing == {_FINISH}
            if alone:
                self._client.heartbeat()  # a version without this worker: it was declared gone; this raises

    # --- send threads

    def _send_loop(self, shard: int) -> None:
        while (push := self._to_send[shard].get()) is not None:
            try:
                self._send(push)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:
                    self._fail(refusal, push.generation)
                elif self._accumulates:
                    self._overtaken(push)
            except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
                self._fail(error, push.generation)

    def _overtaken(self, push: _Push) -> None:
        """The round has started again, and no pull tells this worker the new attempt: it has to ask."""
        with self._changed:
            if self._current(push):
                self._arrived(_FINISH, push.generation)

    def _current(self, push: _Push) -> bool:
        if self._error is not None or self._closing.is_set():
            return False
        return (push.generation, push.attempt) == (self._generation, self._attempt)

    def _send(self, push: _Push) -> None:
        bucket, step = push.bucket, push.step
        if self._may_be_late:
            self._ask(push)
        with self._changed:
            if not self._current(push):
                return
            last = bucket is self._pushed[-1]
            along = self._ending if last and self._client.shards == 1 else None
            if along is not None and not self._others_are_there(push):
                return
        self._push(bucket, step, push.attempt, along)
        with self._changed:
            if not self._current(push):
                return
            self._acknowledged += 1
            self._changed.notify_all()
            ending = self._ending if self._acknowledged == len(self._pushed) else None
        if ending is not None:
            if along is None:
                self._client.finish(step, push.attempt, ending)
            self._arrived(_FINISH, push.generation)

    def _others_are_there(self, push: _Push) -> bool:
        """Wait, holding the lock, until only the last bucket is left. False if its push is not due."""
        others = len(self._pushed) - 1
        self._changed.wait_for(lambda: self._acknowledged >= others or not self._current(push))
        return self._current(push)

    def _push(self, bucket: Bucket, step: Step, attempt: int, ending: Ending | None) -> None:
        with self._encoder.tuner.busy():
            payload = self._contribution(bucket, step, attempt)
            with self._traced(bucket, step, attempt, payload):
                self._client.push(bucket.index, bucket.shard, step, attempt, payload, ending)

    def _contribution(self, bucket: Bucket, step: Step, attempt: int) -> Payload:
        """What is sent of a bucket. It is recorded as sent."""
        self._record_push(step, bucket, attempt)
        present = self._present[bucket.index]
        absent = bool(present) and not any(present)
        if absent:
            return Payload(EMPTY, present=present)
        raw, gradient = self._flat.contribution_bytes(bucket), self._flat.contribution_of(bucket)
        return self._encoder.encode(bucket, gradient, raw, present, step=step.number, version=step.base)

    @contextmanager
    def _traced(self, bucket: Bucket, step: Step, attempt: int, payload: Payload) -> Iterator[None]:
        """The block pushes a bucket."""
        started, index = time.monotonic_ns(), bucket.index
        self._trace.complete(
            "queue", self._ready_at[index], started, lane=f"queue-{bucket.shard}", bucket=index
        )
        yield
        now = time.monotonic_ns()
        self._trace.complete(
            "push", started, now, bucket=index, step=step.number, attempt=attempt, bytes=len(payload.body)
        )

    def _record_push(self, step: Step, bucket: Bucket, attempt: int) -> None:
        self._history.record(
            "push",
            step=step.number,
            bucket=bucket.index,
            attempt=attempt,
            version=step.version,
            base=step.base,
            worker=step.stay.worker,
            incarnation=step.stay.incarnation,
        )

    def _ask(self, push: _Push) -> None:
        """Before the first push of a step: whether the round is made with it."""
        with self._asking:
            if self._let_in is not push.step and self._current(push):
                try:
                    _, attempt = self._client.begin(push.step)
                except Refused as refusal:
                    self._fail(refusal, push.generation)  # before another thread asks as well
                    raise
                self._let_in = push.step
                self._restart(attempt, push.generation)

    def _restart(self, attempt: int, generation: int) -> None:
        """The round starts again: push everything once more, as another attempt."""
        with self._changed:
            if generation == self._generation and attempt > self._attempt:
                self._attempt, self._queued, self._acknowledged = attempt, 0, 0
                self._owing = self._at_once
                self._queue_ready()
                self._changed.notify_all()

    # --- pull threads

    def _pull_loop(self, shard: int) -> None:
        while (pull := self._to_pull[shard].get()) is not None:
            self._receive(shard, pull)

    def _receive(self, shard: int, pull: _Pull) -> None:
        """Ask until all has arrived, or something has gone wrong. Blocks."""
        self._heard[shard] = time.monotonic()
        while pull.generation == self._generation and self._error is None:
            try:
                if self._pull_once(shard, pull):
                    break
                self._heard[shard] = time.monotonic()
            except (ConnectionLost, DeadlineExceeded) as error:
                self._client.notice(self._heard[shard], error)
                over = time.monotonic() > self._heard[shard] + PATIENCE.total_seconds()
                if over or self._closing.wait(0.1):
                    self._fail(error, pull.generation)
            except Refused as refusal:
                if refusal.code is not RefusalCode.NOT_READY or self._closing.wait(0.1):
                    self._fail(refusal, pull.generation)
            except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
                self._fail(error, pull.generation)

    def _pull_once(self, shard: int, pull: _Pull) -> bool:
        """One try to get what is still missing. Returns whether all of it has arrived."""
        with self._changed:
            missing = [b for b in pull.buckets if b in self._missing]
            wanted = Wanted(
                pull.version,
                missing,
                self._attempt,
                pull.contributor,
                pull.held,
                pull.ahead,
                self._ahead.numbers(missing),
            )
        started = time.monotonic_ns()
        ended = complete = False
        for reply, incoming in self._answers(shard, pull, wanted):
            # To the end of the call, so that its connection can be used again.
            self._heard[shard] = time.monotonic()
            kind = reply.WhichOneof("kind")
            early = reply.draft or kind not in ("bucket", "done")
            if not (self._wanted(pull) if early else self._may_take(pull)):
                return False
            if kind == "bucket":
                bucket = self._flat.layout.buckets[reply.bucket]
                if reply.draft:
                    self._take_draft(bucket, reply, incoming, pull.generation)
                else:
                    self._take_values(bucket, reply, incoming, pull.generation)
                now = time.monotonic_ns()
                self._trace.complete(
                    "pull",
                    started,
                    now,
                    bucket=bucket.index,
                    version=reply.version,
                    draft=reply.draft,
                    bytes=incoming.size,
                )
                started = now
                continue
            ended = True
            if kind == "attempt":
                self._ahead.forget(pull.buckets)
                self._restart(reply.attempt, pull.generation)
            elif kind == "done":
                if shard == 0:
                    self.settings, self.stopped, self.steps = reply.settings, reply.stopped, reply.steps
                complete = True
        if not ended:
            raise Malformed(f"shard {shard} ended a pull without saying so")
        if complete:
            self._arrived(_FINISH - 1 - shard, pull.generation)
        return complete

    def _may_take(self, pull: _Pull) -> bool:
        """Whether the answer is for the step under way, or for what is fetched between two steps.

        Of a step it is taken when the script has ended that. Blocks until then: the version may be made
        before, if it is made without this worker.
        """
        with self._changed:
            if pull.ahead:
                self._changed.wait_for(lambda: self._ending is not None or not self._wanted(pull))
            return self._wanted(pull)

    def _wanted(self, pull: _Pull) -> bool:
        return pull.generation == self._generation and not self._closing.is_set()

    def _take_draft(self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming, generation: int) -> None:
        self._ahead.forget([bucket.index])
        if not reply.unchanged:
            self._values.receive(bucket, reply, incoming, into=self._ahead.memory(bucket))
        with self._changed:
            if generation == self._generation:
                self._ahead.note(bucket.index, reply.draft)

    def _take_values(self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming, generation: int) -> None:
        """A bucket has reached the version."""
        if reply.stands:
            self._ahead.take(bucket, self._flat.value_of(bucket))
            self._values.arrived(bucket, reply.version)
        elif not reply.unchanged:
            self._values.receive(bucket, reply, incoming)
            if not self._attempt:  # else drafts are void because the round has started again
                self._ahead.superseded(bucket.index, reply.version)
        constant = bucket.rule is Rule.CONSTANT
        self._arrived(bucket.index, generation, version=None if constant else reply.version)

    def _answers(self, shard: int, pull: _Pull, wanted: Wanted) -> Answers:
        """The answers to one call for what is wanted; it makes the step's pushes before, if they are due."""
        if not self._owing:
            return self._client.pull(pull.stay, shard, wanted)
        return self._push_at_once(pull, wanted)

    def _push_at_once(self, pull: _Pull, wanted: Wanted) -> Answers:
        step, ending = self._step, self._ending
        assert step is not None
        assert ending is not None
        *others, last = self._pushed
        try:
            for bucket in others:
                self._push(bucket, step, wanted.attempt, None)
            payload = self._contribution(last, step, wanted.attempt)
            with self._traced(last, step, wanted.attempt, payload):
                answers = self._client.push_and_pull(
                    last.index, step, wanted.attempt, payload, ending, wanted
                )
                first = next(answers, None)
        except Refused as refusal:
            if refusal.code is not RefusalCode.STALE_ATTEMPT:
                raise
            answers, first = self._client.pull(pull.stay, last.shard, wanted), None  # it tells which is open
        self._owing = False
        if first is not None:
            yield first
        yield from answers

    def _arrived(self, what: int, generation: int, *, version: int | None = None) -> None:
        with self._changed:
            if generation == self._generation:
                if version is not None:
                    self._versions[what] = version
                self._missing.discard(what)
                if not self._missing:
                    self._changed.notify_all()

    def _fail(self, error: BaseException, generation: int) -> None:
        with self._changed:
            if generation == self._generation:
                self._error = self._error or error
                self._changed.notify_all()
