"""The course of a run: events, curves, the trace, small pictures."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from elastic_ps.api.job import parse_job, parse_spec
from elastic_ps.api.status import JOINS_AGAIN, Divergence, MemberStatus, Progress, ServerStatus
from elastic_ps.api.traffic import Traffic
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.owner import Claim
from elastic_ps.cli.view import sparkline
from elastic_ps.cli.words import duration, member_line
from elastic_ps.errors import UserError
from elastic_ps.local import JobDirectory, Launcher, Options, Record, script
from elastic_ps.local.poller import fetch_loss
from elastic_ps.local.processes import Programs, with_threads
from elastic_ps.local.record import MAX_POINTS, member_changes
from elastic_ps.local.report import change_labels, speeds, worker_steps
from elastic_ps.local.trace import merge_traces
from elastic_ps.server.job.status import StatusServer
from tests.testing import machine
from tests.testing.launching import make_job


def member(
    worker: int, *, state: str = "training", joined: int = 0, left: int | None = None, **more: object
) -> MemberStatus:
    return MemberStatus.model_validate(
        {
            "worker": worker,
            "incarnation": worker,
            "pid": 1,
            "host": "h",
            "state": state,
            "joined_version": joined,
            "left_version": left,
            **more,
        }
    )


def status(version: int, *, finished: bool = False) -> ServerStatus:
    progress = Progress(version=version, records_applied=8 * version, loss=1.0, finished=finished)
    return ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress)


def test_workers_that_came_and_went_are_told_once() -> None:
    before = [member(0), member(1)]
    after = [
        member(0),
        member(1, state="lost", left=7, gone_seconds=0.5),
        member(2, joined=5, state="left", left=6),
    ]
    told = [(kind, version) for kind, version, _ in member_changes(before, after)]
    assert told == [("lost", 7), ("joined", 5), ("left", 6)]
    assert list(member_changes(after, after)) == []


def test_a_worker_that_has_to_join_again_after_its_parameter_server_is_not_told_to_be_lost() -> None:
    again = member(0, state="lost", left=7, reason=JOINS_AGAIN)
    again = again.model_copy(update={"steps": 1796, "records": 28740})
    [(kind, _, text)] = member_changes([member(0)], [again])
    assert kind == "left"
    assert text == f"worker 0 left at version 7 after 1,796 steps, 28,740 records: {JOINS_AGAIN}"
    assert "lost" not in member_line(again)


def test_a_problem_of_the_parameter_server_is_told_once_though_its_numbers_change() -> None:
    record = Record()
    for problem in ("", "No space left", "No space left", "", "it is 70 s old", "it is 71 s old"):
        record.add(status(1).model_copy(update={"problem": problem}), elapsed=1.0)
    told = [(event.kind, event.text) for event in record.events]
    said = "the parameter server has a problem: "
    assert told == [("warning", f"{said}No space left"), ("warning", f"{said}it is 70 s old")]


def test_whether_gradients_are_sent_during_backward_is_told_when_it_is_known_and_when_it_changes() -> None:
    record = Record()
    for version, overlap in enumerate(("", "they are", "they are", "", "they are not: the mode is async")):
        sent = {"traffic": Traffic(overlap=overlap)}
        record.add(status(version).model_copy(update=sent), elapsed=1.0)
    told = [(event.version, event.text) for event in record.events if event.kind == "process"]
    assert told == [(1, "they are"), (4, "they are not: the mode is async")]


def test_that_the_job_learns_nothing_is_told_once_though_its_numbers_change() -> None:
    record = Record()
    for reason, loss in [("", 1), ("LossNoBetter", 2), ("LossNoBetter", 3), ("LossNotFinite", 4), ("", 5)]:
        found = Divergence(reason=reason, message=f"it is {loss}") if reason else None
        progress = status(loss).progress.model_copy(update={"diverged": found})
        record.add(status(loss).model_copy(update={"progress": progress}), elapsed=1.0)
    told = [(event.kind, event.version, event.text) for event in record.events]
    said = "the training has diverged: "
    assert told == [("warning", 2, f"{said}it is 2"), ("warning", 4, f"{said}it is 4")]


def test_a_long_run_is_recorded_coarsely_from_its_beginning_to_its_end() -> None:
    record = Record()
    last = 10 * MAX_POINTS
    for version in range(last + 1):
        record.add(status(version, finished=version == last), elapsed=version / 100)
    assert len(record.points) < MAX_POINTS
    assert (record.points[0].version, record.points[-1].version) == (0, last)
    assert record.samples_per_second == pytest.approx(800)


def test_records_of_a_run_that_went_before_do_not_count_as_speed() -> None:
    record = Record()
    record.add(status(1000), elapsed=5.0)
    record.add(status(1100), elapsed=7.0)
    assert record.samples_per_second == pytest.approx(400)


def test_a_run_whose_model_went_back_to_its_beginning_has_no_speed() -> None:
    record = Record()
    record.add(status(1000), elapsed=5.0)
    record.add(status(900), elapsed=7.0)
    assert record.samples_per_second is None


def test_versions_that_are_made_again_are_recorded_once() -> None:
    record = Record()
    for elapsed, version in enumerate([0, 400, 800, 400, 600, 800, 1000]):
        given = status(version)
        given.progress.metrics = {"lr": 1 / (1 + elapsed)}
        record.add(given, elapsed)
    assert [point.version for point in record.points] == [0, 400, 400, 600, 800, 1000]
    versions = [version for version, _ in record.metric_curves()["lr"]]
    assert versions == [0, 400, 400, 600, 800, 1000]
    assert min(rate for _, rate in speeds(record.points)) == 0, "the server did nothing between"
    record.add(status(0), elapsed=9)
    assert record.metric_curves() == {"lr": [(0, 1.0)]}


def test_a_record_is_read_while_the_model_goes_back() -> None:
    """A program may read it in its own thread, at any moment."""
    record, over, failed = Record(), threading.Event(), list[Exception]()

    def read() -> None:
        while not over.is_set():
            try:
                assert all(record.metric_curves().values())
                assert record.samples_per_second is None or record.samples_per_second > 0
            except Exception as error:  # noqa: BLE001 (the test tells of it)
                failed.append(error)
                return

    def said(version: int, accuracy: float) -> ServerStatus:
        progress = Progress(version=version, records_applied=8 * version, metrics={"accuracy": accuracy})
        return ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress)

    before, reader = sys.getswitchinterval(), threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for number in range(500):
            record.add(said(5, number), 0.0)
            record.add(said(7, number + 0.5), 1.0)
            record.add(said(1, number + 0.5), 2.0)
    finally:
        over.set()
        reader.join()
        sys.setswitchinterval(before)
    assert failed == []


def test_number_of_workers_by_version() -> None:
    members = [member(0), member(1, joined=0, left=30), member(2, joined=10), member(3, joined=10, left=50)]
    assert worker_steps(members, 50) == [(0, 2), (10, 4), (30, 3), (50, 3)]
    assert worker_steps([], 50) == []


def test_traces_are_joined_without_lines_that_were_cut_off(tmp_path: Path) -> None:
    (tmp_path / "ps-0-1.jsonl").write_text('{"name": "apply"}\n{"name": "pu')
    (tmp_path / "worker-0-2.jsonl").write_text('{"name": "push"}\n')
    assert merge_traces(tmp_path, tmp_path / "trace.json") == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["apply", "push"]


def test_the_users_own_number_of_threads_is_kept() -> None:
    assert with_threads({"OMP_NUM_THREADS": "7"}, processes=3) == {"OMP_NUM_THREADS": "7"}
    assert with_threads({}, processes=10_000)["MKL_NUM_THREADS"] == "1"


def test_a_script_is_checked_with_the_arguments_that_it_will_get() -> None:
    spec = make_job(clip=math.inf, seed=10**30).spec
    assert parse_spec(json.loads(Programs().check(spec)[-1]), source="test") == spec


def test_scaling_edits_only_the_number_of_workers_and_keeps_the_bounds(tmp_path: Path) -> None:
    document = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "j", "labels": {"a": "b"}},
        "spec": {"entrypoint": "a:b", "worker": {"replicas": 2, "maxReplicas": 4}},
    }
    directory = JobDirectory("j", root=tmp_path)
    with directory.claim():
        job = parse_job(document, source="test")
        directory.write_job(job)
        stamp = directory.job_stamp()
        assert directory.scale(4) == 2
        assert directory.job_stamp() != stamp
        with pytest.raises(UserError, match="above maxReplicas 4"):
            directory.scale(5)
        job.spec.worker.replicas = 4
        assert directory.read_job() == job


def test_a_job_whose_workers_have_fixed_shares_is_not_scaled(tmp_path: Path) -> None:
    directory = JobDirectory("fake", root=tmp_path)
    with directory.claim():
        directory.write_job(make_job(workers=2, spec={"consistency": {"deterministic": True}}))
        with pytest.raises(UserError, match="cannot change with consistency"):
            directory.scale(3)
        assert directory.scale(2) == 2
        even = {"deterministic": True, "globalBatchSize": 64}
        directory.write_job(make_job(workers=2, spec={"consistency": even}))
        assert directory.scale(3) == 2


def test_the_runs_that_were_written_to_longest_ago_lose_their_checkpoints(tmp_path: Path) -> None:
    directory = JobDirectory("j", root=tmp_path)
    runs = [directory.new_checkpoints() for _ in range(4)]
    claim = Claim(runs[1], "another", "run")
    claim.take(adopt=False, wait=False, make_room=runs.clear)  # a job that was started with --resume
    for run, written in zip(runs, (4000, 1000, 2000, 3000), strict=True):  # the first one was resumed since
        version = run / "version-0000000001"
        version.mkdir()
        os.utime(version, (written, written))
        os.utime(run, (500, 500))
    try:
        assert list(directory.remove_old_checkpoints()) == [runs[2]]
    finally:
        claim.close()
    assert [run.is_dir() for run in runs] == [True, True, False, True]
    assert list(directory.remove_old_checkpoints()) == [runs[1]]
    assert directory.new_checkpoints().name == "run-5"


def test_runs_that_trained_nothing_do_not_displace_one_that_did(tmp_path: Path) -> None:
    directory = JobDirectory("j", root=tmp_path)
    runs = [directory.new_checkpoints() for _ in range(4)]
    for run, version in ((runs[0], 7), (runs[1], 0)):
        (run / f"version-{version:010}").mkdir()
        (run / f"version-{version:010}" / "manifest.json").touch()
        os.utime(run, (500, 500))
    removed = [*directory.remove_old_checkpoints()]
    assert len(removed) == 2
    assert runs[0] not in removed


def test_runs_of_another_script_with_the_same_name_are_not_deleted(tmp_path: Path) -> None:
    def run(project: str, resume: Path | None = None) -> Path:
        path = tmp_path / project / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        with Launcher(script.job_of(path, ()), Options(root=tmp_path / "state", resume=resume)) as launcher:
            return launcher.checkpoints

    mine, yours = ([run(project) for _ in range(3)] for project in ("a", "b"))
    assert all(each.is_dir() for each in (*mine, *yours))
    run("a", resume=yours[0])
    os.utime(yours[0], (1, 1))
    os.utime(mine[0], (2, 2))
    run("b")
    assert all(each.is_dir() for each in (*mine, *yours))
    run("a")
    assert [each.is_dir() for each in (*mine, *yours)] == [False, True, True, False, True, True]


@pytest.mark.parametrize("call", ["flock", "rmtree"])
def test_a_directory_that_cannot_be_kept_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    where = {"flock": fcntl, "rmtree": shutil}[call]
    machine.fails(monkeypatch, where, call, OSError(errno.ENOLCK, "No locks available"))
    with pytest.raises(UserError, match=r"cannot keep the state of job 'j' in .*: No locks available"):
        JobDirectory("j", root=tmp_path).claim()


def test_a_directory_whose_old_logs_cannot_be_removed_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a log that somebody reads stays as a file of another name."""
    directory = JobDirectory("j", root=tmp_path)
    files.unlock(directory.claim())
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    files.unlock(directory.claim())
    assert directory.logs.is_dir()


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve() -> None:
    status = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True)
    curve = [(1, 0.5), (2, math.nan), (3, math.inf)]
    with closing(StatusServer("127.0.0.1:0", lambda: status, lambda: curve)) as server:
        assert fetch_loss(f"127.0.0.1:{server.port}") == [(1, 0.5)]


def test_durations_and_curves_are_short_texts() -> None:
    assert [duration(s) for s in (4.21, 185, 7620)] == ["4.2 s", "3 min 05 s", "2 h 07 min"]
    assert sparkline([1, 2, 3, 4], 2) == "▁█"
    assert sparkline([], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_changes_that_lie_close_together_share_a_label() -> None:
    steps = [(0, 2), (100, 3), (110, 4), (500, 3), (520, 4), (530, 2), (1000, 2)]
    assert change_labels(steps) == [(110, "+2"), (530, "+1 \N{MINUS SIGN}3")]
    assert change_labels([(0, 1), (10, 1)]) == []
    assert change_labels([]) == []
