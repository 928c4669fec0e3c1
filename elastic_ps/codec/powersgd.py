"""PowerSGD: a gradient as the product of two narrow matrices."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ps.api import codecs
from elastic_ps.codec.base import Codec, Encoded, require
from elastic_ps.codec.builtin import FLOATS

FACTORS = ("p", "q")


class PowerSGD(Codec):
    """A matrix of low rank, found with one step of the power iteration (Vogels et al. 2019, "PowerSGD").

    `p` has orthogonal columns, and `q` the gradient's components along them; their product replaces the
    gradient. Each step begins with the `q` of the previous one (*warm start*).

    It differs from the paper in one point. There the workers average `p` before they orthogonalise its
    columns, so that all have the same ones, which takes two rounds of messages. Here each worker finds its
    own columns, and the parameter server adds the products, so the sum may have a higher rank. The difference
    to a worker's product is that worker's remainder.
    """

    feedback = True
    by_piece = True

    def __init__(self, rank: int = 4) -> None:
        """`rank`: the number of columns. A matrix of m by n elements becomes rank * (m + n) elements."""
        codecs.low_rank(rank)
        self._rank = rank
        self._rows = self._columns = 0

    def for_matrix(self, rows: int, columns: int) -> Codec | None:
        """See `Codec.for_matrix`. None for biases and small matrices, which would not become smaller."""
        if self._rank * (rows + columns) >= rows * columns:
            return None
        own = PowerSGD(self._rank)
        own._rows, own._columns = rows, columns
        return own

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        matrix = tensor.view(self._rows, self._columns)
        scale = float(tensor.abs().max())
        if not scale:  # keep the previous result
            lengths = (self._rows * self._rank, self._columns * self._rank)
            return Encoded({n: torch.zeros(each, **FLOATS) for n, each in zip(FACTORS, lengths, strict=True)})
        matrix = matrix / scale  # products of large or small numbers must stay in float32's range
        start = torch.randn(self._columns, self._rank, generator=random, **FLOATS)
        if (before := state.get("q")) is not None:
            start = torch.where(before.any(0), before, start)  # otherwise a column of zeros would stay zero
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
