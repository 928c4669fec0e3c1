"""Rows of a table: what a step of `nn.Embedding(..., sparse=True)` sends, adds up and changes.

A table is a parameter with sparse gradients. Its gradient has the rows that a batch has looked up. So the
worker sends these rows with their numbers, the shard adds up only them, and workers get only the rows that a
version has changed. No step looks at a whole table, however large that is.

Rows are exact: no codec changes them, since the remainder that a biased codec keeps would be as large as the
table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from elastic_ps.codec.base import Packed
from elastic_ps.codec.memory import as_bytes, as_tensor
from elastic_ps.errors import InvalidModel

ROWS = "rows"
"""The name of this encoding, beside those of codecs."""

MOST_VERSIONS = 64
"""How many versions a shard remembers the changed rows of. A worker further behind gets the table."""


class Rows(NamedTuple):
    """Some rows of a matrix.

    Attributes:
        numbers: which they are, int64, ascending.
        values: their elements; of the shape (numbers, width).
    """

    numbers: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Rows:
        """The rows of a gradient on the CPU: sparse in its first dimension, or dense with all rows.

        Gradients of the same row are summed. A dense gradient is not copied.
        """
        if not gradient.is_sparse:
            return cls(torch.arange(len(gradient), device="cpu"), gradient.view(len(gradient), -1))
        if gradient.sparse_dim() != 1:
            raise InvalidModel(
                f"a gradient is sparse in {gradient.sparse_dim()} dimensions, but only rows can be: leave "
                "out sparse_grad=True"
            )
        found = gradient.detach().coalesce().cpu()
        numbers, width = found.indices()[0], gradient.shape[1:].numel()
        values = torch.empty(len(numbers), width, dtype=found.dtype, device="cpu")
        return cls(numbers, values.copy_(found.values().view(len(numbers), width)))

    def dense(self, rows: int) -> torch.Tensor:
        """A matrix with so many rows, zero in the others. `Tensor.to_dense` loses values with stride 0."""
        width, dtype = self.values.shape[1], self.values.dtype
        return self.fill(torch.empty(rows, width, dtype=dtype, device="cpu"))

    def fill(self, matrix: torch.Tensor) -> torch.Tensor:
        """Overwrite a matrix with these rows, and with zeros in the others; returns it."""
        return matrix.zero_().index_copy_(0, *self)

    def between(self, start: int, stop: int) -> Rows:
        """Those with numbers from `start` to below `stop`, counted from `start`."""
        first, end = torch.searchsorted(self.numbers, torch.tensor([start, stop], device="cpu")).tolist()
        return Rows(self.numbers[first:end] - start, self.values[first:end])

    def gradient(self, rows: int) -> torch.Tensor:
        """The sparse gradient of a matrix with so many rows, with the same memory."""
        checks = torch.sparse.check_sparse_tensor_invariants
        if not checks.is_enabled():
            checks.disable()  # else torch warns, in the optimizer's step, that nobody has chosen
        return torch.sparse_coo_tensor(
            self.numbers[None],
            self.values,
            (rows, self.values.shape[1]),
            is_coalesced=True,
            check_invariants=False,
        )

    def packed(self, rows: int) -> Packed:
        """The rows of a matrix with so many rows, to send: their values, then their numbers."""
        width = _width_of_numbers(rows)
        numbers = self.numbers.to(width)
        body = bytearray(self.values.nbytes + numbers.nbytes)
        body[: self.values.nbytes] = as_bytes(self.values.contiguous())
        body[self.values.nbytes :] = as_bytes(numbers)
        return Packed((), "", [memoryview(body)], ROWS)

    def to_bytes(self, rows: int) -> bytearray:
        """The body of `packed`."""
        (body,) = self.packed(rows).body
        return bytearray(body)

    @classmethod
    def of_bytes(cls, body: bytearray, matrix: torch.Tensor) -> Rows:
        """The inverse of `to_bytes`, for rows of this matrix. Raises ValueError."""
        width = matrix.shape[1:].numel()
        return cls.unpacked(memoryview(body), rows=len(matrix), width=width, dtype=matrix.dtype)

    @classmethod
    def unpacked(cls, body: memoryview, *, rows: int, width: int, dtype: torch.dtype) -> Rows:
        """The inverse of `packed`, for a matrix of this shape and dtype. The values are a view of `body`.

        Raises:
            ValueError: these are not rows of such a matrix.
        """
        kind = _width_of_numbers(rows)
        size = width * dtype.itemsize
        count, rest = divmod(len(body), size + kind.itemsize)
        if rest or count > rows:
            raise ValueError(
                f"{len(body)} bytes as rows of {size} bytes with their numbers, of a table with {rows} rows"
            )
        values = as_tensor(body[: count * size], dtype).view(count, width)
        numbers = as_tensor(memoryview(bytearray(body[count * size :])), kind).to(torch.int64)
        if count and not (
            int(numbers[0]) >= 0 and int(numbers[-1]) < rows and bool((numbers.diff() > 0).all())
        ):
            raise ValueError(f"the numbers of {count} rows do not ascend from 0 to {rows - 1}")
        return cls(numbers, values)


def _width_of_numbers(rows: int) -> torch.dtype:
    return torch.int32 if rows < 1 << 31 else torch.int64


class RowSum:
    """The weighted mean of gradients of a matrix with few rows each. Not thread-safe.

    Contributions are kept until the mean is asked for. Each then gets its share of the weight of all, and for
    each row they are added in the order in which they came.

    Args:
        width: the elements of a row.
        dtype: of the sum.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self.begin()

    def begin(self) -> None:
        """Begin a new sum."""
        self._parts: list[tuple[Rows, float]] = []
        self._mean: Rows | None = None
        self.weight = 0.0

    def add(self, rows: Rows | None, weight: float) -> None:
        """Add a contribution, whose memory must not change afterwards; None: one without any gradient."""
        self.weight += weight
        self._mean = None
        if rows is not None:
            self._parts.append((rows, weight))

    def set(self, mean: Rows) -> None:
        """Let the mean be this."""
        self.begin()
        self._mean = mean

    def mean(self) -> Rows:
        """The mean of each row that a contribution has, over the weight of all."""
        if self._mean is None:
            self._mean = self._merged()
        return self._mean

    def dense(self, rows: int) -> torch.Tensor:
        """The mean of a matrix with so many rows, with zeros where no contribution has a row."""
        return self.mean().dense(rows)

    def _merged(self) -> Rows:
        if len(self._parts) == 1 and self._parts[0][1] == self.weight:
            rows, _ = self._parts[0]
            return Rows(rows.numbers, rows.values.to(self._dtype))
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        every = torch.cat([none, *(rows.numbers for rows, _ in self._parts)])
        numbers, places = np.unique(every.numpy(), return_inverse=True)
        total = torch.zeros(len(numbers), self._width, dtype=self._dtype, device="cpu")
        sizes = [len(rows.numbers) for rows, _ in self._parts]
        for (rows, weight), own in zip(self._parts, torch.from_numpy(places).split(sizes), strict=True):
            total.index_add_(0, own, rows.values.to(self._dtype) * (weight / self.weight))
        return Rows(torch.from_numpy(numbers), total)


class RowChanges:
    """Remembers which rows the last versions of a table have changed. Not thread-safe.

    Args:
        rows: how many rows the table has.
    """

    def __init__(self, rows: int) -> None:
        self._most = rows // 2  # else most of the table is sent anyway
        self.begin(0)

    def begin(self, version: int) -> None:
        """All rows may have changed with this version."""
        self._since, self._kept = version, 0
        self._changed: deque[tuple[int, torch.Tensor]] = deque()

    def note(self, version: int, numbers: torch.Tensor) -> None:
        """A version has changed these rows."""
        self._changed.append((version, numbers))
        self._kept += len(numbers)
        while self._changed and (self._kept > self._most or len(self._changed) > MOST_VERSIONS):
            self._since, dropped = self._changed.popleft()
            self._kept -= len(dropped)

    def since(self, version: int) -> torch.Tensor | None:
        """The rows that have changed after this version, ascending; None: that is not known any more."""
        if version < self._since:
            return None
        return _union([numbers for number, numbers in self._changed if number > version])


class Arrivals:
    """Remembers which rows of tables have arrived, for a model with memory of its own.

    Several threads may call `note`. None may while another one calls `take`.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._whole: set[int] = set()

    def note(self, table: int, numbers: torch.Tensor | None) -> None:
        """These rows of a table have arrived; None: all."""
        if numbers is None:
            self._whole.add(table)
        else:
            self._rows.setdefault(table, []).append(numbers)

    def take(self) -> tuple[set[int], dict[int, torch.Tensor]]:
        """The tables that have arrived as a whole since the last call, and the rows of others."""
        whole, rows = self._whole, self._rows
        self._whole, self._rows = set(), {}
        return whole, {table: _union(parts) for table, parts in rows.items() if table not in whole}


def put(matrix: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
    """Replace these rows, each once, of a contiguous matrix on the CPU.

    numpy copies each row as one item, in half the time of torch's `index_copy_`.
    """
    item = np.dtype((np.void, matrix.shape[1] * matrix.element_size()))
    there, given = (
        each.detach().view(torch.uint8).numpy().view(item).reshape(-1)
        for each in (matrix, values.contiguous())
    )
    there[numbers.numpy()] = given


def _union(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    union: torch.Tensor = torch.cat([none, *parts]).sort().values.unique_consecutive()
    return union
