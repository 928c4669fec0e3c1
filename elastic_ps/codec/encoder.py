"""Encodes a worker's gradients, and keeps the remainders of its steps.

A step's gradient is encoded once: if the round starts again, the same bytes are pushed again. Its remainder
is added to the worker's next step once this one is in the model, or in the sums of the next version. A step
may be dropped, because it was late, the worker had to join again, or the round has started again without it.
Then its records go to others, and its remainder is dropped, too; see `feedback`. When the worker ends, its
remainder is lost.

A remainder is added to the next gradient whatever codecs are used, so a new term may have another
`spec.compression`.

If a codec has momentum, the remainder is the sum of that: this is algorithm 1 of Lin et al. 2018, "Deep
Gradient Compression", with momentum factor masking. The momentum is in the codec's state, so a dropped step
does not change it. There is one exception: if a worker has made several steps for a version, and the round
starts again, only the last one counts, and its bytes have the momentum of the earlier ones in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from elastic_ps.codec.auto import Auto
from elastic_ps.codec.base import Packed, Payload, random_of
from elastic_ps.codec.feedback import BucketFeedback, Feedback, Update
from elastic_ps.codec.finite import is_finite
from elastic_ps.codec.memory import Scratch, as_bytes
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.rows import ROWS, Rows
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.process.telemetry import Trace

logger = logging.getLogger(__name__)


class Meter(Protocol):
    """Counts the traffic; see `worker.wire.measuring.Traffic`."""

    def add(self, **counts: float) -> None: ...
    def chose(self, codec: str) -> None: ...


class Encoder:
    """Encodes the buckets of steps in sequence. Thread-safe, except for the same bucket of a step.

    Args:
        worker, seed: determine the random numbers, with the bucket, the version, and the number of steps that
            the worker has made on it.
        traffic: counts the traffic.

    Attributes:
        selection: chooses the codec, if the job leaves that to the workers, by the times of pushes.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        *,
        worker: int,
        seed: int,
        traffic: Meter,
        trace: Trace | None = None,
    ) -> None:
        self._layout = layout
        self._traffic = traffic
        self._trace = trace or Trace(None, "")
        self._who = f"{seed}/{worker}"
        self._feedback = Feedback()
        self._lock = threading.Lock()
        self._encoding = {bucket.index: threading.Lock() for bucket in layout.pushed}
        self._step = -1
        self._version: int | None = None  # the version of the step, once a bucket is encoded
        self._term = 0
        self._counted = (-1, 0)  # a version, and the number of valid steps of this worker on it
        self._made: dict[int, Payload] = {}  # the encoded buckets of this step
        self._bodies = {bucket.index: Scratch() for bucket in layout.pushed}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Encode gradients by `plan` from now on. No step may be under way.

        Remainders stay. The state of the previous codecs is dropped.
        """
        with self._lock:
            self._plan = plan
            self._runs = {bucket.index: plan.runs(self._layout, bucket) for bucket in self._layout.pushed}
            self._feedback.forget_states()
        for pattern in plan.unmatched(self._layout.tensors):
            logger.warning("compression.rules: no parameter matches the pattern %r", pattern)
        self.selection = CodecSelection(plan.auto, self._traffic)

    @property
    def left_over(self) -> Mapping[int, torch.Tensor]:
        """The remainders for the next gradient, by bucket; flat, float32."""
        with self._lock:
            return self._feedback.rests

    def begin(self, step: int, term: int = 0) -> None:
        """Begin the step with this number. It is settled whether the previous one is in the model.

        If a new term repeats versions, the steps use the same random numbers again.
        """
        with self._lock:
            if term != self._term:
                self._term, self._counted = term, (-1, 0)
            self._step, self._version = step, None
            self._made.clear()
            self._feedback.begin(step)
        self.selection.begin()

    def applied(self, *, in_sums: bool = False) -> None:
        """Note that the step is in the model, or with `in_sums` in the sums of the next version.

        In that case it is dropped if the round starts again.
        """
        with self._lock:
            self._feedback.applied(in_sums=in_sums)
            if self._version is not None:
                self._counted = (self._version, self._before(self._version) + 1)
        self.selection.end()

    def settle(self, *, made: int, term: int, version: int) -> None:
        """Note the job's version and term; see `Feedback.settle`."""
        with self._lock:
            self._feedback.settle(made=made, term=term, version=version)

    def _before(self, version: int) -> int:
        """The number of valid steps of this worker on the version."""
        known, steps = self._counted
        return steps if known == version else 0

    def encode(
        self,
        bucket: Bucket,
        gradient: torch.Tensor | Rows,
        present: Sequence[bool],
        *,
        step: int,
        version: int,
        into: tuple[int, int] | None = None,
    ) -> Payload:
        """The message for a bucket's gradient. A second call in a step returns the same.

        A gradient with NaN or Inf, or beyond float32, is sent unchanged, and the parameter server refuses it:
        a codec might hide it, or keep it for later steps.

        Args:
            gradient: flat, of the bucket's dtype, and not copied if it is sent unchanged; or rows of a table.
            present: whether each piece has a gradient; empty: all have.
            step: the number of the step. Results of an earlier step than the present one are not kept.
            version: the version that the step is computed on.
            into: the round that it is pushed for: its version and attempt. None: the first of `version`.
        """
        with self._lock:
            if step == self._step:
                self._feedback.pushed((self._term, *(into or (version, 0))))
        if isinstance(gradient, Rows):
            packed = gradient.packed(bucket.elements // self._layout.width(bucket))
            self._traffic.add(pushed_bytes=packed.nbytes, pushed_plain_bytes=packed.nbytes)
            return Payload(packed.body[0], ROWS, present=present)
        started = time.monotonic_ns()
        with self._encoding[bucket.index]:  # two threads push it, if the round starts again meanwhile
            with self._lock:
                payload = self._made.get(bucket.index) if step == self._step else None
            if payload is None:
                payload = self._encoded(bucket, gradient, present, step=step, version=version)
        ended = time.monotonic_ns()
        size, plain, seconds = len(payload.body), gradient.nbytes, 0.0
        if payload.runs:
            seconds = (ended - started) / 1e9
            self._trace.complete("encode", started, ended, bucket=bucket.index, bytes=size, plain=plain)
        self._traffic.add(pushed_bytes=size, pushed_plain_bytes=plain, encode_seconds=seconds)
        return payload

    def _encoded(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        present: Sequence[bool],
        *,
        step: int,
        version: int,
    ) -> Payload:
        with self._lock:
            plan, runs = self._plan, self._runs[bucket.index]
            before, waiting = self._before(version), self._feedback.rests.get(bucket.index)
            states = {
                n: {**self._feedback.state(bucket.index, n), "version": version} for n in range(len(runs))
            }
        if not (runs or waiting is not None) or not _is_encodable(gradient):
            return Payload(as_bytes(gradient), present=present, plain=bool(runs))
        made = BucketFeedback(waiting, gradient, bucket.absent(present))
        if not runs:
            payload = Payload(as_bytes(made.plain(slice(0, bucket.elements))), present=present)
        else:
            random = random_of(f"{self._who}/{version}/{before}/{bucket.index}")
            packed: list[Packed] = []
            for number, run in enumerate(runs):
                try:
                    with torch.no_grad():
                        packed.append(made.encode(run, states[number], random))
                except Exception as error:
                    text = f"The codec {run.name} has failed on a gradient, in bucket {bucket.index}."
                    error.add_note(text)
                    raise
            described = [each._replace(body=()) for each in packed]
            payload = Payload(self._joined(bucket, packed), plan.name, described, present)
        with self._lock:
            if step == self._step:
                self._version, self._made[bucket.index] = version, payload
                self._feedback.note(bucket.index, Update(waiting, made.rest()), states)
        return payload

    def _joined(self, bucket: Bucket, packed: Sequence[Packed]) -> memoryview:
        body, place = self._bodies[bucket.index].bytes(sum(made.nbytes for made in packed)), 0
        for part in (part for made in packed for part in made.body):
            body[place : place + len(part)] = part
            place += len(part)
        return body


def _is_encodable(gradient: torch.Tensor) -> bool:
    """Return True if all elements are finite, in float32 as well."""
    if gradient.dtype is not torch.float64:
        return is_finite(gradient)
    if not gradient.numel():
        return True
    (low, high), limit = torch.aminmax(gradient), torch.finfo(torch.float32).max
    return bool(-limit <= low) and bool(high <= limit)  # not, if one is NaN: then both are


class CodecSelection:
    """Measures how long steps are encoded and pushed, by which `auto` chooses a codec.

    Thread-safe, except `begin`, `backward_ended` and `end`, which belong to the main thread.

    Args:
        auto: the codec that gets the choice; None: nothing is chosen.
        traffic: gets the measurements and the choice.
    """

    def __init__(self, auto: Auto | None, traffic: Meter) -> None:
        self._traffic, self._auto = traffic, auto
        self._lock = threading.Lock()
        self._busy, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def active(self) -> bool:
        """Whether it chooses a codec."""
        return self._auto is not None

    def begin(self) -> None:
        """Begin a step."""
        with self._lock:
            self._seconds, self._since = 0.0, time.monotonic()
        if self._auto is not None:
            self._auto.begin(self._auto.choice.now)

    def backward_ended(self) -> None:
        """Count the time of encoding and pushing so far in the step as hidden behind backward."""
        with self._lock:
            now = time.monotonic() - self._since if self._busy else 0.0
            self._traffic.add(hidden_seconds=self._seconds + now)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block encodes and pushes a bucket."""
        with self._lock:
            self._busy += 1
            if self._busy == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy:
                    seconds = time.monotonic() - self._since
                    self._seconds += seconds
                    self._traffic.add(push_seconds=seconds)

    def end(self) -> None:
        """Note that the step is in the model."""
        if self._auto is None or not self._seconds:
            return
        choice, before = self._auto.choice, self._auto.choice.present
        choice.note(self._seconds, self._auto.error)
        self._seconds = 0.0
        self._traffic.chose(choice.present)
        if choice.present != before:
            logger.info("gradients are sent as %s from now on: %s", choice.present, choice.reason)
