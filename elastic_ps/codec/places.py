"""Where few elements of a tensor are that are large, or not zero.

numpy compares with vector instructions, and finds what is true in a small fraction of the time that
`torch.Tensor.nonzero` takes, by which torch reads an array element by element.
"""

from __future__ import annotations

import numpy as np
import torch


def of_large(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """The places, in order, of the elements whose magnitude is at least `limit`, which is not negative.

    `tensor` is flat and on the CPU.
    """
    elements = tensor.numpy()
    large = elements >= limit
    large |= elements <= -limit
    return torch.from_numpy(np.flatnonzero(large))


def of_nonzero(tensor: torch.Tensor) -> torch.Tensor | None:
    """The places, in order, of the elements that are not zero; None if they are half of all, or more."""
    there = tensor.numpy() != 0
    if 2 * np.count_nonzero(there) >= there.size:
        return None
    return torch.from_numpy(np.flatnonzero(there))
