"""The report of a run, as a file and as a picture."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from elastic_ps.local import Record
from elastic_ps.local.options import Outcome
from elastic_ps.local.plan import Verdict
from elastic_ps.local.record import Point
from elastic_ps.local.report import (
    CURVES,
    PANELS,
    fitting,
    in_title,
    marks,
    moving,
    panels,
    time_ticks,
    write_report,
)
from elastic_ps.local.state import LocalStatus

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* deprecated - use:DeprecationWarning"
)  # matplotlib 3.7's use of pyparsing


def test_a_job_that_never_trained_has_a_report(tmp_path: Path) -> None:
    status = LocalStatus(job="early", launcher_pid=1, started=0, updated=0, workers=2)
    verdict = Verdict("Failed", "BackoffLimitExceeded", "it failed too often")
    numbers, picture = write_report(Outcome(verdict, Record(), timedelta(seconds=1), status), tmp_path)
    assert json.loads(numbers.read_text())["reason"] == "BackoffLimitExceeded"
    assert picture.read_bytes().startswith(b"\x89PNG")


def run() -> Record:
    """A run of two minutes: a worker joins and dies, a checkpoint every 50 versions, metrics now and then."""
    record = Record()
    for version in range(241):
        reported = {"lr": 0.1 if version < 100 else 0.01}
        if version >= 20:
            reported |= {"test_accuracy": 0.5 + version // 20 * 0.03, "train/accuracy": version / 300}
        progress = Progress(
            version=version,
            records_applied=8 * version,
            loss=2 / (1 + version / 50),
            metrics=reported,
            durable_version=version // 50 * 50,
        )
        fields: dict[str, Any] = {"incarnation": 1, "pid": 1, "host": "h"}
        members = [MemberStatus(worker=0, joined_version=0, state="training", **fields)]
        if version >= 60:
            gone: dict[str, Any] = (
                {"left_version": 180, "state": "lost"} if version >= 180 else {"state": "training"}
            )
            members.append(MemberStatus(worker=1, joined_version=60, **fields, **gone))
        record.add(
            ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress, members=members),
            elapsed=3 + version / 2,
        )
        if version == 55:
            record.add_event(3 + version / 2, "scale", "scaled from 1 to 2 workers at version 55")
    return record


def test_each_metric_that_was_reported_has_a_curve(tmp_path: Path) -> None:
    status = LocalStatus(job="j", launcher_pid=1, started=0, updated=0, workers=2)
    outcome = Outcome(Verdict("Succeeded", "Finished", "done"), run(), timedelta(seconds=123), status)
    numbers, picture = write_report(outcome, tmp_path)
    report = json.loads(numbers.read_text())
    curves = report["metric_curves"]
    assert curves["lr"] == [[0, 0.1], [100, 0.01], [240, 0.01]]
    assert [version for version, _ in curves["test_accuracy"]] == [*range(20, 241, 20)]
    assert len(curves["train/accuracy"]) == 221
    assert [each["version"] for each in report["checkpoints_written"]] == [0, 50, 100, 150, 200]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_marks_what_happened_and_when() -> None:
    record = run()
    assert marks(record) == {
        "joined": [0, 60],
        "died": [180],
        "rescaled": [55],
        "checkpoint": [0, 50, 100, 150, 200],
    }
    assert time_ticks(record.points)[:2] == [(34, "20 s"), (74, "40 s")]
    assert time_ticks(record.points[:1]) == []
    assert [*panels(record.metric_curves())] == ["lr", "accuracy"]
    assert set(panels(record.metric_curves())["accuracy"]) == {"test_accuracy", "train/accuracy"}


@pytest.mark.nightly
def test_the_picture_does_not_grow_with_the_metrics_and_the_numbers_have_all(tmp_path: Path) -> None:
    status = LocalStatus(job="j", launcher_pid=1, started=0, updated=0, workers=2)
    heights = []
    for kinds in (PANELS, PANELS + 8):
        names = {f"kind{kind}": 1.0 for kind in range(kinds)}
        record = Record()
        for version in range(2):
            progress = Progress(version=version, metrics=names)
            record.add(
                ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress, members=[]),
                elapsed=version,
            )
        outcome = Outcome(Verdict("Succeeded", "Finished", "done"), record, timedelta(seconds=1), status)
        numbers, picture = write_report(outcome, tmp_path)
        assert set(json.loads(numbers.read_text())["metric_curves"]) == set(names)
        heights.append(int.from_bytes(picture.read_bytes()[20:24], "big"))
    assert heights[1] == heights[0]
    crowded = panels({f"layer{n % 99}/kind{n // 99}": [(0, 1.0)] for n in range(99 * 99)})
    assert [len(curves) for curves in fitting(crowded).values()] == PANELS * [CURVES]


def test_a_value_of_a_single_version_has_no_panel() -> None:
    curves = {"lr": [(0, 0.1), (9, 0.1)], "test_accuracy": [(9, 0.97)], "twice": [(9, 0.1), (9, 0.2)]}
    assert [*moving(curves)] == ["lr"]
    assert in_title(curves, moving(curves)) == ["test_accuracy", "twice"]
    assert in_title(["b", "a"], ["a", "b"]) == ["a", "b"]


def test_labels_of_the_time_do_not_lie_on_one_another() -> None:
    still = [Point(float(second), 10 * min(second, 5), 0, 1, None, None) for second in range(60)]
    assert [text for _, text in time_ticks(still)] == ["0 s", "10 s"], "nothing moves for the rest"
