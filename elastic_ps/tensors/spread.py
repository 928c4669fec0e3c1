"""Where on the shards a tensor lies that a script keeps there (`session.server`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from elastic_ps.core.partition import ITEM_SIZE, SMALLEST_BUCKET_BYTES, Rule, TensorSpec, partition

PushRule: TypeAlias = Literal["add", "copy", "zero"]
"""What a push does with a tensor: it adds to it, replaces it, or sets it to zero."""

PUSH_RULES: tuple[PushRule, ...] = get_args(PushRule)


class Slice(NamedTuple):
    """`length` elements from `start` on of the flattened tensor, on one shard. They travel together."""

    shard: int
    start: int
    length: int


def size_of(shape: Sequence[int], dtype: str) -> int:
    """The bytes of a tensor; `dtype` is a key of `ITEM_SIZE`."""
    return math.prod(shape) * ITEM_SIZE[dtype]


def spread(name: str, shape: Sequence[int], dtype: str, *, bucket_bytes: int, shards: int) -> list[Slice]:
    """Cut a tensor into slices of `bucket_bytes` at most, and share these out over the shards.

    The slices are given in the order of their elements. The shard of the first one, the tensor's *home*,
    follows from the name, so that small tensors, which are not cut, do not all lie on one shard.
    Deterministic: workers and parameter servers come to the same.
    """
    small = size_of(shape, dtype) <= min(bucket_bytes, SMALLEST_BUCKET_BYTES)
    spec = TensorSpec(name, tuple(shape), dtype, Rule.BROADCAST)
    layout = partition([spec], bucket_bytes=bucket_bytes, shards=1 if small else shards)
    home = zlib.crc32(name.encode()) % shards
    slices = [
        Slice((bucket.shard + home) % shards, piece.start, piece.length)
        for bucket in layout.buckets
        for piece in bucket.pieces
    ]
    return sorted(slices, key=lambda each: each.start)
