"""What a worker exchanges with the parameter server: gradients, and the versions that are made of them.

The training thread, in which backward runs, says here which buckets are ready, and when the step ends.
Threads push them while backward goes on, `Receiving` has those that receive the new version, and `Awaited`
says what is due, and what is missing yet. A bucket is pushed when all before it are, so every worker pushes
in the same order. A shard on another host has several threads for that, so that the network is not idle while
one of them waits for an answer.

Buckets stay as they are until the new version is there, so that a round that starts again is pushed again
without computing anything again.

With mode `accumulate`, and with a global batch size, a worker that has pushed a step asks what is next before
it pulls: it may have to compute another one on the same version.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec import checksum
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused, UsageError
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.transport.base import EMPTY
from elastic_ps.worker.awaited import FINISH, Asks, Awaited, Pushing, Says, When, end_of
from elastic_ps.worker.client import Client
from elastic_ps.worker.dialogue import Answers, Ending, Stay, Step, Wanted
from elastic_ps.worker.encoder import Encoder, Payload
from elastic_ps.worker.flat import Flat
from elastic_ps.worker.receiving import Pull, Receiving, Values
from elastic_ps.worker.strategy import Strategy

logger = logging.getLogger(__name__)

FETCHES = 10
"""How often buckets are fetched that are older than the rest, because new versions are made meanwhile."""

SENDERS = 3
"""Threads that push to a shard on another host."""


class _Push(NamedTuple):
    """A bucket to be pushed, begun in a generation of what is `Awaited`."""

    generation: int
    attempt: int
    step: Step
    bucket: Bucket


class Exchange(Strategy):
    """One worker's pushes and pulls, of a parameter server that makes the steps.

    Args:
        encoder: of the gradients.
        values: where those that are pulled are received.
        ahead: take drafts, where the mode allows it.
        consistency: the job's. Where rounds may be made without this worker, it asks before each step.

    Attributes:
        encoder, flat: as given.
        receiving: the way back.
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
        super().__init__()
        self._client = client
        self.encoder, self.flat = encoder, flat
        self._trace, self._history = trace, history
        self._sends_ahead = ahead
        self._pushed = flat.layout.pushed
        # With a single bucket of gradients nothing is there to be sent before backward ends.
        gradients = sum(bucket.rule is Rule.GRADIENT for bucket in self._pushed)
        self._small = client.shards == 1 and gradients == 1
        self._to_ask: dict[int, Pull] | None = None  # the rest, if some were asked when the step began
        self._stepped = [b for b in flat.layout.pull_order if b.rule is not Rule.CONSTANT]
        self._besides: Set[int] = frozenset()  # buckets that the step is not about
        self._held: dict[int, int] = {}  # of which version a bucket is, or was when it was pulled last
        self._asking = threading.Lock()
        self._let_in: Step | None = None
        self._awaited = Awaited(self._pushed, self._enqueue)
        self._queues: list[queue.SimpleQueue[_Push | None]] = [
            queue.SimpleQueue() for _ in range(client.shards)
        ]
        self._threads: list[list[threading.Thread]] = [[] for _ in range(client.shards)]
        for shard in range(client.shards):
            self._start(shard)
        self.receiving = Receiving(client, flat, self._awaited, values, self._answers, self.told, trace=trace)
        self._values = values
        self.adopt(consistency)

    def close(self) -> None:
        """See `Strategy`."""
        self._awaited.close()
        for each, threads in zip(self._queues, self._threads, strict=True):
            for _ in threads:
                each.put(None)
        for thread in (thread for threads in self._threads for thread in threads):
            thread.join()
        self.receiving.close()

    def adopt(self, consistency: Consistency, codecs: Plan | None = None) -> None:
        """See `Strategy`."""
        if codecs is not None:
            self.encoder.adopt(codecs)
            self._values.adopt(codecs)
        small = self._small and not self.encoder.tuner.active
        self._pushing = self._awaited.pushing = Pushing.of(consistency, small=small)

    def reset(self) -> None:
        """See `Strategy`."""
        self._awaited.reset()

    def give_up(self) -> None:
        """See `Strategy`."""
        self._awaited.fail(ConnectionLost("the script was interrupted"), self._awaited.generation)

    @property
    def under_way(self) -> Step | None:
        """The step whose pushes have begun."""
        return self._awaited.step

    # --- a step

    def begin(self, step: Step, settings: str = "", *, besides: Set[int] = frozenset()) -> None:
        """See `Strategy`. The settings are for drafts."""
        awaited = self._awaited
        with awaited.lock:
            awaited.begin(step)
            self._besides = besides
            self.encoder.begin(step.number, step.stay.term)
            self.receiving.ahead.forget()
            self._to_ask = None
            if self._pushing.several:  # the round may start again before the script ends the step
                awaited.expect({FINISH})
            if self._pushing.together:
                for shard, threads in enumerate(self._threads):
                    while len(threads) < SENDERS and not self._client.is_near(shard):
                        self._start(shard)
            if settings:
                pulls = self._expect_next(step)
                for shard in self._far:
                    sent = [b.index for b in self._pushed if b.shard == shard]
                    if buckets := [index for index in sent if index not in besides]:
                        early = pulls.pop(shard)._replace(buckets=buckets, ahead=settings)
                        self.receiving.ask_for({shard: early})
                self._to_ask = pulls

    @property
    def asks_ahead(self) -> bool:
        """Whether drafts are of use: a shard is on another host."""
        asks = self._sends_ahead and self._pushing.together
        return asks and self.receiving.ahead.pays and bool(self._far)

    @property
    def _far(self) -> list[int]:
        """The shards on other hosts."""
        return [shard for shard in range(self._client.shards) if not self._client.is_near(shard)]

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """See `Strategy`. Does not block."""
        self._awaited.ready(bucket, present)

    def finish(self, ending: Ending, *, publish: bool = True) -> bool:
        """See `Strategy`.

        Args:
            publish: give the values to the model; else they stay in flat memory, and this may run on another
                thread than the training thread.
        """
        awaited, pushing, step = self._awaited, self._pushing, self._awaited.step
        assert step is not None, "begin was called"
        if not awaited.all_ready:
            raise UsageError("not all buckets are ready")
        if pushing.asks is Asks.LAST:
            version, awaited.attempt = self._client.begin(step)
            awaited.step = step = replace(step, version=version)
        if pushing.several and not self._push_alone(step, ending):
            awaited.step = None
            self.encoder.applied(in_sums=True)
            return False
        in_one_call = pushing.when is When.IN_ONE_CALL
        with awaited.lock:
            awaited.versions.clear()
            self.flat.expect()
            pulls = self._expect_next(step) if self._to_ask is None else self._to_ask
            if not in_one_call:
                self.receiving.ask_for(pulls)
                if not pushing.several:
                    awaited.missing.add(FINISH)
            awaited.end(ending)
        if in_one_call:
            self.receiving.receive(0, pulls[0])
        self._wait()
        awaited.step = None
        self.encoder.applied()
        self._arrived_at(step.version + 1, self._besides, publish=publish)
        if self._history.enabled:
            self._history.record("applied", **step.applied(ending))
        self.computes_on(step.version + 1)
        return True

    def depart(self, ending: Ending) -> Callable[[], bool]:
        """See `Strategy`: `finish`, without giving the values to the model."""
        return partial(self.finish, ending, publish=False)

    def _push_alone(self, step: Step, ending: Ending) -> bool:
        """Push the rest, and block until the step is in a version. False: another one is to be computed."""
        awaited = self._awaited
        with awaited.lock:
            awaited.end(ending)
        while True:
            self._wait()
            with awaited.lock:
                attempt, generation = awaited.attempt, awaited.generation
            reply = self._client.await_version(step, attempt)
            kind = reply.WhichOneof("kind")
            if kind == "attempt":
                with awaited.lock:
                    awaited.missing.add(FINISH)
                    awaited.restart(reply.attempt, generation)
            elif kind != "pending":
                self.receiving.told.stopped = self.receiving.told.stopped or reply.stopped
                return reply.made

    # --- versions

    def fetch(self, version: int, *, contributor: bool, besides: Set[int] = frozenset()) -> None:
        """See `Strategy`.

        A worker that takes part in the round gets all of one version. Otherwise new versions may be made
        meanwhile; what is older than the rest is then fetched again, some times: the script may look at it,
        though nothing is computed on it before the worker takes part.
        """
        awaited = self._awaited
        every = wanted = [b for b in self.flat.layout.pull_order if b.index not in besides]
        self.flat.check(thorough=True)
        self.reset()  # answers for what was given up, and what went wrong with it, mean nothing here
        awaited.versions.clear()
        for _ in range(FETCHES):
            with awaited.lock:
                self.flat.expect()
                self.receiving.ask_for(self._expect(version, wanted, contributor=contributor))
            self._wait()
            newest = max(awaited.versions.values(), default=version)
            wanted = [b for b in every if awaited.versions.get(b.index, newest) < newest]
            if contributor or not wanted:
                break
            version = newest
        if (standing := self.receiving.standing) is not None:
            self.encoder.settle(made=standing.steps, term=self._client.term, version=standing.version)
        self._arrived_at(version, besides)
        if contributor:
            self.computes_on(version)

    def _arrived_at(self, version: int, besides: Set[int], *, publish: bool = True) -> None:
        """The values of `version` are there, or newer ones: their version is the oldest bucket's.

        Those of the buckets `besides` were not pulled.
        """
        versions = self._awaited.versions
        arrived = [b for b in self._stepped if b.index not in besides]
        self._held |= {b.index: versions.get(b.index, version) for b in arrived}
        if self._history.enabled:
            values = [(b.index, self._held[b.index], checksum(self.flat.value_bytes(b))) for b in arrived]
            self._history.record("values", term=self._client.stay.term, values=values)
        if publish:
            self.flat.publish(besides=besides)
        self.version = max(version, min(versions.values(), default=version))

    def computes_on(self, version: int) -> None:
        """See `Strategy`.

        It has to know if they are newer, or if it makes no version before it knows that they are read.
        """
        says = self._pushing.says
        if says is Says.ALWAYS or (says is Says.IF_NEWER and self.version > version):
            try:
                self._client.heartbeat(computes_on=self.version)
            except Refused as refusal:
                logger.debug("%s", refusal)  # the next call is refused, too

    def _expect(
        self, version: int, wanted: Sequence[Bucket], *, contributor: bool, held: int | None = None
    ) -> dict[int, Pull]:
        """Nothing of `wanted` has arrived; returns what to ask which shard for. The lock is held."""
        missing = {bucket.index for bucket in wanted}
        pulls = {}
        for shard in range(self._client.shards):
            own = [b.index for b in wanted if b.shard == shard]
            if own or shard == 0:
                missing.add(end_of(shard))
                generation = self._awaited.generation
                pulls[shard] = Pull(self._client.stay, generation, version, contributor, own, held)
        self._awaited.expect(missing)
        return pulls

    def _expect_next(self, step: Step) -> dict[int, Pull]:
        """See `_expect`: of the version that the step is to be part of."""
        wanted = [b for b in self._stepped if b.index not in self._besides]
        held = min((self._held.get(b.index, self.version) for b in wanted), default=self.version)
        return self._expect(step.version + 1, wanted, contributor=True, held=min(held, self.version))

    def _wait(self) -> None:
        """Until nothing is missing any more, or something has gone wrong."""
        while not self._awaited.wait(5):
            if self._awaited.missing == {FINISH}:
                self._client.heartbeat()  # a version without this worker: it was declared gone; this raises

    # --- the threads that push

    def _start(self, shard: int) -> None:
        thread = threading.Thread(target=self._run, args=(shard,), name=f"send-{shard}", daemon=True)
        self._threads[shard].append(thread)
        thread.start()

    def _enqueue(self, bucket: Bucket) -> None:
        """A bucket is due; the lock is held."""
        awaited = self._awaited
        assert awaited.step is not None
        self._queues[bucket.shard].put(_Push(awaited.generation, awaited.attempt, awaited.step, bucket))

    def _run(self, shard: int) -> None:
        while (push := self._queues[shard].get()) is not None:
            try:
                self._send(push)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:
                    self._awaited.fail(refusal, push.generation)
                elif self._pushing.several:
                    self._overtaken(push)
            except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
                self._awaited.fail(error, push.generation)

    def _overtaken(self, push: _Push) -> None:
        """The round has started again, and no pull tells this worker the new attempt: it has to ask."""
        with self._awaited.lock:
            if self._awaited.is_due(push.generation, push.attempt):
                self._awaited.arrived(FINISH, push.generation)

    def _send(self, push: _Push) -> None:
        """Push a bucket, and end the step with the last one. Blocks."""
        awaited, bucket, step, begun = self._awaited, push.bucket, push.step, (push.generation, push.attempt)
        if self._pushing.asks is Asks.FIRST:
            self._ask(push)
        with awaited.lock:
            if not awaited.is_due(*begun):
                return
            last = bucket is self._pushed[-1]
            along = awaited.ending if last and self._client.shards == 1 else None
            if along is not None and not awaited.only_last_is_left(*begun):
                return
        self._push(bucket, step, push.attempt, along)
        with awaited.lock:
            if not awaited.is_due(*begun):
                return
            ending = awaited.ending if awaited.acknowledged() else None
        if ending is not None:
            if along is None:
                self._client.finish(step, push.attempt, ending)
            awaited.arrived(FINISH, push.generation)

    def _ask(self, push: _Push) -> None:
        """Before the first push of a step: whether the round is made with it."""
        with self._asking:
            due = self._awaited.is_due(push.generation, push.attempt)
            if due and self._let_in is not push.step:
                try:
                    _, attempt = self._client.begin(push.step)
                except Refused as refusal:
                    self._awaited.fail(refusal, push.generation)  # before another thread asks as well
                    raise
                self._let_in = push.step
                self._awaited.restart(attempt, push.generation)

    def _push(self, bucket: Bucket, step: Step, attempt: int, ending: Ending | None) -> None:
        self.flat.wait_for(bucket)  # a codec is not chosen by how long a device computes
        with self.encoder.tuner.busy():
            payload = self._contribution(bucket, step, attempt)
            with self._traced(bucket, step, attempt, payload):
                self._client.push(bucket.index, bucket.shard, step, attempt, payload, ending)

    def _contribution(self, bucket: Bucket, step: Step, attempt: int) -> Payload:
        """What is sent of a bucket. It is recorded as sent."""
        if self._history.enabled:
            self._history.record("push", **step.pushed(bucket.index, attempt))
        present = self._awaited.present[bucket.index]
        absent = bool(present) and not any(present)
        if absent:
            return Payload(EMPTY, present=present)
        raw, gradient = self.flat.contribution_bytes(bucket), self.flat.contribution_of(bucket)
        return self.encoder.encode(
            bucket,
            gradient,
            raw,
            present,
            step=step.number,
            version=step.base,
            into=(step.version, attempt),
        )

    def _traced(
        self, bucket: Bucket, step: Step, attempt: int, payload: Payload
    ) -> AbstractContextManager[None]:
        """The block pushes a bucket."""
        return self._span(bucket, step, attempt, payload) if self._trace.enabled else nullcontext()

    @contextmanager
    def _span(self, bucket: Bucket, step: Step, attempt: int, payload: Payload) -> Iterator[None]:
        started, index = time.monotonic_ns(), bucket.index
        self._trace.complete(
            "queue", self._awaited.ready_at[index], started, lane=f"queue-{bucket.shard}", bucket=index
        )
        yield
        now = time.monotonic_ns()
        self._trace.complete(
            "push", started, now, bucket=index, step=step.number, attempt=attempt, bytes=len(payload.body)
        )

    # --- by the training thread itself

    def _answers(self, stay: Stay, shard: int, wanted: Wanted) -> Answers:
        """The answers to one call for what is wanted; it makes the step's pushes before, if they are due."""
        if not self._awaited.owing:
            return self._client.pull(stay, shard, wanted)
        return self._push_at_once(stay, wanted)

    def _push_at_once(self, stay: Stay, wanted: Wanted) -> Answers:
        step, ending = self._awaited.step, self._awaited.ending
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
            answers, first = self._client.pull(stay, last.shard, wanted), None  # it tells which is open
        self._awaited.owing = False
        if first is not None:
            yield first
        yield from answers

    def assign(self, step: Step, attempt: int) -> None:
        """See `Strategy`."""
        for bucket in self._pushed:
            self._history.record("push", **step.pushed(bucket.index, attempt))
            payload = Payload(self.flat.contribution_bytes(bucket), plain=True)
            self._client.push(bucket.index, bucket.shard, step, attempt, payload, None)
        self._client.finish(step, attempt, Ending(ranges=(), settings="", metrics={}, assigns=True))
