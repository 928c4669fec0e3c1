"""Tensors of a bucket as they are received from a worker."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch

from elastic_ps.codec import as_bytes, as_tensor, dtype_of
from elastic_ps.codec.finite import require_finite
from elastic_ps.codec.optimizers import Entry
from elastic_ps.core.partition import ITEM_SIZE, Bucket
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport.base import Incoming

RECEIVE_BUFFERS = 4
"""Pushes that are received at the same time; the others wait, so memory does not grow with the workers."""


class Buffers:
    """Memory to receive buckets in, of a shard whose largest bucket has `nbytes`. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(RECEIVE_BUFFERS):
            self._free.put(as_bytes(torch.empty(nbytes, dtype=torch.uint8)))

    def receive(
        self, bucket: Bucket, incoming: Incoming, *, timeout: timedelta
    ) -> AbstractContextManager[torch.Tensor]:
        """A bucket's worth of values that comes in; see `values`."""
        return self.values(f"bucket {bucket.index}", bucket.dtype, bucket.nbytes, incoming, timeout=timeout)

    @contextmanager
    def values(
        self, what: str, dtype: str, nbytes: int, incoming: Incoming, *, timeout: timedelta
    ) -> Iterator[torch.Tensor]:
        """Values that come in, flat; where they lie if that memory is shared. Blocks.

        Its sender may change shared memory only when it has lost its stay, or the round has started again.
        Then the sum that it is added to, of an attempt that is over, is never used.

        Args:
            what: they are, in words.

        Raises:
            Refused: MALFORMED: the size is another. NOT_READY: all buffers were in use until `timeout`.
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


def read_state(
    bucket: Bucket,
    piece: int,
    entries: Sequence[Entry],
    incoming: Incoming,
    *,
    usual: Mapping[str, tuple[str, bool]],
) -> dict[str, torch.Tensor]:
    """Read the optimizer's state of a piece of a bucket. Blocks.

    Args:
        entries: what the body holds, one after the other.
        usual: what the optimizer keeps; dtype and whether it is one number, by key.

    Raises:
        Refused: MALFORMED: it is not all of that. NOT_FINITE.
    """
    length = bucket.pieces[piece].length if usual else 0
    sizes = [(1 if entry.scalar else length) * ITEM_SIZE.get(entry.dtype, 0) for entry in entries]
    given = {key: (dtype, scalar) for key, dtype, scalar in entries}
    if not given or given != usual or len(given) != len(entries) or incoming.size != sum(sizes):
        raise Refused(
            RefusalCode.MALFORMED,
            f"{incoming.size} bytes as the state {given} of piece {piece} of bucket {bucket.index}, whose "
            f"optimizer keeps {usual} for {length} elements",
        )
    body = memoryview(bytearray(incoming.size))
    incoming.read_into(body)
    state, at = {}, 0
    for entry, size in zip(entries, sizes, strict=True):
        value = as_tensor(body[at : at + size], dtype_of(entry.dtype)).clone()
        require_finite(value, f"{entry.key} of bucket {bucket.index}")
        state[entry.key], at = value.reshape(()) if entry.scalar else value, at + size
    return state
