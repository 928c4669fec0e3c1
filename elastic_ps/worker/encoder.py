"""Encodes a worker's gradients, and keeps what a step has not sent.

A step's gradient is encoded once: if the round starts again, the same bytes are pushed again. What was not
sent of it belongs to the worker's next step as soon as this one is in the model, or in the sums that the
next version is made of. If the step is void, because it came too late, the worker had to join again, or the
round has started again without it, its records go to others, and it leaves nothing over; see `residual`. What
is left over when the worker ends is lost.

It does not matter which codec has left something over: it is added to the next gradient, whatever the codec
is then. So another `spec.compression` may come with another term.

Where a codec has momentum, the sum of that is what waits: this is algorithm 1 of Lin et al. 2018, "Deep
Gradient Compression", with momentum factor masking. The momentum is in the codec's state. So a step that is
void leaves nothing of it, either. There is one exception: if the worker has made several steps for a version
and its round starts again, only the last one counts. Its bytes have the momentum of those before in them.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from elastic_ps.codec.auto import CANDIDATES, Auto
from elastic_ps.codec.base import MOMENTUM, Packed, Part, Payload, few, pack
from elastic_ps.codec.finite import is_finite
from elastic_ps.codec.memory import as_bytes, name_of
from elastic_ps.codec.plan import Plan, Run
from elastic_ps.core.choice import Choice
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.process.telemetry import Trace
from elastic_ps.worker.measuring import Traffic
from elastic_ps.worker.residual import Residual, Rest, State

_BELOW_FLOAT16 = 65280.0
"""The largest number of bfloat16 in the range of float16, whose own largest one bfloat16 rounds up."""

logger = logging.getLogger(__name__)


class Encoder:
    """Encodes the buckets of one step after the other. Thread-safe, but for the same bucket of a step.

    Args:
        worker, seed: with the bucket, the version, and how many steps the worker has made on that, they give
            the random numbers.
        traffic: counts what is sent.

    Attributes:
        tuner: chooses the codec, if the job leaves that to the workers. Who pushes a bucket tells it.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        *,
        worker: int,
        seed: int,
        traffic: Traffic | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._layout = layout
        self._traffic = traffic or Traffic()
        self._trace = trace or Trace(None, "")
        self._who = f"{seed}/{worker}"
        self._residual = Residual()
        self._lock = threading.Lock()
        self._encoding = {bucket.index: threading.Lock() for bucket in layout.pushed}
        self._step = -1
        self._version: int | None = None  # that the step is computed on, once something of it is encoded
        self._term = 0
        self._counted = (-1, 0)  # a version, and how many steps that count this worker has made on it
        self._made: dict[int, Payload] = {}  # of this step's buckets
        self._bodies: dict[int, bytearray] = {}  # memory that has been written to is had faster than new one
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Gradients are encoded as `plan` says from now on; there is no step under way.

        What is left over stays, what codecs keep does not: it is of another codec.
        """
        with self._lock:
            self._plan = plan
            self._runs = {bucket.index: plan.runs(self._layout, bucket) for bucket in self._layout.pushed}
            self._residual.forget_states()
        self.tuner = Tuner(plan.auto, self._traffic)

    @property
    def left_over(self) -> Mapping[int, torch.Tensor]:
        """What waits for the next gradient: of each bucket of which anything does, flat, float32."""
        with self._lock:
            return self._residual.rests

    def begin(self, step: int, term: int = 0) -> None:
        """The step with this number begins. The one before is in the model by now, or never will be.

        A new term may make versions once more: then the steps draw the same numbers as before.
        """
        with self._lock:
            if term != self._term:
                self._term, self._counted = term, (-1, 0)
            self._step, self._version = step, None
            self._made.clear()
            self._residual.begin(step)
        self.tuner.begin()

    def applied(self, *, in_sums: bool = False) -> None:
        """The step is in the model; with `in_sums`, in the sums that the next version is made of.

        Then it is void if the round starts again.
        """
        with self._lock:
            self._residual.applied(in_sums=in_sums)
            if self._version is not None:
                self._counted = (self._version, self._before(self._version) + 1)
        self.tuner.end()

    def settle(self, *, made: int, term: int, version: int) -> None:
        """The job is at a version of a term; see `Residual.settle`."""
        with self._lock:
            self._residual.settle(made=made, term=term, version=version)

    def _before(self, version: int) -> int:
        """How many steps that count this worker has made on the version."""
        known, steps = self._counted
        return steps if known == version else 0

    def encode(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        raw: memoryview,
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
            gradient: flat, of the bucket's dtype; `raw` are its bytes.
            present: for each piece, whether it has a gradient; empty: all have.
            step: its number; what comes of an earlier one than the present is not kept.
            version: that the step is computed on.
            into: the round that it is pushed for: its version, and the attempt. None: the version's first.
        """
        with self._lock:
            if step == self._step:
                self._residual.pushed((self._term, *(into or (version, 0))))
        started = time.monotonic_ns()
        with self._encoding[bucket.index]:  # two threads push it, if the round starts again meanwhile
            payload = self._made_before(bucket, step)
            if payload is None:
                payload = self._encoded(bucket, gradient, raw, present, step=step, version=version)
        ended = time.monotonic_ns()
        size, plain, seconds = len(payload.body), len(raw), 0.0
        if payload.runs:
            seconds = (ended - started) / 1e9
            self._trace.complete("encode", started, ended, bucket=bucket.index, bytes=size, plain=plain)
        self._traffic.pushed(size, plain=plain, seconds=seconds)
        return payload

    def _made_before(self, bucket: Bucket, step: int) -> Payload | None:
        with self._lock:
            return self._made.get(bucket.index) if step == self._step else None

    def _encoded(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        raw: memoryview,
        present: Sequence[bool],
        *,
        step: int,
        version: int,
    ) -> Payload:
        with self._lock:
            plan, runs = self._plan, self._runs[bucket.index]
            before, waiting = self._before(version), self._residual.of(bucket.index)
            states = {
                n: {**self._residual.state(bucket.index, n), "version": version} for n in range(len(runs))
            }
        if not (runs or waiting is not None) or not _is_encodable(gradient):
            return Payload(raw, present=present, plain=bool(runs))
        made = _Made(waiting, gradient, bucket.absent(present))
        if not runs:
            payload = Payload(as_bytes(made.plain(slice(0, bucket.elements))), present=present)
        else:
            random = torch.Generator("cpu")
            what = f"{self._who}/{version}/{before}/{bucket.index}"
            digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
            random.manual_seed(int.from_bytes(digest, "little"))
            packed: list[Packed] = []
            for number, run in enumerate(runs):
                try:
                    with torch.no_grad():
                        packed.append(made.encode(run, states[number], random))
                except Exception as error:
                    error.add_note(
                        f"The codec {run.name} has failed on a gradient, in bucket {bucket.index}."
                    )
                    raise
            payload = self._payload(plan.name, bucket, runs, packed, present)
        with self._lock:
            if step == self._step:
                self._version, self._made[bucket.index] = version, payload
                self._residual.note(bucket.index, Rest(waiting, made.rest), states)
        return payload

    def _payload(
        self,
        name: str,
        bucket: Bucket,
        runs: Sequence[Run],
        packed: Sequence[Packed],
        present: Sequence[bool],
    ) -> Payload:
        described = [made._replace(codec=run.name, body=()) for run, made in zip(runs, packed, strict=True)]
        size = sum(made.nbytes for made in packed)
        memory = self._bodies.setdefault(bucket.index, bytearray())
        if len(memory) < size:
            memory = self._bodies[bucket.index] = bytearray(size)
        body, place = memoryview(memory)[:size], 0
        for part in (part for made in packed for part in made.body):
            body[place : place + len(part)] = part
            place += len(part)
        return Payload(body, name, described, present)


def _is_encodable(gradient: torch.Tensor) -> bool:
    """Whether all elements are finite, in float32 as well."""
    if gradient.dtype is not torch.float64:
        return is_finite(gradient)
    if not gradient.numel():
        return True
    (low, high), limit = torch.aminmax(gradient), torch.finfo(torch.float32).max
    return bool(-limit <= low) and bool(high <= limit)  # not, if one is NaN: then both are


class _Made:
    """What is made of a bucket's gradient in a step.

    Args:
        waiting: what was left over before; None: nothing.
        gradient: flat, of the bucket's dtype.
        absent: where there are pieces without a gradient. What waits there goes on waiting.

    Attributes:
        rest: what is left over; None: nothing.
    """

    def __init__(self, waiting: torch.Tensor | None, gradient: torch.Tensor, absent: Sequence[slice]) -> None:
        self._waiting, self._gradient, self._absent = waiting, gradient, absent
        self.rest: torch.Tensor | None = None
        if waiting is not None and absent:
            self.rest = torch.zeros_like(waiting)
            for piece in absent:
                self.rest[piece] = waiting[piece]

    def encode(self, run: Run, state: State, random: torch.Generator) -> Packed:
        """A run as it travels. Puts into `state` what the codec keeps, and its momentum."""
        if run.codec is None:
            own = self.plain(run.elements)
            return Packed((Part("", name_of(own.dtype), run.length),), "", [as_bytes(own)])
        total = self._total(run.elements, torch.float32)
        momentum = self._momentum(run.elements, run.codec.momentum, state, total)
        sendable = self._in_range(total, rounds=not run.codec.lossless)
        encoded = run.codec.encode(sendable, state, random)
        packed = pack(encoded)
        if not run.codec.feedback:
            self._leave_cut(run.elements, total, sendable)
            return packed
        sent = few(run.codec, encoded, run.length)
        if sent is not None:
            packed, values = packed.copied(), sent.values.clone()  # a codec may send the memory that it gets
            if momentum is not None:
                stopped = self._stopped(run.elements, sent.places[values != 0])
                state[MOMENTUM] = momentum.index_fill_(0, stopped, 0.0)
            if state.keys() - {"version", MOMENTUM}:  # it may also keep that memory
                total = total.clone()
            # The parameter server has it in the model's dtype.
            values = values.to(self._gradient.dtype).to(torch.float32)
            self._leave(run.elements, total.index_add_(0, sent.places, values, alpha=-1))
            return packed
        decoded = torch.empty_like(total)
        run.codec.decode(encoded, decoded)
        self._leave(run.elements, (total - decoded.to(self._gradient.dtype)).to(torch.float32))
        if momentum is not None:
            for piece in self._absent_in(run.elements):
                decoded[piece] = 0.0  # a codec that sends all makes something of what is absent, too
            state[MOMENTUM] = momentum.masked_fill_(decoded != 0, 0.0)
        return packed

    def _stopped(self, elements: slice, places: torch.Tensor) -> torch.Tensor:
        """Those of the places that were sent whose momentum ends: not the ones without a gradient."""
        for piece in self._absent_in(elements):
            places = places[(places < piece.start) | (places >= piece.stop)]
        return places

    def _in_range(self, total: torch.Tensor, *, rounds: bool) -> torch.Tensor:
        """What of a total the model's dtype can hold. Gradients add up to more than one of them is.

        Args:
            rounds: what is sent is rounded.
        """
        dtype = self._gradient.dtype
        if dtype.itemsize >= total.dtype.itemsize:
            return total
        limit = torch.finfo(dtype).max
        if rounds and dtype is torch.float16:
            limit = _BELOW_FLOAT16
        return total.clamp(-limit, limit)

    def _momentum(
        self, elements: slice, factor: float, state: State, total: torch.Tensor
    ) -> torch.Tensor | None:
        """Momentum with this step's gradient; None: the codec has none. `total` becomes what that adds up to.

        That of pieces without a gradient stays as it is, and does not enter the total.
        """
        if not factor:
            return None
        before, gradient = state.get(MOMENTUM), self._gradient[elements]
        if before is None:
            momentum = gradient.to(torch.float32, copy=True)
        else:
            momentum = before * factor
            total += momentum
            momentum += gradient
        for piece in self._absent_in(elements):
            total[piece] = 0.0
            momentum[piece] = 0.0 if before is None else before[piece]
        return momentum

    def plain(self, elements: slice) -> torch.Tensor:
        """These elements as they are sent without a codec: only what their dtype cannot hold is left over."""
        if self._waiting is None:
            return self._gradient[elements]
        dtype = self._gradient.dtype
        total = self._total(elements, torch.promote_types(dtype, torch.float32))
        sendable = self._in_range(total, rounds=False)
        self._leave_cut(elements, total, sendable)
        return sendable.to(dtype)

    def _total(self, elements: slice, dtype: torch.dtype) -> torch.Tensor:
        """The gradient and what waits, but for pieces without a gradient."""
        gradient = self._gradient[elements]
        if self._waiting is None:
            total = gradient.to(dtype, copy=True)
        else:
            total = torch.add(gradient.to(dtype), self._waiting[elements])
        for piece in self._absent_in(elements):
            total[piece] = 0
        return total

    def _absent_in(self, elements: slice) -> list[slice]:
        """The pieces without a gradient among these elements, counted from the first of those."""
        first, last = elements.start, elements.stop
        return [
            slice(max(p.start, first) - first, min(p.stop, last) - first)
            for p in self._absent
            if p.start < last and p.stop > first
        ]

    def _leave_cut(self, elements: slice, total: torch.Tensor, sendable: torch.Tensor) -> None:
        """What is out of the model's range goes on waiting."""
        if sendable is not total and bool((sendable != total).any()):
            self._leave(elements, total - sendable)

    def _leave(self, elements: slice, rest: torch.Tensor) -> None:
        for piece in self._absent_in(elements):
            rest[piece] = 0.0 if self._waiting is None else self._waiting[elements][piece]
        if self.rest is None:
            whole = len(rest) == len(self._gradient)
            self.rest = rest if whole else torch.zeros_like(self._gradient, dtype=torch.float32)
        if self.rest is not rest:
            self.rest[elements] = rest


class Tuner:
    """Measures how long steps are encoded and pushed, so that `auto` can choose a codec by it.

    Thread-safe, but for `begin` and `end`, which belong to the main thread.

    Args:
        auto: the codec that is told what is chosen; None: nothing is chosen.
        traffic: is told what is measured and chosen.
    """

    def __init__(self, auto: Auto | None, traffic: Traffic) -> None:
        self._traffic = traffic
        self._auto = auto
        self._choice = Choice(tuple(CANDIDATES), auto.max_error) if auto is not None else None
        self._lock = threading.Lock()
        self._busy, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def active(self) -> bool:
        """Whether it chooses."""
        return self._auto is not None

    def begin(self) -> None:
        """A step begins."""
        if self._auto is None or self._choice is None:
            return
        with self._lock:
            self._seconds, self._since = 0.0, time.monotonic()
        self._auto.begin(self._choice.now)

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
        if self._auto is None or self._choice is None or not self._seconds:
            return
        before = self._choice.present
        self._choice.note(self._seconds, self._auto.error)
        self._seconds = 0.0
        self._traffic.chose(self._choice.present)
        if self._choice.present != before:
            logger.info("gradients are sent as %s from now on: %s", self._choice.present, self._choice.reason)
