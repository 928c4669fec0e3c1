"""A shard for tests, told what a coordinator would tell it, and bodies that arrive as a test wants."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.mutable import MutableFields
from elastic_ps.codec import as_bytes, dtype_of
from elastic_ps.codec.base import Payload, Sparse
from elastic_ps.codec.decoder import Decoder
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.plan import Plan
from elastic_ps.contract.identity import Identity
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import Application, Settings
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Configuration
from elastic_ps.server.shards.shard import Shard

TERM = 3
LR = Settings(groups=({"lr": 1.0},))
SYNC = Consistency()

HASTY = ServerLimits(shard_answer=timedelta(milliseconds=100))
"""A shard's blocked calls give up soon."""

PLAIN = Payload(memoryview(b""), plain=True)
"""Describes a push that is not encoded."""


class Body:
    """A frame's body. With `gate`, half of it arrives, then the rest when the gate opens."""

    header = b""
    transport = "test"
    peer: Identity | None = None

    def __init__(
        self, values: torch.Tensor, *, gate: threading.Event | None = None, cut_off: bool = False
    ) -> None:
        self._data = as_bytes(values.clone())
        self.size = len(self._data)
        self.started = threading.Event()
        self._gate, self._cut_off = gate, cut_off

    def view(self) -> memoryview | None:
        return None

    def read_into(self, target: memoryview) -> None:
        half = self.size // 2
        target[:half] = self._data[:half]
        self.started.set()
        if self._gate is not None:
            assert self._gate.wait(10)
        if self._cut_off:
            raise ConnectionLost("cut off")
        target[half:] = self._data[half:]


def body_of(payload: Payload) -> Body:
    return Body(torch.frombuffer(bytearray(payload.body), dtype=torch.uint8))


def arrived(decoder: Decoder, bucket: Bucket, payload: Payload, *, worker: int = 3) -> torch.Tensor:
    """What a shard gets of a gradient: all of its elements."""
    body = body_of(payload)
    opened = decoder.open(bucket, payload, body, worker=worker)
    result = torch.zeros(bucket.elements, dtype=dtype_of(bucket.dtype))
    if opened is None:
        body.read_into(as_bytes(result))
        return result
    with opened as made:
        if isinstance(made, Sparse):
            return result.index_add_(0, made.places, made.values)
        assert isinstance(made, torch.Tensor)
        return made.clone()


def tensor(name: str, *shape: int, dtype: str = "float32", rule: Rule = Rule.GRADIENT) -> TensorSpec:
    """A tensor; trained ones are in group 0."""
    return TensorSpec(name, shape, dtype, rule, 0 if rule is Rule.GRADIENT else -1)


def one_bucket(*tensors: TensorSpec) -> Layout:
    """All tensors, of one rule and dtype, in one bucket."""
    pieces = tuple(Piece(i, 0, t.elements) for i, t in enumerate(tensors))
    return Layout(tensors, (Bucket(0, 0, tensors[0].dtype, tensors[0].rule, pieces),), 1)


class Rig:
    """A shard that is told what a coordinator would tell it."""

    def __init__(
        self,
        layout: Layout,
        *,
        index: int = 0,
        optimizer: str = "SGD",
        settings: Settings = LR,
        workers: Sequence[int] = (0, 1, 2),
        consistency: Consistency = SYNC,
        codecs: Plan | None = None,
        optimizers: Optimizers | None = None,
        limits: ServerLimits = USUAL,
        draft_bytes: float = math.inf,
    ) -> None:
        self.layout = layout
        self.shard = Shard(
            index,
            Configuration(
                layout, optimizer, settings, TERM, None, mutable=MutableFields(consistency=consistency)
            ),
            trace=Trace(None, ""),
            codecs=codecs,
            optimizers=optimizers,
            draft_bytes=draft_bytes,
            limits=limits,
        )
        self.settings = settings
        self.workers = {worker: 10 + worker for worker in workers}
        self.version = self.attempt = 0
        self.shard.advance(0, 0, self.workers, None)
        self.buckets = layout.of_shard(index)

    def fill(self, bucket: int, values: torch.Tensor) -> None:
        first, incarnation = next(iter(self.workers.items()))
        self.shard.initialise(bucket, first, incarnation, Body(values))

    def key(self, worker: int, bucket: int = 0, **change: int) -> PushKey:
        """The push of `worker`'s step, whose incarnation is 10 + worker and number the version."""
        values = {"incarnation": 10 + worker, "step": self.version, "version": self.version}
        values |= {"term": TERM, "attempt": self.attempt}
        return PushKey(worker=worker, bucket=bucket, **{**values, **change})

    def push(
        self,
        worker: int,
        values: torch.Tensor | Body,
        *,
        bucket: int = 0,
        samples: float = 1,
        present: Sequence[bool] = (),
        **change: int,
    ) -> bool:
        body = values if isinstance(values, Body) else Body(values)
        sent = replace(PLAIN, present=present)
        return self.shard.push(self.key(worker, bucket, **change), samples, sent, body)

    def application(self, *workers: int, samples: float) -> Application:
        contributors = [(w, 10 + w, self.version) for w in workers]
        return Application(self.attempt, contributors, float(samples), self.settings)

    def commit(self, *workers: int, samples: float) -> None:
        application = self.application(*workers, samples=samples)
        self.shard.advance(self.version + 1, 0, self.workers, application)
        self.version, self.attempt = self.version + 1, 0

    def restart(self, *workers: int) -> None:
        self.attempt += 1
        self.workers = {worker: 10 + worker for worker in workers}
        self.shard.advance(self.version, self.attempt, self.workers, None)

    def values(self, bucket: int = 0) -> torch.Tensor:
        return next(values for b, values in self.shard.values() if b.index == bucket).clone()


def ones(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value)


def refusal(future: Future[Any]) -> RefusalCode:
    error = future.exception(10)
    assert isinstance(error, Refused), error
    return error.code
