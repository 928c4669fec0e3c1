"""Encodes the values that workers pull: once, for all of them."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from elastic_ps.codec import as_tensor, dtype_of
from elastic_ps.codec.base import Codec, pack
from elastic_ps.codec.plan import Plan
from elastic_ps.server.pulls import Pulled
from elastic_ps.server.shard import Shard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import run_to_message


class Sent(NamedTuple):
    """What is sent of a bucket's values.

    Attributes:
        run: how they are encoded; None: they are as they are.
        delta: they are what this version has changed; None: they are all of them.
    """

    run: pb.Run | None
    body: memoryview
    delta: int | None = None


class _Place:
    """What was made of a bucket last."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.lock = threading.Lock()
        self.made = (-1, 0)  # the version, and the draft's number
        self.sent = Sent(None, memoryview(b""))


class ValueEncoder:
    """Encodes as `spec.compression.values` says: each bucket once for a version. Thread-safe.

    It holds what it has made of each bucket until a newer version is pulled. Nothing of it is ever written
    to, so a worker that is slow to read gets what it was promised.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._places: dict[tuple[int, bool], _Place | None] = {}

    def encode(self, shard: Shard, pulled: Pulled) -> Sent:
        """What to send of a bucket that `shard` has handed out."""
        if pulled.delta is not None:  # it was encoded when the version was made
            (body,) = pulled.delta.packed.body
            packed = pulled.delta.packed._replace(codec=self._plan.deltas)
            return Sent(run_to_message(packed), body, pulled.delta.version)
        without_body = pulled.unchanged or pulled.stands
        place = None if without_body or not self._plan.encodes_values else self._place(shard, pulled)
        if place is None:
            return Sent(None, pulled.data)
        wanted = pulled.version, pulled.draft
        with place.lock:
            if place.made != wanted:
                place.sent = self._made(shard, pulled, place.codec)
                place.made = wanted
            return place.sent

    def _place(self, shard: Shard, pulled: Pulled) -> _Place | None:
        """A copy is of one version. What is no copy may change while a worker reads that has lost its part in
        the round; it learns that at the end, but nobody else may get what was made of it meanwhile.
        """
        key = (pulled.bucket, pulled.copied)
        with self._lock:
            if shard is not self._shard:  # it has been configured anew
                self._shard = shard
                self._places.clear()
            if key not in self._places:
                codec = self._plan.of_values(shard.layout, shard.bucket(pulled.bucket))
                self._places[key] = None if codec is None else _Place(codec)
            return self._places[key]

    def _made(self, shard: Shard, pulled: Pulled, codec: Codec) -> Sent:
        values = as_tensor(pulled.data, dtype_of(shard.bucket(pulled.bucket).dtype))
        packed = pack(codec.encode(values, {}, torch.Generator()))
        body = packed.body[0] if len(packed.body) == 1 else memoryview(b"".join(packed.body))
        return Sent(run_to_message(packed._replace(codec=self._plan.values)), body)
