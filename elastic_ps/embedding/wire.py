"""The bytes of the rows that travel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import Gradient
from elastic_ps.embedding.table import TableSpec
from elastic_ps.errors import Malformed


def gradient_to_bytes(gradient: Gradient) -> list[bytes]:
    """The ids, counts and values of rows."""
    ids, values, counts = gradient
    return [
        ids.astype("<i8").tobytes(),
        counts.astype("<i8").tobytes(),
        values.detach().contiguous().numpy().tobytes(),
    ]


def gradient_bytes(spec: TableSpec, rows: int) -> int:
    """The number of bytes of so many rows."""
    return rows * (16 + spec.dim * spec.torch_dtype.itemsize)


def gradient_from_bytes(body: memoryview, spec: TableSpec, rows: int) -> Gradient:
    """What `gradient_to_bytes` has given, in the same memory.

    Raises:
        Malformed: the ids do not ascend, or a count is not positive.
    """
    ids, counts = (np.frombuffer(body[i * 8 * rows : (i + 1) * 8 * rows], dtype="<i8") for i in (0, 1))
    if bool((ids[1:] <= ids[:-1]).any()) or bool((counts <= 0).any()):
        raise Malformed(f"the ids of the table {spec.name!r} do not ascend, or a count is below 1")
    values = np.frombuffer(body[16 * rows :], dtype=spec.dtype).reshape(rows, spec.dim)
    return Gradient(ids.astype(np.int64), torch.from_numpy(values), counts.astype(np.int64))


def ids_from_bytes(body: memoryview) -> Ids:
    """Ids, in memory of their own."""
    return np.frombuffer(body, dtype="<i8").astype(np.int64)


def columns_to_bytes(columns: Mapping[str, torch.Tensor]) -> bytes:
    """Some columns of a table by their names, as a safetensors file."""
    return safetensors.torch.save({name: each.contiguous() for name, each in columns.items()})


def columns_from_bytes(body: memoryview) -> dict[str, torch.Tensor]:
    """What `columns_to_bytes` has given. Raises Malformed if it is no such file."""
    try:
        return safetensors.torch.load(bytes(body))
    except SafetensorError as error:
        raise Malformed(f"{len(body)} bytes do not hold columns of a table: {error}") from error
