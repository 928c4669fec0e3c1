"""PowerSGD: a gradient as the product of two narrow matrices."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ps.codec.base import Codec, Encoded, require
from elastic_ps.codec.builtin import FLOATS

FACTORS = ("p", "q")


class PowerSGD(Codec):
    """A matrix of low rank, found with one step of the power iteration (Vogels et al. 2019, "PowerSGD").

    `p` are orthogonal columns, `q` what the gradient has along them; their product is sent instead of it.
    Each step begins with the `q` of the one before (*warm start*).

    It differs from the paper in one thing. There the workers average `p` before they make its columns
    orthogonal, so that all have the same ones. That takes two rounds of messages, and sums that are no
    gradients. Here each worker finds its own, and the parameter server adds up the products, so the sum may
    have a higher rank. What a worker's product lacks is left over in that worker.
    """

    feedback = True
    by_piece = True

    def __init__(self, rank: int = 4) -> None:
        """`rank`: the number of columns. A matrix of m by n elements becomes rank * (m + n) of them."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 1024:
            raise ValueError(f"rank is {rank!r}; expected a whole number from 1 to 1024")
        self._rank = rank
        self._rows = self._columns = 0

    def for_matrix(self, rows: int, columns: int) -> Codec | None:
        """See `Codec.for_matrix`. None for what would not become smaller: biases, and small matrices."""
        if self._rank * (rows + columns) >= rows * columns:
            return None
        own = PowerSGD(self._rank)
        own._rows, own._columns = rows, columns
        return own

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        matrix = tensor.view(self._rows, self._columns)
        scale = float(tensor.abs().max())
        if not scale:  # what was found before stays
            lengths = (self._rows * self._rank, self._columns * self._rank)
            return Encoded({n: torch.zeros(each, **FLOATS) for n, each in zip(FACTORS, lengths, strict=True)})
        matrix = matrix / scale  # so that no product of large or small numbers leaves float32's range
        start = torch.randn(self._columns, self._rank, generator=random, **FLOATS)
        if (before := state.get("q")) is not None:
            start = torch.where(before.any(0), before, start)  # else a column of zeros would stay so
        p, _ = torch.linalg.qr(matrix @ start)
        q = matrix.T @ p
        state["q"] = q
        return Encoded({"p": p.reshape(-1), "q": (q * scale).reshape(-1)})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        factors = []
        for name, length in zip(FACTORS, (self._rows, self._columns), strict=True):
            factor = require(name, encoded.tensors[name], torch.float32, length * self._rank)
            factors.append(factor.view(length, self._rank))
        p, q = factors
        torch.mm(p, q.T, out=out.view(self._rows, self._columns))
