"""What the script has in hand for the next step: batches, and the metrics to go with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ps.core.ledger import Range


class Batches:
    """The batches that no step has ended yet. Belongs to the training thread.

    Attributes:
        lost: the last ones went to others, as this worker had to join again or was late; the script does not
            know.
        given_back: the last ones were dropped before anything was computed on them; the script may still
            hold one.
    """

    def __init__(self) -> None:
        self.lost = self.given_back = False
        self._ranges: list[Range] = []
        self._computed = 0  # how many of `_ranges` a backward() has run for
        self._metrics: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._ranges)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Their records."""
        return tuple(self._ranges)

    @property
    def samples(self) -> int:
        """How many records they are."""
        return sum(r.records for r in self._ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """A batch of these records is handed to the script."""
        self._ranges.extend(ranges)
        self.lost = self.given_back = False

    def computed(self) -> None:
        """A backward() has run: the batches so far belong to the next step."""
        self._computed = len(self._ranges)

    def drop(self) -> None:
        """The script stopped iterating: forget the batches that it has not computed on."""
        self.given_back = len(self._ranges) > self._computed
        del self._ranges[self._computed :]

    def forget(self, *, lost: bool = False) -> None:
        """A step has ended with them; or they are `lost`, and others compute on their records."""
        self._ranges, self._metrics, self._computed = [], {}, 0
        self.lost = lost

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Keep these values, numbers or tensors with one element, for the step."""
        self._metrics.update({k: v.detach() if hasattr(v, "detach") else v for k, v in metrics.items()})

    def metrics(self) -> dict[str, float]:
        """What was reported. Waits for the device that computes it."""
        return {key: float(value) for key, value in self._metrics.items()}
