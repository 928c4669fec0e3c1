"""Whether there is NaN or Inf in what a worker has computed, which would spoil the model for all."""

from __future__ import annotations

import math

import torch

from elastic_ps.codec.base import Sparse
from elastic_ps.errors import RefusalCode, Refused


def require_finite(
    contribution: torch.Tensor | Sparse, who: str, *, usual: torch.Tensor | None = None
) -> float:
    """Raise Refused (NOT_FINITE) if a floating-point tensor holds NaN or Inf, besides the Infs of `usual`.

    Returns a bound on the values' magnitudes; Inf if there is none at hand.
    """
    if isinstance(contribution, Sparse):
        largest = float(contribution.values.abs().sum(dtype=torch.float64))
        if largest <= torch.finfo(contribution.values.dtype).max:
            return largest
        contribution = contribution.at_once()
    if not contribution.is_floating_point() or contribution.numel() == 0:
        return 0.0
    half = contribution.dtype is torch.float16  # the squares of ordinary values would overflow
    # One pass; what overflows is looked at closely.
    total = float(contribution.sum() if half else torch.dot(contribution, contribution))
    if math.isfinite(total):
        return torch.finfo(torch.float16).max if half else math.sqrt(total) * 1.01
    wrong = ~torch.isfinite(contribution)
    if usual is not None:
        wrong &= contribution != usual
    bad = int(wrong.sum())
    if bad:
        raise Refused(RefusalCode.NOT_FINITE, f"{who}: {bad} of {contribution.numel()} values are NaN or Inf")
    return math.inf
