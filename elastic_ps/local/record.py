"""The record of a run: events and curves, from the parameter server's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from elastic_ps.api.status import (
    Divergence,
    EvaluationStatus,
    MemberStatus,
    Progress,
    ServerStatus,
    TuningStatus,
)
from elastic_ps.contract.words import amount
from elastic_ps.core.progress import Curve

MAX_POINTS = 4000


@dataclass(frozen=True)
class Event:
    """An event for the user.

    `kind`: joined, left, lost, hung, died (a process), scale, changed, process, checkpoint, evaluated or
    warning.
    """

    elapsed: float
    version: int
    kind: str
    text: str


@dataclass(frozen=True)
class Point:
    """The state of training at a moment."""

    elapsed: float
    version: int
    records: int
    workers: int
    samples_per_second: float | None
    loss: float | None


@dataclass
class Record:
    """The record of a run so far. One thread adds to it; others may read it, at any moment."""

    events: list[Event] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    loss: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    metrics: dict[str, Curve] = field(default_factory=dict)
    checkpoints: list[tuple[float, int]] = field(
        default_factory=list
    )  # (elapsed, version) of each checkpoint on disk
    last: ServerStatus | None = None
    durable: int | None = None  # the newest version that was reported as on disk
    _stride: int = 1
    _skipped: int = 0

    def add_event(self, elapsed: float, kind: str, text: str) -> None:
        version = self.last.progress.version if self.last else 0
        self.events.append(Event(elapsed, version, kind, text))

    def add(self, status: ServerStatus, elapsed: float) -> None:
        """Add an answer. Answers without news are cheap."""
        for kind, version, text in changes(self.last, status):
            self.events.append(Event(elapsed, version, kind, text))
        if self.last is not None and status.progress.version < self.last.progress.version:
            self._go_back(status.progress.version)
        self._add_metrics(status.progress)
        moved = self.last is None or status.progress.version != self.last.progress.version
        self.last = status
        written = status.progress.durable_version
        if written is not None and written != self.durable:
            self.durable = written
            self.checkpoints.append((elapsed, written))
        if not (moved and status.ready):
            return
        self._skipped += 1
        if self._skipped >= self._stride or status.progress.finished:
            self._skipped = 0
            self.points.append(_point(status, elapsed))
        if len(self.points) >= MAX_POINTS:  # a long run is recorded more coarsely
            self.points = [self.points[0], *self.points[2::2]]
            self._stride *= 2

    def _go_back(self, version: int) -> None:
        """Forget the later versions: training makes them again."""
        self.points = [point for point in self.points if point.version <= version]
        kept = {
            name: replace(curve, points=[point for point in curve.points if point[0] <= version])
            for name, curve in self.metrics.items()
        }
        self.metrics = {name: curve for name, curve in kept.items() if curve.points}

    def _add_metrics(self, progress: Progress) -> None:
        before = self.last.progress.metrics if self.last else {}
        for name, value in progress.metrics.items():
            if value != before.get(name):
                curve = self.metrics.get(name, Curve())
                curve.add(progress.version, value)
                self.metrics[name] = curve

    @property
    def training_seconds(self) -> float:
        """The time from the first answer with a model to the last one with a newer version."""
        points = self.points  # it may be replaced meanwhile
        return points[-1].elapsed - points[0].elapsed if points else 0.0

    @property
    def samples_per_second(self) -> float | None:
        """Records applied per second of training; None if it was too short to tell.

        Also None if the model went back to its first version or before, which gives no speed.
        """
        points = self.points
        seconds = points[-1].elapsed - points[0].elapsed if points else 0.0
        records = points[-1].records - points[0].records if points else 0
        return records / seconds if seconds > 0 and records > 0 else None

    def loss_curve(self) -> list[tuple[int, float]]:
        """The loss by version, as precisely as it is known."""
        return self.loss or [(point.version, point.loss) for point in self.points if point.loss is not None]

    def metric_curves(self) -> dict[str, list[tuple[int, float]]]:
        """(version, value) by name, for each observed change, and the final value.

        Answers come a few times a second: of several changes between two answers, only the last one is known.
        """
        progress = self.last.progress if self.last else Progress()
        curves: dict[str, list[tuple[int, float]]] = {}
        for name, curve in sorted(self.metrics.items()):
            end = (progress.version, progress.metrics.get(name, curve.points[-1][1]))
            curves[name] = curve.points if curve.points[-1] == end else [*curve.points, end]
        return curves


GONE = {"left": "left", "lost": "was lost", "hung": "was declared hung"}


def changes(before: ServerStatus | None, after: ServerStatus) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of what is new between two answers."""
    progress = before.progress if before else Progress()
    yield from member_changes(before.members if before else [], after.members)
    yield from evaluation_changes(progress.evaluation, after.progress.evaluation)
    yield from problem_changes(before.problem if before else "", after)
    yield from divergence_changes(progress.diverged, after.progress)
    if before:
        yield from tuning_changes(before.tuning, after.tuning)
    yield from overlap_changes(before.traffic.overlap if before else "", after)


def member_changes(
    before: Sequence[MemberStatus], after: Sequence[MemberStatus]
) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of each worker that has joined or gone between two answers.

    A worker that has to join again, because a parameter server was lost, has left: its process may live.
    """
    known = {(member.worker, member.incarnation): member for member in before}
    for member in after:
        old = known.get((member.worker, member.incarnation))
        if old is None:
            text = f"worker {member.worker} joined at version {member.joined_version}"
            yield "joined", member.joined_version, text
        if member.state in GONE and (old is None or old.state != member.state):
            version = member.joined_version if member.left_version is None else member.left_version
            kind = "left" if member.joins_again else member.state
            why = f": {member.reason}" if member.reason else ""
            records = f"after {member.steps:,} steps, {member.records:,} records"
            yield kind, version, f"worker {member.worker} {GONE[kind]} at version {version} {records}{why}"


def evaluation_changes(
    before: EvaluationStatus | None, after: EvaluationStatus | None
) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of evaluations and missed checkpoints between two answers."""
    old, new = before or EvaluationStatus(), after or EvaluationStatus()
    if new.version is not None and new.evaluated > old.evaluated:
        yield "evaluated", new.version, str(new)
    if new.missed > old.missed:
        text = f"{amount(new.missed - old.missed, 'checkpoint')} will not be evaluated: the evaluator is "
        text += "too slow, or crashes on them. Speed it up, or set a larger evaluator.backlog in the next run"
        yield "warning", new.version or 0, text


def problem_changes(before: str, after: ServerStatus) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of a problem that the parameter server did not have `before`.

    A problem that differs only in numbers, such as the age of a checkpoint, is the same.
    """
    if after.problem and _but_for_numbers(after.problem) != _but_for_numbers(before):
        yield "warning", after.progress.version, f"the parameter server has a problem: {after.problem}"


def _but_for_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def divergence_changes(before: Divergence | None, after: Progress) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of why a job does not learn, unless that was reported `before`."""
    found = after.diverged
    if found is not None and (before is None or before.reason != found.reason):
        yield "warning", after.version, f"the training has diverged: {found.message}"


def overlap_changes(before: str, after: ServerStatus) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of whether gradients are sent while backward runs, unless `before` says it."""
    if (now := after.traffic.overlap) not in ("", before):
        yield "process", after.progress.version, now


def tuning_changes(before: TuningStatus, after: TuningStatus) -> Iterator[tuple[str, int, str]]:
    """(kind, version, text) of changes of the job, or their refusal, between two answers."""
    for what, then, now in (
        ("consistency", before.consistency, after.consistency),
        ("compression", before.compression, after.compression),
    ):
        if then and now != then:
            text = f"from version {after.since} on, {what} is ({now}); it was ({then})"
            yield "changed", after.since, text
    if after.problem and after.problem != before.problem:
        yield "warning", after.since, f"the job was not changed: {after.problem}"


def live_members(status: ServerStatus) -> list[MemberStatus]:
    """The present members of the job."""
    return [member for member in status.members if member.present]


def _point(status: ServerStatus, elapsed: float) -> Point:
    progress = status.progress
    return Point(
        elapsed,
        progress.version,
        progress.records_applied,
        len(live_members(status)),
        progress.samples_per_second,
        progress.loss,
    )
