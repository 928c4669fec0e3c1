"""Encodes the values that workers pull, once for all of them."""

from __future__ import annotations

import threading

import torch

from elastic_ps.codec.base import Packed, pack
from elastic_ps.codec.memory import as_tensor, dtype_of
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket, Layout


class ValueEncoder:
    """Encodes the values of a layout by the job's codecs, each bucket once for a version. Thread-safe.

    It keeps the result of each bucket until a newer version is pulled. Results are never written to, so a
    slow reader gets consistent data.
    """

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._name = plan.values
        self._codecs = {bucket.index: plan.of_values(layout, bucket) for bucket in layout.buckets}
        self._locks = {bucket.index: threading.Lock() for bucket in layout.buckets}
        self._made: dict[tuple[int, bool], tuple[tuple[int, int], Packed]] = {}

    def encode(
        self, bucket: Bucket, values: memoryview, version: tuple[int, int], *, copied: bool
    ) -> Packed | None:
        """The encoded values, contiguous; None: they are sent unchanged.

        Args:
            version: their version, and the number of the draft.
            copied: whether they are a copy of one version. Otherwise they may change while a worker reads
                that has lost its part in the round. It learns that at the end, but nobody else may get the
                result.
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
