"""Divides the tensors of `session.server` among the shards."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from elastic_ps.core.partition import ITEM_SIZE, SMALLEST_BUCKET_BYTES, Rule, TensorSpec, partition

PushRule: TypeAlias = Literal["add", "copy", "zero"]
"""The kind of a push: it adds to the tensor, replaces it, or sets it to zero."""

PUSH_RULES: tuple[PushRule, ...] = get_args(PushRule)


class Slice(NamedTuple):
    """`length` elements from `start` on of the flattened tensor, on one shard. They travel together."""

    shard: int
    start: int
    length: int


class Spec(NamedTuple):
    """The shape and dtype of a tensor, which are the same for every worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """`dtype` is a key of `ITEM_SIZE`."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def home_of(name: str, shards: int) -> int:
    """The shard of a tensor's first slice. It depends on the name, so that small tensors are spread."""
    return zlib.crc32(name.encode()) % shards


def spread(name: str, shape: Sequence[int], dtype: str, *, bucket_bytes: int, shards: int) -> list[Slice]:
    """Cut a tensor into slices of at most `bucket_bytes`, and divide them among the shards.

    The slices are in the order of their elements. Small tensors are not cut. Deterministic: workers and
    parameter servers compute the same slices.
    """
    small = Spec(name, tuple(shape), dtype).nbytes <= min(bucket_bytes, SMALLEST_BUCKET_BYTES)
    spec = TensorSpec(name, tuple(shape), dtype, Rule.BROADCAST)
    layout = partition([spec], bucket_bytes=bucket_bytes, shards=1 if small else shards)
    home = home_of(name, shards)
    slices = [
        Slice((bucket.shard + home) % shards, piece.start, piece.length)
        for bucket in layout.buckets
        for piece in bucket.pieces
    ]
    return sorted(slices, key=lambda each: each.start)
