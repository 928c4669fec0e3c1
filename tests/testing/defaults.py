"""What a script may set as torch's defaults for its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def defaults(dtype: torch.dtype, device: str = "cpu") -> Iterator[None]:
    """The dtype is that of the whole process, the device that of this thread."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
