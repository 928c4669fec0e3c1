"""The limits of parameter groups, which torch's optimizers do not know: `clamp`, `max_norm`, `keep_zeros`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic_ps.core.settings import CLAMP, KEEP_ZEROS, MAX_NORM


@contextmanager
def limited(
    groups: Sequence[Mapping[str, Any]], rows: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[None]:
    """Keep the limits of these groups over the optimizer's step that is made within.

    Args:
        rows: a parameter as a tensor whose first dimension counts rows, in the same memory, for `max_norm`.
    """
    zeros = [
        (parameter.detach(), parameter.detach() == 0)
        for group in groups
        if group.get(KEEP_ZEROS)
        for parameter in group["params"]
    ]
    yield
    for group in groups:
        bounds, norm = group.get(CLAMP), group.get(MAX_NORM)
        for parameter in group["params"] if bounds is not None or norm is not None else ():
            if bounds is not None:
                parameter.detach().clamp_(*bounds)
            if norm is not None:
                rows(parameter).renorm_(2, 0, norm)
    for values, mask in zeros:
        values.masked_fill_(mask, 0)
