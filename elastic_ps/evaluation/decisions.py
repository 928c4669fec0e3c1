"""Which checkpoints the job's evaluator is to take, which are kept for it, and what it has found. Pure.

A checkpoint waits from when it is on disk until the evaluator has said that it is done with it. Besides the
one that the evaluator has begun, only so many may wait; then the oldest is given up. One that `ATTEMPTS`
processes have begun and not finished is given up, too, so that it does not block the ones after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ps.api.status import EvaluationStatus

ATTEMPTS = 3
"""How many processes of the evaluator may die over a checkpoint before it is given up."""


@dataclass(frozen=True)
class Evaluation:
    """What the evaluator found of a version: finite numbers by name."""

    version: int
    metrics: Mapping[str, float]


@dataclass
class Evaluations:
    """The evaluator's work.

    Attributes:
        every: take a checkpoint whenever this many versions have been made; None takes each of them.
        backlog: how many may wait, besides the one that the evaluator has begun.
        metric: by which the best version is found; None finds none.
        highest: whether the highest value is the best.
        waiting: the versions that wait, oldest first.
        begun: how many processes of the evaluator have begun each of them.
        results: in the order of evaluation.
        missed: the versions that were given up.
        newest: the newest version that has ever waited.
    """

    every: int | None = None
    backlog: int = 4
    metric: str | None = None
    highest: bool = False
    waiting: list[int] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    results: list[Evaluation] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    newest: int = 0
    _holder: tuple[int, str] | None = None  # the version that was begun last, and by which process

    def wants(self, version: int) -> bool:
        """Whether a checkpoint of this version is to be evaluated. That of version 0 is not."""
        step = self.every or 1
        return version // step > self.newest // step

    def asks(self, version: int, *, since: int) -> bool:
        """Whether to write a checkpoint of this version for the evaluator; the last one began at `since`."""
        return self.every is not None and self.wants(version) and version // self.every > since // self.every

    def add(self, version: int) -> None:
        """A checkpoint that is to be evaluated is on disk. The oldest ones may be given up for it."""
        self.newest = max(self.newest, version)
        self.waiting.append(version)
        idle = [each for each in self.waiting if each not in self.begun]
        for each in idle[: max(0, len(idle) - self.backlog)]:
            self.give_up(each)

    def add_last(self, version: int) -> None:
        """Training is over at this version. As `add`, unless it waits or has been dealt with already."""
        done = {evaluation.version for evaluation in self.results}
        if version and version not in {*self.waiting, *self.missed, *done}:
            self.add(version)

    def begin(self, process: str) -> int | None:
        """The version that this process of the evaluator is to take now; None if none waits.

        The same one again, if the process asks again.
        """
        while self.waiting:
            version = self.waiting[0]
            times = self.begun.get(version, 0)
            if self._holder == (version, process):
                return version
            if times < ATTEMPTS:
                self.begun[version], self._holder = times + 1, (version, process)
                return version
            self.give_up(version)
        return None

    def finish(self, version: int, metrics: Mapping[str, float]) -> Evaluation | None:
        """The evaluator is done with a version. None if that is no news, because the message was repeated."""
        if version not in self.waiting:
            return None
        self._forget(version)
        finite = {name: value for name, value in sorted(metrics.items()) if math.isfinite(value)}
        result = Evaluation(version, finite)
        self.results.append(result)
        return result

    def give_up(self, version: int) -> None:
        """The version will not be evaluated."""
        if version in self.waiting:
            self._forget(version)
            self.missed.append(version)

    def go_back(self, version: int, kept: Iterable[int]) -> None:
        """The job continues from a checkpoint of this version; `kept` are those on disk.

        What comes after it is made anew, so what was found of it says nothing any more.
        """
        there = {v for v in kept if v <= version}
        for lost in [v for v in self.waiting if v not in there]:
            self._forget(lost)
        self.results = [evaluation for evaluation in self.results if evaluation.version <= version]
        self.missed = [v for v in self.missed if v <= version]
        self.newest = min(self.newest, version)

    def _forget(self, version: int) -> None:
        self.waiting.remove(version)
        self.begun.pop(version, None)

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; of equal ones the first."""
        rated = [result for result in self.results if self.metric in result.metrics]
        if self.metric is None or not rated:
            return None
        sign = -1 if self.highest else 1
        return min(rated, key=lambda result: sign * result.metrics[str(self.metric)])

    @property
    def held(self) -> frozenset[int]:
        """The versions that may not be deleted: those that wait, and the best."""
        best = self.best
        return frozenset([*self.waiting, *([best.version] if best else [])])

    def status(self) -> EvaluationStatus:
        """For `GET /status`."""
        last, best = self.results[-1] if self.results else None, self.best
        return EvaluationStatus(
            version=last.version if last else None,
            metrics=dict(last.metrics) if last else {},
            best_version=best.version if best else None,
            best=best.metrics[str(self.metric)] if best else None,
            evaluated=len(self.results),
            waiting=len(self.waiting),
            missed=len(self.missed),
        )

    def to_json(self) -> dict[str, Any]:
        """What outlives the parameter server; the job's spec has the rest."""
        return {
            "waiting": self.waiting,
            "begun": {str(version): times for version, times in self.begun.items()},
            "results": [asdict(result) for result in self.results],
            "missed": self.missed,
            "newest": self.newest,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave. Raises KeyError, TypeError or ValueError if it is something else."""
        waiting, missed = [int(v) for v in data["waiting"]], [int(v) for v in data["missed"]]
        begun = {int(version): int(times) for version, times in data["begun"].items()}
        results = [
            Evaluation(int(r["version"]), {str(k): float(v) for k, v in r["metrics"].items()})
            for r in data["results"]
        ]
        newest = int(data["newest"])
        self.waiting, self.begun, self.results = waiting, begun, results
        self.missed, self.newest = missed, newest
