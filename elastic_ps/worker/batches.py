"""What the script has in hand for the next step: batches, and the metrics to go with them.

Only records that a backward() ran for are trained. A batch is decided when the next one is handed out, or
when there is none left: if no backward() ran for it, the script has skipped it, and nobody is to train it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ps.core.ledger import Range


class Batches:
    """The batches that no step has ended yet. Belongs to the training thread.

    Attributes:
        lost: the last ones went to others, as this worker had to join again or was late; the script does not
            know.
        given_back: the last one was dropped before anything was computed on it; the script may still hold it.
    """

    def __init__(self) -> None:
        self.lost = self.given_back = False
        self._open: list[Range] = []  # the batch that was handed out last, if no backward() has run for it
        self._computed: list[Range] = []
        self._skipped: list[Range] = []
        self._metrics: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._open or self._computed)

    @property
    def undecided(self) -> bool:
        """Whether no backward() has run for the batch that was handed out last."""
        return bool(self._open)

    @property
    def computed(self) -> tuple[Range, ...]:
        """The records that the next step is computed on, as far as it is."""
        return tuple(self._computed)

    @property
    def skipped(self) -> tuple[Range, ...]:
        """Records that the script has skipped, and nobody has been told of."""
        return tuple(self._skipped)

    @property
    def samples(self) -> int:
        """How many records the next step is computed on."""
        return sum(r.records for r in self._computed)

    def add(self, ranges: Iterable[Range]) -> None:
        """A batch of these records is handed to the script; the one before is decided."""
        self._open = list(ranges)
        self.lost = self.given_back = False

    def compute(self) -> None:
        """A backward() has run: the last batch belongs to the next step."""
        self._computed += self._open
        self._open = []

    def decide(self) -> int:
        """There will be no backward() for the last batch any more; returns how many records it skips."""
        records = sum(r.records for r in self._open)
        self._skipped += self._open
        self._open = []
        return records

    def reopen(self) -> int:
        """The gradients of what was computed are dropped; returns how many records are skipped by that.

        If no batch was handed out since, they may be computed once more (Foret et al. 2021, "Sharpness-aware
        minimization", does so), and it is not decided yet.
        """
        if self._open:
            return self.skip_computed()
        self._open, self._computed = self._computed, []
        return 0

    def skip_computed(self) -> int:
        """The gradients of what was computed are gone; returns how many records are skipped by that."""
        records = self.samples
        self._skipped += self._computed
        self._computed, self._metrics = [], {}
        return records

    def skip(self) -> int:
        """There will be no step with the batches in hand; returns how many records are skipped by that."""
        return self.skip_computed() + self.decide()

    def told(self) -> None:
        """The parameter server knows what was skipped."""
        self._skipped = []

    def drop(self) -> None:
        """The script stopped iterating: forget the batch that it has not computed on."""
        self.given_back = bool(self._open)
        self._open = []

    def step_made(self) -> None:
        """A step was made of what was computed. A batch that was loaded before it is for the next one."""
        self._computed, self._skipped, self._metrics = [], [], {}

    def forget(self, *, lost: bool = False) -> None:
        """They go to others; `lost`: without the script's doing."""
        self._open, self._computed, self._skipped, self._metrics = [], [], [], {}
        self.lost = lost

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Keep these values, numbers or tensors with one element, for the step."""
        self._metrics.update({k: v.detach() if hasattr(v, "detach") else v for k, v in metrics.items()})

    def metrics(self) -> dict[str, float]:
        """What was reported. Waits for the device that computes it."""
        return {key: float(value) for key, value in self._metrics.items()}
