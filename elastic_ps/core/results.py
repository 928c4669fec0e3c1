"""The results that steps report: metrics, losses, rates and staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ps.core.consistency import Contribution
from elastic_ps.core.divergence import Trend
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.metrics import Metrics, keep, reduce_all
from elastic_ps.core.progress import Curve, Distribution, Rate


@dataclass
class Results:
    """The reports of a job's steps.

    Attributes:
        metrics: the last value of each name.
        loss: the loss of each version.
        trend: a summary of the losses so far, which shows whether the job learns.
        rate: the rate of records in the model.
        steady: the same over a minute, to estimate the remaining time.
        staleness: the staleness of all steps in the model.
        recent: the staleness of the steps since it was last emptied.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    loss: Curve = field(default_factory=Curve)
    trend: Trend = field(default_factory=Trend)
    rate: Rate = field(default_factory=Rate)
    steady: Rate = field(default_factory=lambda: Rate(window=60.0))
    staleness: Distribution = field(default_factory=Distribution)
    recent: Distribution = field(default_factory=Distribution)

    def add(
        self,
        contributions: Sequence[Contribution],
        version: int,
        ledger: Ledger | FixedSchedule | None,
        now: float,
        *,
        staleness: Mapping[int, int],
    ) -> None:
        """Note the steps of `version`. `staleness`: by worker; see `SyncRounds.staleness`."""
        for distribution in (self.staleness, self.recent):
            distribution.add(staleness[c.worker] for c in contributions if not c.assigns)
        reported = reduce_all([Metrics(c.metrics, c.reductions, c.samples) for c in contributions])
        if (loss := reported.pop("loss", None)) is not None:
            self.loss.add(version, loss)
            self.judge(loss, ledger)
        keep(self.metrics, reported)
        self.rate.add(ledger.applied if ledger else 0, now)
        self.steady.add(ledger.applied + ledger.skipped if ledger else 0, now)

    def judge(self, loss: float, ledger: Ledger | FixedSchedule | None) -> None:
        """Add the job's present loss; NaN if a worker's gradient was not finite."""
        done = 0.0 if ledger is None else (ledger.applied + ledger.skipped) / max(1, ledger.total)
        self.trend.add(done, loss)

    def copy(self) -> Results:
        """A copy without the recent rates and staleness."""
        return Results(
            dict(self.metrics),
            replace(self.loss, points=list(self.loss.points)),
            replace(self.trend),
            staleness=replace(self.staleness, counts=dict(self.staleness.counts)),
        )
