"""Limits of scripts' tensors on a shard."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class TensorLimits:
    """The limits, the same for every job. Tests use shorter times."""

    bring: timedelta = timedelta(seconds=60)
    """A worker that uploads a tensor and sends nothing for this long is taken for lost."""

    tensors: int = 10_000
    """The number of tensors on a shard; each takes some memory besides its elements."""

    senders: int = 20_000
    """The number of senders whose last push a tensor remembers; the oldest are forgotten."""


USUAL = TensorLimits()
