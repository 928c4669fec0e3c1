"""Looks for NaN and Inf in a worker's contribution, which would spoil the model for all."""

from __future__ import annotations

import math

import torch

from elastic_ps.codec.base import Sparse
from elastic_ps.codec.rows import Rows
from elastic_ps.errors import RefusalCode, Refused

ALONE = 32 * 1024
"""The number of elements that one thread checks faster than others wake up. Up to here torch uses one thread,
but the library behind `torch.dot` uses several from 10,000 elements on, or fewer."""


WHAT_TO_DO = (
    "If the loss has grown before, the training diverges: lower the learning rate, or limit the norm of the "
    "gradient. If not, look for the record or the operation that yields NaN or Inf"
)
"""Advice for a step whose gradients are not finite."""


def require_finite(
    contribution: torch.Tensor | Sparse | Rows,
    who: str,
    *,
    usual: torch.Tensor | None = None,
    advice: str = "",
) -> float:
    """Raise Refused (NOT_FINITE) if a floating-point tensor holds NaN or Inf, besides the Infs of `usual`.

    Args:
        advice: what to do then, in a sentence.

    Returns a bound on the values' magnitudes; Inf if none is known.
    """
    if isinstance(contribution, Sparse):
        largest = float(contribution.values.abs().sum(dtype=torch.float64))
        if largest <= torch.finfo(contribution.values.dtype).max:
            return largest
        contribution = contribution.at_once()
    if isinstance(contribution, Rows):
        contribution = contribution.values.view(-1)
    if not contribution.is_floating_point() or contribution.numel() == 0:
        return 0.0
    largest = _bound(contribution)
    if math.isfinite(largest):
        return largest
    wrong = ~torch.isfinite(contribution)
    if usual is not None:
        wrong &= contribution != usual
    bad = int(wrong.sum())
    if bad:
        text = f"{who}: {bad} of {contribution.numel()} values are NaN or Inf"
        raise Refused(RefusalCode.NOT_FINITE, f"{text}. {advice}" if advice else text)
    return math.inf


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a flat tensor holds neither NaN nor Inf."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return math.isfinite(_bound(tensor)) or bool(torch.isfinite(tensor).all())


def _bound(tensor: torch.Tensor) -> float:
    """A bound on the magnitudes; not finite if an element is not, and perhaps if some are very large.

    It takes one pass, while `torch.isfinite` takes several. After an overflow a closer check is needed.
    """
    if tensor.dtype is torch.float16:  # the squares of ordinary values would overflow
        return torch.finfo(torch.float16).max if math.isfinite(float(tensor.sum())) else math.inf
    if tensor.numel() <= ALONE:
        return float(torch.linalg.vector_norm(tensor)) * 1.01
    return math.sqrt(float(torch.dot(tensor, tensor))) * 1.01
