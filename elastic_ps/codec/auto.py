"""The codec `auto`: the worker chooses one of several that loses no more than the job allows."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch

from elastic_ps.codec.base import Codec, Encoded
from elastic_ps.codec.builtin import Bf16, Int4, Int8, SignSGD, TopK
from elastic_ps.codec.lossless import Plain
from elastic_ps.core.choice import Choice

NAME = "auto"

CANDIDATES: Mapping[str, type[Codec]] = {
    "none": Plain,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "signsgd": SignSGD,
    "topk": TopK,
}
"""The candidates, with their default options. Later ones lose more."""


class Auto(Codec):
    """Encodes with the chosen candidate, and records which one.

    The relative error of a tensor t, the gradient plus earlier remainders, is |t - decoded| / |t| in the
    Euclidean norm. If a candidate would lose more than `max_error`, the next one that loses less is used. So
    no tensor is sent with a larger error.

    Thread-safe, except `begin`.

    Attributes:
        choice: chooses the candidate by the measured times of steps.
    """

    feedback = True

    def __init__(self, max_error: float) -> None:
        self.max_error, self.choice = max_error, Choice(tuple(CANDIDATES), max_error)
        self._codecs = {name: kind() for name, kind in CANDIDATES.items()}
        self._names = tuple(CANDIDATES)
        self._lock = threading.Lock()
        self.begin(self._names[0])

    def begin(self, candidate: str) -> None:
        """Use this candidate from now on."""
        self._first = self._names.index(candidate)
        self._squares = [0.0, 0.0]  # sums of squares: of the losses, and of all elements

    @property
    def error(self) -> float:
        """The relative error of the candidate since `begin`, over all tensors."""
        with self._lock:
            lost, whole = self._squares
        return math.sqrt(lost / whole) if whole else 0.0

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:  # noqa: ARG002
        whole = _square(tensor)
        for name in self._names[self._first :: -1]:
            encoded = self._codecs[name].encode(tensor, {}, random)
            lost = 0.0
            if name != self._names[0]:
                decoded = torch.empty_like(tensor)
                self._codecs[name].decode(encoded, decoded)
                lost = _square(decoded.sub_(tensor))
            if name == self._names[self._first]:
                with self._lock:
                    self._squares = [self._squares[0] + lost, self._squares[1] + whole]
            if lost <= self.max_error**2 * whole:
                break
        return Encoded(encoded.tensors, {**encoded.values, NAME: name})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        codec, _ = self.within(encoded, out.numel())
        codec.decode(encoded, out)

    def within(self, encoded: Encoded, elements: int) -> tuple[Codec, Encoded]:  # noqa: ARG002
        """See `Codec.within`: the candidate that was used."""
        name = encoded.values.get(NAME)
        if name not in self._codecs:
            raise ValueError(f"it is encoded as {name!r}; expected one of {', '.join(self._names)}")
        return self._codecs[name], encoded


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
