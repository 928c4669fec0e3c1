"""Memory to receive bodies in, whose size does not grow with the number of senders."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch

from elastic_ps.codec import as_bytes, as_tensor, dtype_of
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport.base import Incoming

RECEIVE_BUFFERS = 4
"""The number of pushes that are received at the same time. Others wait, so memory stays bounded."""


class Buffers:
    """Memory to receive buckets of up to `nbytes` bytes. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        # Not a SimpleQueue: see `process.lifecycle.Alarm`.
        self._free: queue.Queue[memoryview] = queue.Queue()
        for _ in range(RECEIVE_BUFFERS):
            self._free.put(as_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu")))

    def receive(
        self, bucket: Bucket, incoming: Incoming, *, timeout: timedelta
    ) -> AbstractContextManager[torch.Tensor]:
        """Receive the values of a bucket; see `values`."""
        return self.values(f"bucket {bucket.index}", bucket.dtype, bucket.nbytes, incoming, timeout=timeout)

    @contextmanager
    def values(
        self, what: str, dtype: str, nbytes: int, incoming: Incoming, *, timeout: timedelta
    ) -> Iterator[torch.Tensor]:
        """Receive values, flat; in place if they lie in shared memory. Blocks.

        The sender of shared memory changes it only when it is not a member any more, or the round has started
        again. Then the sum that the values go into is never used.

        Args:
            what: the name of the values in messages.

        Raises:
            Refused: MALFORMED: the size is wrong. NOT_READY: all buffers were in use until `timeout`.
        """
        if incoming.size != nbytes:
            text = f"{incoming.size} bytes for {what}, which has {nbytes}"
            raise Refused(RefusalCode.MALFORMED, text)
        kind, shared = dtype_of(dtype), incoming.view()
        if shared is not None:
            yield as_tensor(shared, kind)
            return
        try:
            buffer = self._free.get(timeout=timeout.total_seconds())
        except queue.Empty:
            raise Refused(RefusalCode.NOT_READY, "too many pushes are being received; push again") from None
        try:
            data = buffer[:nbytes]
            incoming.read_into(data)
            yield as_tensor(data, kind)
        finally:
            self._free.put(buffer)
