"""Packs the values that workers pull: once, for all of them."""

from __future__ import annotations

import threading

import torch

from elastic_ps.codec.base import Packed, pack
from elastic_ps.codec.memory import as_tensor, dtype_of
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Layout


class ValueEncoder:
    """Encodes the values of a layout, each bucket once for a version, as the job says. Thread-safe.

    It holds what it has made of each bucket until a newer version is pulled. Nothing of it is ever written
    to, so a worker that is slow to read gets what it was promised.
    """

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._name = plan.values
        self._codecs = {bucket.index: plan.of_values(layout, bucket) for bucket in layout.buckets}
        self._locks = {bucket.index: threading.Lock() for bucket in layout.buckets}
        self._made: dict[tuple[int, bool], tuple[tuple[int, int], Packed]] = {}

    def encode(
        self, bucket: Bucket, values: memoryview, version: tuple[int, int], *, copied: bool
    ) -> Packed | None:
        """The values as they travel, in one piece; None: as they are.

        Args:
            version: that they are of, and the draft's number.
            copied: they are a copy, which is of one version. What is no copy may change while a worker reads
                that has lost its part in the round; it learns that at the end, but nobody else may get what
                was made of it meanwhile.
        """
        codec = self._codecs[bucket.index]
        if codec is None:
            return None
        with self._locks[bucket.index]:
            made, packed = self._made.get((bucket.index, copied), (None, None))
            if made != version:
                plain = as_tensor(values, dtype_of(bucket.dtype))
                packed = pack(codec.encode(plain, {}, torch.Generator()), self._name).joined()
                self._made[bucket.index, copied] = version, packed
            return packed
