"""The threads that push a step's gradients while backward goes on.

A bucket is sent when all before it are, so every worker pushes in the same order. The last bucket of a step
is held back until the script calls `optimizer.step()`, because with a single shard it carries the end of the
step with it. A shard on another host has several send threads, so that the network is not idle while one of
them waits for an answer.

With bounded staleness nothing is sent before the script calls `optimizer.step()`: the round that the step
goes into waits for it from its first push on, so others would have to wait for the rest of a slow backward.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from elastic_ps.api.training import Consistency
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.transport.base import EMPTY
from elastic_ps.worker.awaited import FINISH, Awaited
from elastic_ps.worker.client import Client
from elastic_ps.worker.dialogue import Answers, Ending, Stay, Step, Wanted
from elastic_ps.worker.encoder import Encoder, Payload
from elastic_ps.worker.model import Flat

SENDERS = 3
"""Send threads for a shard on another host."""


class _Push(NamedTuple):
    """A bucket to be sent, begun in a generation of what is `Awaited`."""

    generation: int
    attempt: int
    step: Step
    bucket: Bucket


class Sending:
    """Pushes the buckets of one step after the other. `begin` and `ready` belong to the training thread.

    Args:
        awaited: where it is said what has arrived.
        encoder: of the gradients.
    """

    def __init__(
        self,
        client: Client,
        flat: Flat,
        awaited: Awaited,
        encoder: Encoder,
        *,
        trace: Trace,
        history: History,
    ) -> None:
        self._client, self._flat, self._awaited, self._encoder = client, flat, awaited, encoder
        self._trace, self._history = trace, history
        self._pushed = flat.layout.pushed
        self._ready = 0
        self._queued = 0
        self._acknowledged = 0
        self._ready_at: dict[int, int] = {}
        self._present: dict[int, Sequence[bool]] = {}
        self._asking = threading.Lock()
        self._let_in: Step | None = None
        self._owing = False  # who asks for the new version is to push the step first
        self._queues: list[queue.SimpleQueue[_Push | None]] = [
            queue.SimpleQueue() for _ in range(client.shards)
        ]
        self._threads: list[list[threading.Thread]] = [[] for _ in range(client.shards)]
        awaited.at_restart.append(self._restart)
        for shard in range(client.shards):
            self._start(shard)

    def _start(self, shard: int) -> None:
        thread = threading.Thread(target=self._run, args=(shard,), name=f"send-{shard}", daemon=True)
        self._threads[shard].append(thread)
        thread.start()

    def close(self) -> None:
        """End the threads; `Awaited.close` and `Client.close` were called before, so that none blocks."""
        for each, threads in zip(self._queues, self._threads, strict=True):
            for _ in threads:
                each.put(None)
        for thread in (thread for threads in self._threads for thread in threads):
            thread.join()

    def adopt(self, consistency: Consistency, *, at_once: bool) -> None:
        """The job's consistency is this one from now on; there is no step under way."""
        self._may_be_stale = consistency.may_be_stale
        self._may_be_late = consistency.may_be_late
        self._accumulates = consistency.several_steps
        self._waits_for_all = consistency.waits_for_all
        self._at_once = at_once

    @property
    def all_ready(self) -> bool:
        """Whether all buckets of the step are complete."""
        return self._ready == len(self._pushed)

    def begin(self) -> None:
        """A step begins. Shards that are found to be on other hosts get more threads. The lock is held."""
        self._ready = self._queued = self._acknowledged = 0
        self._present.clear()
        if self._waits_for_all and not self._at_once:
            for shard, threads in enumerate(self._threads):
                while len(threads) < SENDERS and not self._client.is_near(shard):
                    self._start(shard)

    def reset(self) -> None:
        """Forget the step under way."""
        self._owing = False

    def ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """A bucket's contribution is complete; send it when those before it are sent. Does not block."""
        with self._awaited.lock:
            self._present[bucket.index] = () if all(present) else tuple(present)
            self._ready_at[bucket.index] = time.monotonic_ns()
            while self._ready < len(self._pushed) and self._pushed[self._ready].index in self._present:
                self._ready += 1
            self.queue()

    def queue(self) -> None:
        """Hand over to the threads what may be sent by now; the lock is held."""
        if self._at_once:
            return
        awaited = self._awaited
        if awaited.ending is not None:
            limit = self._ready
        else:
            limit = 0 if self._may_be_stale else min(self._ready, len(self._pushed) - 1)
        while self._queued < limit:
            bucket = self._pushed[self._queued]
            assert awaited.step is not None
            self._queues[bucket.shard].put(_Push(awaited.generation, awaited.attempt, awaited.step, bucket))
            self._queued += 1

    def finish(self) -> None:
        """The script has ended the step: `Awaited.ending` says how. The lock is held."""
        self._owing = self._at_once
        self.queue()

    def _restart(self) -> None:
        """The round starts again: push all of it. The lock is held."""
        self._queued = self._acknowledged = 0
        self._owing = self._at_once
        self.queue()

    # --- the threads

    def _run(self, shard: int) -> None:
        while (push := self._queues[shard].get()) is not None:
            try:
                self._send(push)
            except Refused as refusal:
                if refusal.code is not RefusalCode.STALE_ATTEMPT:
                    self._awaited.fail(refusal, push.generation)
                elif self._accumulates:
                    self._overtaken(push)
            except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
                self._awaited.fail(error, push.generation)

    def _overtaken(self, push: _Push) -> None:
        """The round has started again, and no pull tells this worker the new attempt: it has to ask."""
        with self._awaited.lock:
            if self._current(push):
                self._awaited.arrived(FINISH, push.generation)

    def _current(self, push: _Push) -> bool:
        awaited = self._awaited
        if awaited.error is not None or awaited.closing.is_set():
            return False
        return (push.generation, push.attempt) == (awaited.generation, awaited.attempt)

    def _send(self, push: _Push) -> None:
        """Push a bucket, and end the step with the last one. Blocks."""
        awaited, bucket, step = self._awaited, push.bucket, push.step
        if self._may_be_late:
            self._ask(push)
        with awaited.lock:
            if not self._current(push):
                return
            last = bucket is self._pushed[-1]
            along = awaited.ending if last and self._client.shards == 1 else None
            if along is not None and not self._others_are_there(push):
                return
        self._push(bucket, step, push.attempt, along)
        with awaited.lock:
            if not self._current(push):
                return
            self._acknowledged += 1
            awaited.changed.notify_all()
            ending = awaited.ending if self._acknowledged == len(self._pushed) else None
        if ending is not None:
            if along is None:
                self._client.finish(step, push.attempt, ending)
            awaited.arrived(FINISH, push.generation)

    def _others_are_there(self, push: _Push) -> bool:
        """Wait, holding the lock, until only the last bucket is left. False if its push is not due."""
        others = len(self._pushed) - 1
        self._awaited.changed.wait_for(lambda: self._acknowledged >= others or not self._current(push))
        return self._current(push)

    def _ask(self, push: _Push) -> None:
        """Before the first push of a step: whether the round is made with it."""
        with self._asking:
            if self._let_in is not push.step and self._current(push):
                try:
                    _, attempt = self._client.begin(push.step)
                except Refused as refusal:
                    self._awaited.fail(refusal, push.generation)  # before another thread asks as well
                    raise
                self._let_in = push.step
                self._awaited.restart(attempt, push.generation)

    def _push(self, bucket: Bucket, step: Step, attempt: int, ending: Ending | None) -> None:
        self._flat.wait_for(bucket)  # a codec is not chosen by how long a device computes
        with self._encoder.tuner.busy():
            payload = self._contribution(bucket, step, attempt)
            with self._traced(bucket, step, attempt, payload):
                self._client.push(bucket.index, bucket.shard, step, attempt, payload, ending)

    def _contribution(self, bucket: Bucket, step: Step, attempt: int) -> Payload:
        """What is sent of a bucket. It is recorded as sent."""
        if self._history.enabled:
            self._history.record("push", **step.pushed(bucket.index, attempt))
        present = self._present[bucket.index]
        absent = bool(present) and not any(present)
        if absent:
            return Payload(EMPTY, present=present)
        raw, gradient = self._flat.contribution_bytes(bucket), self._flat.contribution_of(bucket)
        return self._encoder.encode(
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
            "queue", self._ready_at[index], started, lane=f"queue-{bucket.shard}", bucket=index
        )
        yield
        now = time.monotonic_ns()
        self._trace.complete(
            "push", started, now, bucket=index, step=step.number, attempt=attempt, bytes=len(payload.body)
        )

    # --- by the training thread itself

    def answers(self, stay: Stay, shard: int, wanted: Wanted) -> Answers:
        """The answers to one call for what is wanted; it makes the step's pushes before, if they are due."""
        if not self._owing:
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
        self._owing = False
        if first is not None:
            yield first
        yield from answers

    def assign(self, step: Step, attempt: int) -> None:
        """Push the values that the contributions hold, for the round of `step`. Blocks.

        Raises:
            Refused: STALE_ATTEMPT, LATE: the round has started again; ask what to do.
        """
        for bucket in self._pushed:
            self._history.record("push", **step.pushed(bucket.index, attempt))
            payload = Payload(self._flat.contribution_bytes(bucket), plain=True)
            self._client.push(bucket.index, bucket.shard, step, attempt, payload, None)
        self._client.finish(step, attempt, Ending(ranges=(), settings="", metrics={}, assigns=True))
