"""The report of a run: `run.json` for programs and `run.png` for people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from elastic_ps.api.status import MemberStatus, Progress
from elastic_ps.local.options import Outcome
from elastic_ps.local.record import Point, Record
from elastic_ps.local.state import write_atomically

LOSS, SPEED, WORKERS, INK, GRID = "#c2410c", "#0f766e", "#3730a3", "#1f2937", "#e5e7eb"
LABEL = 0.06
"""The smallest distance of two labels, as a fraction of the picture's width."""
STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400, 604_800)
"""The seconds between two labels of the time axis."""
PANELS = CURVES = 12
"""The most panels of reported metrics, and the most curves of a panel."""
MARKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "joined": ("^", "#15803d", ("joined",)),
    "left": ("v", "#0e7490", ("left",)),
    "died": ("X", "#b91c1c", ("lost", "hung", "died")),
    "rescaled": ("D", WORKERS, ("scale",)),
    "changed": ("s", INK, ("changed",)),
    "checkpoint": ("|", "#6b7280", ()),
}
"""The rows of marks in the picture: the marker, its color, and the kinds of events that it stands for."""
Curve: TypeAlias = list[tuple[int, float]]
"""(version, value)"""


def write_report(outcome: Outcome, directory: Path) -> list[Path]:
    """Write `run.json` and `run.png` into `directory`, replacing earlier ones; returns their paths."""
    numbers, picture = directory / "run.json", directory / "run.png"
    write_atomically(numbers, json.dumps(build_report(outcome), indent=2) + "\n")
    draw(outcome, picture)
    return [numbers, picture]


def build_report(outcome: Outcome) -> dict[str, Any]:
    """The content of `run.json`. Versions count optimizer steps; times are in seconds."""
    server = outcome.record.last
    progress = server.progress if server else Progress()
    return {
        "job": outcome.status.job,
        "phase": outcome.verdict.phase,
        "reason": outcome.verdict.reason,
        "message": outcome.verdict.message,
        "test_accuracy": progress.metrics.get("test_accuracy"),
        "metrics": progress.metrics,
        "diverged": progress.diverged.model_dump() if progress.diverged else None,
        "samples_per_second": outcome.record.samples_per_second,
        "records_expected": progress.records_expected,
        "records_applied": progress.records_applied,
        "version": progress.version,
        "staleness": progress.staleness.model_dump() if progress.staleness else None,
        "epoch": progress.epoch,
        "duration_seconds": outcome.elapsed.total_seconds(),
        "training_seconds": outcome.record.training_seconds,
        "traffic": server.traffic.model_dump() if server else None,
        "hidden_share": server.traffic.hidden_share if server else None,
        "bucket_bytes": server.bucket_bytes if server else 0,
        "tables": [each.model_dump() for each in server.tables] if server else [],
        "failures": outcome.status.failures,
        "checkpoints": outcome.status.checkpoints,
        "workers": [
            {
                "id": member.worker,
                "pid": member.pid,
                "transport": member.transport,
                "joined_version": member.joined_version,
                "left_version": member.left_version,
                "steps": member.steps,
                "records": member.records,
                "state": member.state,
            }
            for member in (server.members if server else [])
        ],
        "loss": [[version, loss] for version, loss in outcome.record.loss_curve()],
        "metric_curves": outcome.record.metric_curves(),
        "checkpoints_written": [
            {"elapsed": elapsed, "version": version} for elapsed, version in outcome.record.checkpoints
        ],
        "evaluations": [
            {"version": version, "metrics": metrics} for version, metrics in outcome.record.evaluations
        ],
        "best_version": progress.evaluation.best_version if progress.evaluation else None,
        "events": [asdict(event) for event in outcome.record.events],
        "timeline": [asdict(point) for point in outcome.record.points],
    }


def worker_steps(members: list[MemberStatus], last_version: int) -> list[tuple[int, int]]:
    """(version, number of workers from there on), from the joins and departures."""
    changes: dict[int, int] = {}
    for member in members:
        changes[member.joined_version] = changes.get(member.joined_version, 0) + 1
        if member.left_version is not None and member.left_version < last_version:
            changes[member.left_version] = changes.get(member.left_version, 0) - 1
    steps, count = [], 0
    for version in sorted(changes):
        count += changes[version]
        steps.append((version, count))
    return [*steps, (last_version, count)] if steps else []


def change_labels(steps: list[tuple[int, int]]) -> list[tuple[int, str]]:
    """(version, joined and departed workers as text), from `worker_steps`, far enough apart to read."""
    reach = LABEL * (steps[-1][0] - steps[0][0]) if steps else 0.0
    labels: list[tuple[int, int, int]] = []
    for (_, before), (version, after) in pairwise(steps[:-1]):
        near = labels and version - labels[-1][0] < reach
        _, came, left = labels.pop() if near else (version, 0, 0)
        labels.append((version, came + max(0, after - before), left + min(0, after - before)))
    return [
        (version, " ".join(f"{n:+d}".replace("-", "\N{MINUS SIGN}") for n in (came, left) if n))
        for version, came, left in labels
    ]


def moving_mean(values: list[float], width: int) -> list[float]:
    """The moving average over `width` values (fewer at both ends)."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def speeds(points: list[Point]) -> list[tuple[int, float]]:
    """(version, samples per second), each over about a second."""
    found: list[tuple[int, float]] = []
    start = points[0] if points else None
    for point in points:
        if start is not None and point.elapsed - start.elapsed >= 0.8:
            rate = (point.records - start.records) / (point.elapsed - start.elapsed)
            found.append(((start.version + point.version) // 2, rate))
            start = point
    return found


def marks(record: Record) -> dict[str, list[int]]:
    """The versions of events, by kind; kinds without events are left out."""
    events = record.events
    found = {row: [e.version for e in events if e.kind in kinds] for row, (_, _, kinds) in MARKS.items()}
    found["checkpoint"] = [version for _, version in record.checkpoints]
    return {row: versions for row, versions in found.items() if versions}


def moving(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Those with values at several versions: a panel with a single point shows no more than the title."""
    return {name: curve for name, curve in curves.items() if curve[0][0] != curve[-1][0]}


def panels(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """The curves, grouped in panels by the last word of their names: values of a kind share a scale."""
    found: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        found.setdefault(re.split(r"[^a-zA-Z0-9@]|_", name)[-1] or name, {})[name] = curve
    return found


def fitting(drawn: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """The first panels, and the first curves of each, that fit the picture."""
    return {panel: dict([*curves.items()][:CURVES]) for panel, curves in [*drawn.items()][:PANELS]}


def time_ticks(points: Sequence[Point]) -> list[tuple[int, str]]:
    """(version, time since the start in words) for the time axis: at most nine labels, well apart."""
    if len(points) < 2:
        return []
    first, last = points[0], points[-1]
    step = next((s for s in STEPS if (last.elapsed - first.elapsed) / s <= 8), last.elapsed / 8)
    unit, name = (3600, "h") if step >= 1800 else (60, "min") if step >= 30 else (1, "s")
    ticks: list[tuple[int, str]] = []
    due = math.ceil(first.elapsed / step)
    for before, after in pairwise(points):
        while due * step <= after.elapsed:
            share = (due * step - before.elapsed) / max(1e-9, after.elapsed - before.elapsed)
            version = round(before.version + share * (after.version - before.version))
            if not ticks or version - ticks[-1][0] > LABEL * (last.version - first.version):
                ticks.append((version, f"{due * step / unit:g} {name}"))
            due += 1
    return ticks


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the run over its versions as a PNG, with a time axis above.

    It shows the loss, samples per second, the number of workers, reported metrics, the evaluator's results
    (its loss beside that of training), and when processes started and ended and checkpoints were written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    record, server = outcome.record, outcome.record.last
    progress = server.progress if server else Progress()
    found = by_metric(record.evaluations)
    evaluated = found.pop("loss", [])
    reported = record.metric_curves()
    drawn = fitting(panels(moving(reported))) | fitting({"evaluated": found} if found else {})
    curves_of = {name for curves in drawn.values() for name in curves}
    titled = {name: progress.metrics[name] for name in in_title(progress.metrics, curves_of)}
    left_out = len({*reported, *found} - curves_of - {*titled})
    marked = marks(record)
    heights = [3.0, 2.0, 1.3, *[1.6] * len(drawn), *([0.3 + 0.25 * len(marked)] if marked else [])]
    figure = Figure(figsize=(9, 1.0 + 0.86 * sum(heights)), dpi=140, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    figure.suptitle(_title(outcome, titled, progress), x=0.015, ha="left", fontsize=11, color=INK)
    _draw_loss(axes[0], record.loss_curve(), evaluated)
    _leave_room(axes[0])
    _draw_speed(axes[1], speeds(record.points))
    steps = worker_steps(server.members if server else [], progress.version)
    _draw_workers(axes[2], steps)
    for axis, (name, curves) in zip(axes[3:], drawn.items(), strict=False):
        _draw_metrics(axis, name, curves)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#9ca3af")
        axis.tick_params(colors=INK, labelsize=8.5)
        axis.grid(axis="y", color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        for version, _ in steps[1:-1]:
            axis.axvline(version, color="#9ca3af", linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    if marked:
        _draw_marks(axes[-1], marked)
    top = axes[0].get_xaxis_transform()
    for version, text in change_labels(steps):
        style = {"fontsize": 8.5, "color": WORKERS, "fontweight": "bold"}
        side = "right" if version > (1 - LABEL) * progress.version else "left"
        axes[0].text(version, 0.97, f" {text} ", transform=top, va="top", ha=side, **style)
    figure.align_ylabels(axes)
    more = f"\n{left_out} more in run.json" if left_out else ""
    axes[-1].set_xlabel(f"version (optimizer steps){more}", color=INK, fontsize=9)
    axes[2].set_xlim(steps[0][0] if steps else 0, max(1, progress.version))
    _draw_time(axes[0], time_ticks(record.points))
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _draw_time(axis: Any, ticks: list[tuple[int, str]]) -> None:
    above = axis.secondary_xaxis("top")
    above.set_xticks([version for version, _ in ticks], [text for _, text in ticks])
    above.tick_params(colors="#6b7280", labelsize=8.5, length=3)
    above.spines["top"].set_color("#9ca3af")


def _draw_marks(axis: Any, marked: Mapping[str, list[int]]) -> None:
    axis.grid(visible=False)
    rows = [*marked.items()][::-1]
    for y, (row, versions) in enumerate(rows):
        marker, color, _ = MARKS[row]
        axis.plot(versions, [y] * len(versions), marker, color=color, markersize=5.5, clip_on=False)
    axis.set_yticks(range(len(rows)), [row for row, _ in rows])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(axis="y", length=0, pad=8)


def in_title(metrics: Collection[str], drawn: Collection[str]) -> list[str]:
    """The names of the two metrics that the title has: first those that are not drawn."""
    return sorted(metrics, key=lambda name: (name in drawn, name))[:2]


def _title(outcome: Outcome, metrics: Mapping[str, float], progress: Progress) -> str:
    parts = [f"{outcome.status.job}: {outcome.verdict.phase.lower()}"]
    parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items()]
    parts.append(f"{progress.records_applied:,} records in {outcome.elapsed.total_seconds():.1f} s")
    if outcome.record.samples_per_second is not None:
        parts.append(f"{outcome.record.samples_per_second:,.0f} samples/s")
    return "  ·  ".join(parts)


def _label(axis: Any, text: str, color: str) -> None:
    axis.set_ylabel(text, color=color, fontsize=9, fontweight="bold")


def by_metric(evaluations: list[tuple[int, dict[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    """The results of an evaluator, as a curve for each metric."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for version, metrics in evaluations:
        for name, value in sorted(metrics.items()):
            curves.setdefault(name, []).append((version, value))
    return curves


def _draw_metrics(axis: Any, name: str, curves: Mapping[str, Curve]) -> None:
    _label(axis, next(iter(curves)).replace("_", " ") if len(curves) == 1 else name, INK)
    for label, curve in sorted(curves.items()):
        versions, values = [version for version, _ in curve], [value for _, value in curve]
        marker = "o" if len(curve) < 60 else ""
        style = (
            "default" if name == "evaluated" else "steps-post"
        )  # a reported value holds until the next one
        axis.plot(
            versions, values, marker=marker, markersize=3.5, drawstyle=style, clip_on=False, label=label
        )
    if len(curves) > 1 or name == "evaluated":
        columns = 1 if len(curves) <= CURVES // 2 else 2
        legend = axis.legend(fontsize=7, frameon=False, loc="best", ncols=columns)
        legend.set_in_layout(False)  # a legend higher than its panel would leave the panels no room


def _draw_loss(axis: Any, curve: list[tuple[int, float]], evaluated: list[tuple[int, float]]) -> None:
    from matplotlib.ticker import NullFormatter

    _label(axis, "loss", LOSS)
    if evaluated:
        points = [v for v, _ in evaluated], [loss for _, loss in evaluated]
        axis.plot(*points, "o", color=INK, markersize=3.5, label="evaluated")
        axis.legend(fontsize=8, frameon=False, loc="upper right")
    if not curve:
        return
    versions, values = [version for version, _ in curve], [loss for _, loss in curve]
    width = max(1, len(values) // 60)
    if width > 1:
        axis.plot(versions, values, color=LOSS, alpha=0.25, linewidth=0.8)
    smooth = moving_mean(values, width)
    axis.plot(versions, smooth, color=LOSS, linewidth=1.8)
    if min(values) > 0 and max(smooth) / min(smooth) > 20:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=min(0.0, *values))


def _leave_room(axis: Any) -> None:
    """Above the curves, for the labels of changes."""
    low, high = axis.get_ylim()
    raised = high * (high / low) ** 0.1 if axis.get_yscale() == "log" else high + 0.1 * (high - low)
    axis.set_ylim(low, raised)


def _draw_speed(axis: Any, curve: list[tuple[int, float]]) -> None:
    _label(axis, "samples/s", SPEED)
    axis.plot([v for v, _ in curve], [s for _, s in curve], color=SPEED, linewidth=1.8)
    axis.fill_between([v for v, _ in curve], [s for _, s in curve], color=SPEED, alpha=0.1, linewidth=0)
    axis.set_ylim(bottom=0)


def _draw_workers(axis: Any, steps: list[tuple[int, int]]) -> None:
    from matplotlib.ticker import MaxNLocator

    _label(axis, "workers", WORKERS)
    versions, counts = [version for version, _ in steps], [count for _, count in steps]
    axis.step(versions, counts, where="post", color=WORKERS, linewidth=1.8)
    axis.fill_between(versions, counts, step="post", color=WORKERS, alpha=0.12, linewidth=0)
    axis.set_ylim(0, max(counts, default=1) * 1.2)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
