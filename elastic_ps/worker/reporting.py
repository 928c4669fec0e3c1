"""What a script reports of a step, until the parameter server is told.

Tensors stay on their device: nothing waits for it before the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ps.core.metrics import REDUCTIONS, reduce_values
from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.errors import UsageError


def checked(metrics: Mapping[str, Any], reduce: str) -> dict[str, Any]:
    """The values without their gradients. Raises UsageError: see `Engine.report`."""
    if reduce not in REDUCTIONS:
        raise UsageError(f"session.metric got reduce={reduce!r}; expected one of {', '.join(REDUCTIONS)}")
    for name in metrics:
        if not is_name(name):
            raise UsageError(
                f"the name of a value that is reported is a text of 1 to {LONGEST_NAME} printable "
                f"characters; given: {repr(name)[:300]}"
            )
    return {name: _checked(name, value) for name, value in metrics.items()}


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        what = f"a tensor of {value.dtype} with shape {list(value.shape)}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            what = repr(value)[:300]
    raise UsageError(f"the value that is reported as {name!r} has to be one number, but is {what}")


class Reported:
    """Values of the batches of one or several steps.

    Attributes:
        values: by name and the number of the batch, the last value and how many records the batch has.
        batches: no number of a batch is above this.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], tuple[Any, int]] = {}
        self.batches = 0

    def add(self, values: Mapping[str, Any], *, batch: int, records: int) -> None:
        """Keep the values of the `batch`-th batch, which has so many records."""
        self.batches = max(self.batches, batch)
        for name, value in values.items():
            self.values[name, batch] = value, records

    def append(self, other: Reported) -> None:
        """Keep the values of other batches, too."""
        for (name, batch), value in other.values.items():
            self.values[name, self.batches + batch] = value
        self.batches += other.batches

    def reduced(self, reductions: Mapping[str, str]) -> dict[str, float]:
        """One value for each name, by their reductions; the mean for the others. Waits for the device."""
        given: dict[str, list[tuple[float, float]]] = {}
        for (name, _), (value, records) in self.values.items():
            given.setdefault(name, []).append((float(value), records))
        return {name: reduce_values(pairs, reductions.get(name, "mean")) for name, pairs in given.items()}
