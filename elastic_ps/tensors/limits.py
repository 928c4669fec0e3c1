"""How much a shard keeps of scripts' tensors, and how long it waits for one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class TensorLimits:
    """The same for every job; tests need not wait for so long."""

    bring: timedelta = timedelta(seconds=60)
    """A worker that brings a script's tensor and sends nothing of it for so long is taken for lost."""

    tensors: int = 10_000
    """Tensors of scripts on a shard; each takes some memory besides its elements."""

    senders: int = 20_000
    """Processes whose last push such a tensor remembers; those that pushed longest ago are forgotten."""


USUAL = TensorLimits()
