"""The jobs that `benchmarks.soak` trains: every mode, and what may be said beside it.

Each says what the numbers of the model must be at its end. With most, a number moves by 1 for each version
that has its record. An outer rule with momentum, a mean over several workers' values, and a learning rate
that depends on the staleness move numbers by fractions. There a record that was trained is a number above 0,
and that none came twice is for the histories to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Counted: TypeAlias = Literal["versions", "steps", "trained", "histories"]
"""What the model says of the records, beside the histories:

versions: each record was in one version, and the clock is the version.
steps: each record was in one local step, and the clock is the same everywhere.
trained: each record has left its mark, and the clock is the same everywhere.
histories: nothing.
"""


@dataclass(frozen=True)
class Mode:
    """One kind of job.

    Attributes:
        consistency: as in YAML.
        counted: what its model says.
        rescaled: the number of workers may change while it runs.
        changes: other consistencies, as in YAML, that the running job may be changed to and from.
        processes: how many each worker has.
    """

    consistency: Mapping[str, Any]
    counted: Counted = "versions"
    rescaled: bool = True
    changes: tuple[Mapping[str, Any], ...] = ()
    processes: int = 1

    @property
    def trains_rows(self) -> bool:
        """Whether such a job trains tables that grow."""
        return self.consistency.get("mode") != "local"


def half(staleness: int) -> float:
    """A `stalenessScale` of the user's own."""
    return 2.0**-staleness


STEPS = 4
WHOLE = {"stalenessScale": "none"}
"""A stale step counts as any other, so that the model moves by whole numbers."""
SWITCHED: tuple[Mapping[str, Any], ...] = (
    {"mode": "sync"},
    {"mode": "sync", "backupWorkers": 1},
    {"mode": "bounded", "maxStaleness": 2, **WHOLE},
    {"mode": "async", **WHOLE},
    {"mode": "async", "reads": "inconsistent", **WHOLE},
    {"mode": "accumulate", "gradients": 2},
)


def _local(counted: Counted, *, processes: int = 1, **said: Any) -> Mode:
    return Mode({"mode": "local", "steps": STEPS, **said}, counted, processes=processes)


MODES: Mapping[str, Mode] = {
    "sync": Mode({}),
    "sync, processes": Mode({}, processes=2),
    "backupWorkers": Mode({"backupWorkers": 1}),
    "deterministic": Mode({"deterministic": True}, rescaled=False),
    "bounded": Mode({"mode": "bounded", "maxStaleness": 4, **WHOLE}),
    "bounded, scaled": Mode({"mode": "bounded", "maxStaleness": 4, "stalenessScale": "inverse"}, "trained"),
    "async": Mode({"mode": "async", **WHOLE}),
    "async, inconsistent": Mode({"mode": "async", "reads": "inconsistent", **WHOLE}),
    "async, scaled": Mode({"mode": "async", "stalenessScale": "benchmarks.soak_modes:half"}, "trained"),
    "async, objective": Mode({"mode": "async", "maxStalenessP99": 1, **WHOLE}),
    "accumulate above": Mode({"mode": "accumulate", "gradients": 4}),
    "accumulate below": Mode({"mode": "accumulate", "gradients": 2}),
    "globalBatchSize": Mode({"globalBatchSize": 18}),
    "globalBatchSize, speed": Mode({"globalBatchSize": 18, "balance": "speed"}),
    "globalBatchSize, deterministic": Mode({"globalBatchSize": 18, "deterministic": True}),
    "switched": Mode({}, changes=SWITCHED),
    "local, diloco": _local("trained"),
    "local, average": _local("trained", outer="average"),
    "local, speed": _local("trained", balance="speed"),
    "local, quorum": _local("trained", quorum=2, grace="auto"),
    "local, delayed": _local("trained", outer="delayed"),
    "local, downpour": _local("steps", outer="downpour"),
    "local, processes": _local("steps", outer="downpour", overlap=1, processes=2),
    "local, easgd": _local("trained", outer="easgd"),
    "local, overlap": _local("steps", outer="downpour", overlap=2),
    "local, fragments": _local("histories", fragments=2),
    "local, all at once": _local("histories", fragments=2, overlap=1, quorum=2, grace="200ms"),
}
