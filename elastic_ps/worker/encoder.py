"""Encodes a worker's gradients, and keeps what a step has not sent.

A step's gradient is encoded once: if the round starts again, the same bytes are pushed again. What was not
sent of it belongs to the worker's next step as soon as this one is in the model. If it never is, because it
came too late or the worker had to join again, its records go to others, and what was left over before it
stays for the next step. What is left over when the worker ends is lost.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ps.codec import NONE
from elastic_ps.codec.base import Packed, Part, pack
from elastic_ps.codec.memory import as_bytes, name_of
from elastic_ps.codec.plan import Plan, Run
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.telemetry import Trace
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import run_to_message
from elastic_ps.worker.traffic import Traffic
from elastic_ps.worker.tuner import Tuner

_Place = tuple[int, int]
"""Index of a bucket, and of a run in it."""


@dataclass(frozen=True)
class Payload:
    """What is sent of a bucket.

    Attributes:
        body: the bytes.
        codec: the name of the job's codec; `none` if the bucket is sent as it is.
        runs: how it is encoded.
        present: for each piece, whether it has a gradient; empty: all have.
    """

    body: memoryview
    codec: str = NONE
    runs: Sequence[pb.Run] = ()
    present: Sequence[bool] = ()


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
        self._plan = plan
        self._traffic = traffic or Traffic()
        self.tuner = Tuner(plan.auto, self._traffic)
        self._trace = trace or Trace(None, "")
        self._runs = {bucket.index: plan.runs(layout, bucket) for bucket in layout.pushed}
        self._who = f"{seed}/{worker}"
        self._states: dict[_Place, dict[str, Any]] = {}
        self._left_over: dict[_Place, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._encoding = {bucket.index: threading.Lock() for bucket in layout.pushed}
        self._step = -1
        self._version: int | None = None  # that the step is computed on, once something of it is encoded
        self._term = 0
        self._counted = (-1, 0)  # a version, and how many steps that count this worker has made on it
        self._made: dict[int, Payload] = {}  # of this step's buckets
        self._next: dict[_Place, torch.Tensor] = {}  # what this step leaves over
        self._next_states: dict[_Place, dict[str, Any]] = {}
        self._bodies: dict[int, bytearray] = {}  # memory that has been written to is had faster than new one

    def begin(self, step: int, term: int = 0) -> None:
        """The step with this number begins. The one before is in the model by now, or never will be.

        A new term may make versions once more: then the steps draw the same numbers as before.
        """
        with self._lock:
            if term != self._term:
                self._term, self._counted = term, (-1, 0)
            self._step, self._version = step, None
            self.tuner.begin()
            self._made.clear()
            self._next.clear()
            self._next_states.clear()

    def applied(self) -> None:
        """The step is in the model, or in the sums that the next version is made of."""
        with self._lock:
            self._left_over |= self._next
            self._states |= self._next_states
            self._next.clear()
            self._next_states.clear()
            if self._version is not None:
                self._counted = (self._version, self._before(self._version) + 1)
            self.tuner.end()

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
    ) -> Payload:
        """What to send of a bucket's gradient. The second call in a step returns what the first one did.

        A gradient with NaN or Inf is sent as it is, and the parameter server refuses it: a codec might hide
        it, or keep it for later steps. So is one that float32 cannot hold.

        Args:
            gradient: flat, of the bucket's dtype; `raw` are its bytes.
            present: for each piece, whether it has a gradient; empty: all have.
            step: its number; what comes of an earlier one than the present is not kept.
            version: that the step is computed on.
        """
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
        runs = self._runs[bucket.index]
        plain = Payload(raw, present=present)
        if not runs or not _is_encodable(gradient):
            return plain
        with self._lock:
            before = self._before(version)
        random = torch.Generator()
        what = f"{self._who}/{version}/{before}/{bucket.index}"
        digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
        random.manual_seed(int.from_bytes(digest, "little"))
        packed: list[Packed] = []
        left_over: dict[_Place, torch.Tensor] = {}
        states: dict[_Place, dict[str, Any]] = {}
        for number, run in enumerate(runs):
            place, own = (bucket.index, number), gradient[run.elements]
            try:
                with torch.no_grad():
                    # A step that is never in the model changes no state: the codec gets a copy.
                    state = states[place] = {**self._states.get(place, {}), "version": version}
                    absent = _absent(bucket, run, present)
                    made, rest = self._encode_run(place, run, own, absent, state, random)
            except Exception as error:
                error.add_note(f"The codec {run.name} has failed on a gradient, in bucket {bucket.index}.")
                raise
            packed.append(made)
            if rest is not None:
                left_over[place] = rest
        payload = self._payload(bucket, runs, packed, present)
        with self._lock:
            if step == self._step:
                self._version, self._made[bucket.index] = version, payload
                self._next |= left_over
                self._next_states |= states
        return payload

    def _encode_run(
        self,
        place: _Place,
        run: Run,
        own: torch.Tensor,
        absent: Sequence[slice],
        state: dict[str, Any],
        random: torch.Generator,
    ) -> tuple[Packed, torch.Tensor | None]:
        """A run's gradient as it travels, and with error feedback what is left over of it."""
        if run.codec is None:
            return Packed((Part("", name_of(own.dtype), run.length),), "", [as_bytes(own)]), None
        if not run.codec.feedback:
            return pack(run.codec.encode(own.to(torch.float32), state, random)), None
        total = self._total(place, own, absent)
        encoded = run.codec.encode(total, state, random)
        packed = pack(encoded)
        decoded = torch.empty_like(total)
        run.codec.decode(encoded, decoded)
        # The parameter server has it in the model's dtype.
        return packed, self._rest(place, decoded.to(own.dtype), total, absent)

    def _total(self, place: _Place, own: torch.Tensor, absent: Sequence[slice]) -> torch.Tensor:
        """A run's gradient and what was left over before, but for pieces without a gradient, in float32."""
        total = own.to(torch.float32, copy=True)
        if place in self._left_over:
            total += self._left_over[place]
        for piece in absent:
            total[piece] = 0
        return total

    def _rest(
        self, place: _Place, decoded: torch.Tensor, total: torch.Tensor, absent: Sequence[slice]
    ) -> torch.Tensor:
        """What is left over of `total`, which may be what is sent. Pieces without a gradient keep theirs."""
        rest = total - decoded
        for piece in absent:
            rest[piece] = self._left_over[place][piece] if place in self._left_over else 0.0
        return rest

    def _payload(
        self, bucket: Bucket, runs: Sequence[Run], packed: Sequence[Packed], present: Sequence[bool]
    ) -> Payload:
        messages = [run_to_message(run.name, made) for run, made in zip(runs, packed, strict=True)]
        size = sum(made.nbytes for made in packed)
        memory = self._bodies.setdefault(bucket.index, bytearray())
        if len(memory) < size:
            memory = self._bodies[bucket.index] = bytearray(size)
        body, place = memoryview(memory)[:size], 0
        for part in (part for made in packed for part in made.body):
            body[place : place + len(part)] = part
            place += len(part)
        return Payload(body, self._plan.name, messages, present)


def _is_encodable(gradient: torch.Tensor) -> bool:
    """Whether all elements are finite, in float32 as well."""
    if not gradient.numel():
        return True
    (low, high), limit = torch.aminmax(gradient), torch.finfo(torch.float32).max
    return bool(-limit <= low) and bool(high <= limit)  # not, if one is NaN: then both are


def _absent(bucket: Bucket, run: Run, present: Sequence[bool]) -> list[slice]:
    """Where in a run there are pieces without a gradient."""
    absent, place = [], 0
    for index in range(run.pieces.start, run.pieces.stop):
        length = bucket.pieces[index].length
        if present and not present[index]:
            absent.append(slice(place, place + length))
        place += length
    return absent
