"""Tensors of a bucket as they are received from a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastic_ps.codec import as_tensor, dtype_of
from elastic_ps.codec.finite import require_finite
from elastic_ps.codec.optimizers import Entry
from elastic_ps.core.partition import ITEM_SIZE, Bucket
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport.base import Incoming


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
