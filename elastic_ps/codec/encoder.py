"""Encodes a worker's gradients, and keeps what a step has not sent.

A step's gradient is encoded once: if the round starts again, the same bytes are pushed again. What was not
sent of it belongs to the worker's next step as soon as this one is in the model, or in the sums that the
next version is made of. If the step is void, because it came too late, the worker had to join again, or the
round has started again without it, its records go to others, and it leaves nothing over; see `feedback`. What
is left over when the worker ends is lost.

It does not matter which codec has left something over: it is added to the next gradient, whatever the codec
is then. So another `spec.compression` may come with another term.

Where a codec has momentum, the sum of that is what waits: this is algorithm 1 of Lin et al. 2018, "Deep
Gradient Compression", with momentum factor masking. The momentum is in the codec's state. So a step that is
void leaves nothing of it, either. There is one exception: if the worker has made several steps for a version
and its round starts again, only the last one counts. Its bytes have the momentum of those before in them.
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
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.process.telemetry import Trace

logger = logging.getLogger(__name__)


class Meter(Protocol):
    """Counts what is sent; see `worker.measuring.Traffic`."""

    def pushed(self, nbytes: int, *, plain: int, seconds: float = 0.0) -> None: ...

    def busy(self, seconds: float) -> None: ...

    def chose(self, codec: str) -> None: ...


class Encoder:
    """Encodes the buckets of one step after the other. Thread-safe, but for the same bucket of a step.

    Args:
        worker, seed: with the bucket, the version, and how many steps the worker has made on that, they give
            the random numbers.
        traffic: counts what is sent.

    Attributes:
        selection: chooses the codec, if the job leaves that to the workers. Who pushes a bucket tells it.
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
        self._version: int | None = None  # that the step is computed on, once something of it is encoded
        self._term = 0
        self._counted = (-1, 0)  # a version, and how many steps that count this worker has made on it
        self._made: dict[int, Payload] = {}  # of this step's buckets
        self._bodies = {bucket.index: Scratch() for bucket in layout.pushed}
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Gradients are encoded as `plan` says from now on; there is no step under way.

        What is left over stays, what codecs keep does not: it is of another codec.
        """
        with self._lock:
            self._plan = plan
            self._runs = {bucket.index: plan.runs(self._layout, bucket) for bucket in self._layout.pushed}
            self._feedback.forget_states()
        self.selection = CodecSelection(plan.auto, self._traffic)

    @property
    def left_over(self) -> Mapping[int, torch.Tensor]:
        """What waits for the next gradient: of each bucket of which anything does, flat, float32."""
        with self._lock:
            return self._feedback.rests

    def begin(self, step: int, term: int = 0) -> None:
        """The step with this number begins. The one before is in the model by now, or never will be.

        A new term may make versions once more: then the steps draw the same numbers as before.
        """
        with self._lock:
            if term != self._term:
                self._term, self._counted = term, (-1, 0)
            self._step, self._version = step, None
            self._made.clear()
            self._feedback.begin(step)
        self.selection.begin()

    def applied(self, *, in_sums: bool = False) -> None:
        """The step is in the model; with `in_sums`, in the sums that the next version is made of.

        Then it is void if the round starts again.
        """
        with self._lock:
            self._feedback.applied(in_sums=in_sums)
            if self._version is not None:
                self._counted = (self._version, self._before(self._version) + 1)
        self.selection.end()

    def settle(self, *, made: int, term: int, version: int) -> None:
        """The job is at a version of a term; see `Feedback.settle`."""
        with self._lock:
            self._feedback.settle(made=made, term=term, version=version)

    def _before(self, version: int) -> int:
        """How many steps that count this worker has made on the version."""
        known, steps = self._counted
        return steps if known == version else 0

    def encode(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        present: Sequence[bool],
        *,
        step: int,
        version: int,
        into: tuple[int, int] | None = None,
    ) -> Payload:
        """What to send of a bucket's gradient. The second call in a step returns what the first one did.

        A gradient with NaN or Inf is sent as it is, and the parameter server refuses it: a codec might hide
        it, or keep it for later steps. So is one that float32 cannot hold.

        Args:
            gradient: flat, of the bucket's dtype. It is not copied if it is sent as it is.
            present: for each piece, whether it has a gradient; empty: all have.
            step: its number; what comes of an earlier one than the present is not kept.
            version: that the step is computed on.
            into: the round that it is pushed for: its version, and the attempt. None: the version's first.
        """
        with self._lock:
            if step == self._step:
                self._feedback.pushed((self._term, *(into or (version, 0))))
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
        self._traffic.pushed(size, plain=plain, seconds=seconds)
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
    """Measures how long steps are encoded and pushed, so that `auto` can choose a codec by it.

    Thread-safe, but for `begin` and `end`, which belong to the main thread.

    Args:
        auto: the codec that is told what is chosen; None: nothing is chosen.
        traffic: is told what is measured and chosen.
    """

    def __init__(self, auto: Auto | None, traffic: Meter) -> None:
        self._traffic, self._auto = traffic, auto
        self._lock = threading.Lock()
        self._busy, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def active(self) -> bool:
        """Whether it chooses."""
        return self._auto is not None

    def begin(self) -> None:
        """A step begins."""
        if self._auto is not None:
            with self._lock:
                self._seconds, self._since = 0.0, time.monotonic()
            self._auto.begin(self._auto.choice.now)

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
                    self._traffic.busy(seconds)

    def end(self) -> None:
        """The step that has begun is in the model."""
        if self._auto is None or not self._seconds:
            return
        choice, before = self._auto.choice, self._auto.choice.present
        choice.note(self._seconds, self._auto.error)
        self._seconds = 0.0
        self._traffic.chose(choice.present)
        if choice.present != before:
            logger.info("gradients are sent as %s from now on: %s", choice.present, choice.reason)
