"""Decides which checkpoints the evaluator takes and which are kept for it; holds its results. Pure.

A checkpoint waits from the moment it is on disk until the evaluator reports that it is done with it. If too
many wait besides the one that the evaluator has begun, the oldest is given up. A checkpoint that `ATTEMPTS`
processes have begun but not finished is also given up, so that it does not block later ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ps.api.status import EvaluationStatus

ATTEMPTS = 3
"""The number of evaluator processes that may fail on a checkpoint before it is given up."""

MOST = 1024
"""The largest number of results, and of versions that were given up, that are remembered."""


@dataclass(frozen=True)
class Evaluation:
    """The result of a version: finite numbers by name. `number`: of the evaluation, from 1."""

    version: int
    metrics: Mapping[str, float]
    number: int = 0


@dataclass
class Evaluations:
    """The evaluator's work.

    Attributes:
        every: the number of versions between two checkpoints to evaluate; None: evaluate each one.
        backlog: the number of checkpoints that may wait, besides the one that the evaluator has begun.
        metric: the metric of the best version; None: there is no best version.
        highest: whether the highest value is the best.
        waiting: the versions that wait, oldest first.
        begun: the number of evaluator processes that have begun each of them.
        results: the results, in the order of evaluation. If there are too many, every second one is dropped,
            but neither the best nor the last.
        missed: the last versions that were given up.
        missed_before: the number of versions that were given up before those.
        newest: the newest version that has ever waited.
        gone: the versions with results whose checkpoints are deleted, since the job last went back to one.
    """

    every: int | None = None
    backlog: int = 4
    metric: str | None = None
    highest: bool = False
    waiting: list[int] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    results: list[Evaluation] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    missed_before: int = 0
    newest: int = 0
    gone: frozenset[int] = frozenset()
    _holder: tuple[int, str] | None = None  # the version that was begun last, and its process

    def wants(self, version: int) -> bool:
        """Whether to evaluate a checkpoint of this version. Version 0 is never evaluated."""
        step = self.every or 1
        return version // step > self.newest // step

    def asks(self, version: int, *, since: int) -> bool:
        """Whether to write a checkpoint of this version for the evaluator. The last one was of `since`."""
        return self.every is not None and self.wants(version) and version // self.every > since // self.every

    def add(self, version: int) -> None:
        """Add a checkpoint that is on disk. The oldest ones may be given up for it."""
        self.newest = max(self.newest, version)
        self.waiting.append(version)
        idle = [each for each in self.waiting if each not in self.begun]
        for each in idle[: max(0, len(idle) - self.backlog)]:
            self.give_up(each)

    def add_last(self, version: int) -> None:
        """Add the last version of a finished job, unless it waits or is done already."""
        done = {evaluation.version for evaluation in self.results}
        if version and version not in {*self.waiting, *self.missed, *done}:
            self.add(version)

    def begin(self, process: str) -> int | None:
        """The version for this evaluator process to take; None if none waits.

        A process that asks again gets the same one.
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
        """Note that the evaluator is done with a version. Returns None for a repeated message."""
        if version not in self.waiting:
            return None
        self._forget(version)
        finite = {name: value for name, value in sorted(metrics.items()) if math.isfinite(value)}
        result, stride = Evaluation(version, finite, self._evaluated + 1), 1
        self.results.append(result)
        while len(self.results) > MOST:
            stride, kept = 2 * stride, (self.best, result)
            self.results = [each for each in self.results if each.number % stride == 0 or each in kept]
        return result

    def give_up(self, version: int) -> None:
        """Give up a version."""
        if version in self.waiting:
            self._forget(version)
            self.missed.append(version)
            if len(self.missed) > MOST:
                del self.missed[0]
                self.missed_before += 1

    def go_back(self, version: int, kept: Iterable[int]) -> None:
        """Go back to a checkpoint of this version; `kept`: the versions on disk.

        Later versions are recreated, so their results are dropped.
        """
        there = {v for v in kept if v <= version}
        for lost in [v for v in self.waiting if v not in there]:
            self._forget(lost)
        self.results = [evaluation for evaluation in self.results if evaluation.version <= version]
        self.gone = frozenset({evaluation.version for evaluation in self.results} - there)
        self.missed = [v for v in self.missed if v <= version]
        self.missed_before = self.missed_before if self.missed else 0
        self.newest = min(self.newest, version)

    def _forget(self, version: int) -> None:
        self.waiting.remove(version)
        self.begun.pop(version, None)

    @property
    def _evaluated(self) -> int:
        """The number of results so far; after going back about that."""
        return self.results[-1].number if self.results else 0

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation of a checkpoint that is there; among equals, the first."""
        there = (result for result in self.results if result.version not in self.gone)
        rated = [result for result in there if self.metric in result.metrics]
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
        """The answer for `GET /status`."""
        last, best = self.results[-1] if self.results else None, self.best
        return EvaluationStatus(
            version=last.version if last else None,
            metrics=dict(last.metrics) if last else {},
            best_version=best.version if best else None,
            best=best.metrics[str(self.metric)] if best else None,
            evaluated=self._evaluated,
            waiting=len(self.waiting),
            missed=self.missed_before + len(self.missed),
        )

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, for the next parameter server. The job's spec has the rest."""
        return {
            "waiting": self.waiting,
            "begun": {str(version): times for version, times in self.begun.items()},
            "results": [asdict(result) for result in self.results],
            "missed": self.missed,
            "missedBefore": self.missed_before,
            "newest": self.newest,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from `to_json`. Raises KeyError, TypeError or ValueError for other data."""
        waiting, missed = [int(v) for v in data["waiting"]], [int(v) for v in data["missed"]]
        begun = {int(version): int(times) for version, times in data["begun"].items()}
        results = [
            Evaluation(
                int(r["version"]), {str(k): float(v) for k, v in r["metrics"].items()}, int(r["number"])
            )
            for r in data["results"]
        ]
        before, newest = int(data["missedBefore"]), int(data["newest"])
        self.waiting, self.begun, self.results = waiting, begun, results
        self.missed, self.missed_before, self.newest = missed, before, newest
