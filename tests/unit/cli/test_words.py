"""Figures in words."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from elastic_ps.api.status import Divergence, EvaluationStatus, MemberStatus, Phase, Progress, ServerStatus
from elastic_ps.api.tables import TableStatus, added
from elastic_ps.api.traffic import Traffic
from elastic_ps.cli import words
from elastic_ps.cli.view import frame
from elastic_ps.local import LocalStatus
from elastic_ps.local.plan import Process
from elastic_ps.local.snapshot import at_the_end, state_of, was_finished
from elastic_ps.local.state import (
    JobDirectory,
    ProcessStatus,
    how_to_continue,
    newest_checkpoint,
)


@pytest.mark.parametrize(
    ("seconds", "slowness", "text"),
    [(None, None, ""), (0.12, 1.0, "0.120 s"), (0.12, None, "0.120 s"), (0.48, 4.0, "0.480 s 4.0x")],
)
def test_a_slow_worker_stands_out(seconds: float | None, slowness: float | None, text: str) -> None:
    fields: dict[str, Any] = {"worker": 0, "incarnation": 1, "pid": 1, "host": "h", "joined_version": 0}
    member = MemberStatus(**fields, state="training", step_seconds=seconds, slowness=slowness)
    assert words.step_time(member) == text


@pytest.mark.parametrize(
    ("version", "phase", "text"),
    [
        (None, "Running", None),
        (1100, "Running", "version 1,100 on disk, 4 s old"),
        (1100, "Succeeded", "version 1,100 on disk"),
    ],
)
def test_what_is_on_disk_and_since_when(version: int | None, phase: Phase, text: str | None) -> None:
    progress = Progress(durable_version=version)
    age = None if version is None else 4.2
    server = ServerStatus(
        job="j", shard=0, shards=1, term=1, ready=True, progress=progress, durable_age_seconds=age
    )
    status = LocalStatus.model_construct(phase=phase, server=server)
    assert words.on_disk(status) == text


@pytest.mark.parametrize(("newest", "shown"), [(None, 20), (20, 20), (25, 25)])
def test_at_the_end_what_is_on_disk_is_looked_up(newest: int | None, shown: int) -> None:
    """The last checkpoint is written when the parameter server answers no more."""
    progress = Progress(version=25, durable_version=20)
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress)
    ended = at_the_end(server, newest)
    assert ended is not None
    assert ended.progress.durable_version == shown
    assert at_the_end(None, newest) is None


def test_a_job_that_has_trained_more_epochs_was_not_finished_before() -> None:
    """They may be trained between two answers, which both say that training is over."""

    def answer(version: int, *, term: int = 1) -> ServerStatus:
        progress = Progress(version=version, finished=True)
        return ServerStatus(job="j", shard=0, shards=1, term=term, ready=True, progress=progress)

    found = partial(was_finished, resumed=24)
    assert found(answer(24), None, False)
    assert found(answer(24), answer(24, term=0), False)
    assert found(answer(24), answer(24), True)
    assert not found(answer(32), None, False), "more epochs were trained before the first answer"
    assert not found(answer(32), answer(24), True)
    assert not found(answer(32), answer(32), False)
    assert not was_finished(answer(24), None, False, resumed=None), "the first answer of a short job"


def test_which_checkpoint_is_the_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    for name in ("version-0000000009", "version-0000000010", "version-0000000011.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "version-0000000012").mkdir()
    assert newest_checkpoint(tmp_path) == 10
    assert how_to_continue(f"{tmp_path}") == (
        f"to continue from the last checkpoint, start the job again with --resume {tmp_path}"
    )
    assert how_to_continue(f"{tmp_path}/missing") == how_to_continue("") == ""


def test_how_to_continue_is_said_of_a_job_whose_launcher_was_killed(tmp_path: Path) -> None:
    (tmp_path / "kept" / "version-0000000009").mkdir(parents=True)
    (tmp_path / "kept" / "version-0000000009" / "manifest.json").touch()
    directory = JobDirectory("j", root=tmp_path)
    directory.path.mkdir()
    kept = f"{tmp_path}/kept"
    directory.write_status(
        LocalStatus(job="j", checkpoints=kept, launcher_pid=7, started=0, updated=0, workers=1)
    )
    status = directory.read_status()
    assert status is not None
    assert status.message.startswith("the launcher (pid 7) is gone; to continue from the last checkpoint, ")


@pytest.mark.parametrize(("phase", "shown"), [("Running", True), ("Suspended", False), ("Failed", False)])
def test_how_long_it_takes_is_said_of_a_job_that_runs(phase: Phase, shown: bool) -> None:
    progress = Progress(version=3, records_expected=10, records_applied=5, eta_seconds=5)
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress)
    status = LocalStatus(job="j", phase=phase, launcher_pid=1, started=0, updated=0, workers=1, server=server)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(frame(status, width=console.width))
    assert ("left" in console.export_text()) is shown


@pytest.mark.parametrize("ready", [True, False])
def test_the_status_says_what_problem_the_parameter_server_has(ready: bool) -> None:
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=ready, problem="No space left on device")
    status = LocalStatus(
        job="j", phase="Running", launcher_pid=1, started=0, updated=0, workers=1, server=server
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(frame(status, width=console.width))
    assert "problem: No space left on device" in console.export_text()


def test_the_status_says_why_the_job_learns_nothing() -> None:
    progress = Progress(version=3, diverged=Divergence(reason="LossNoBetter", message="the loss is 2.3"))
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress)
    status = LocalStatus(
        job="j", phase="Running", launcher_pid=1, started=0, updated=0, workers=1, server=server
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(frame(status, width=console.width))
    assert "diverged: the loss is 2.3" in console.export_text()


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, ""),
        ({"pushed": (2000, 2000), "pulled": (999, 999)}, "2.0 kB of gradients, 999 B of values"),
        (
            {"pushed": (25_100_000, 100_000_000), "pulled": (15 * 10**8, 3 * 10**9)},
            "25.1 MB of gradients (25.1% of the uncompressed size), "
            "1.5 GB of values (50.0% of the uncompressed size), 2.5 s to encode and decode",
        ),
    ],
)
def test_what_has_gone_over_the_network(counts: dict[str, tuple[int, int]], text: str) -> None:
    fields: dict[str, Any] = {}
    for way, (sent, plain) in counts.items():
        fields |= {f"{way}_bytes": sent, f"{way}_plain_bytes": plain}
        if sent != plain:
            fields |= {"encode_seconds": 2.0, "decode_seconds": 0.5}
    assert words.traffic(Traffic(**fields)) == text


def test_the_codecs_that_workers_have_chosen_are_said_once() -> None:
    chosen = [
        Traffic(pushed_bytes=1, pushed_plain_bytes=2, codec=name) for name in ("topk", "", "int8", "topk")
    ]
    together = sum(chosen, Traffic())
    said = "4 B of gradients (50.0% of the uncompressed size), sent as int8, topk"
    assert words.traffic(together) == said


def test_what_backward_hides_is_a_share_over_all_workers() -> None:
    sent: dict[str, Any] = {"pushed_bytes": 1, "pushed_plain_bytes": 1}
    one = Traffic(**sent, push_seconds=3.0, hidden_seconds=3.0, overlap="a: b, c")
    both = one + Traffic(**sent, push_seconds=1.0, overlap="a: b, c") + Traffic(overlap="d")
    assert both.hidden_share == 0.75
    assert both.overlap == "a: b, c; d"
    assert words.traffic(both) == "2 B of gradients, 75% of the sending of gradients overlapped with backward"
    assert Traffic(**sent).hidden_share is None, "all was sent in one call"


def test_a_table_says_how_many_rows_it_has_on_all_shards() -> None:
    parts = [
        [TableStatus(name="user", rows=1000, size_bytes=150_000, admitted=1100, expired=100, looked_up=9)],
        [
            TableStatus(name="item"),
            TableStatus(name="user", rows=200, size_bytes=50_000, admitted=200, looked_up=1, hits=9),
        ],
    ]
    item, user = added(parts)
    assert words.table_line(item) == "item: 0 rows, 0 B, 0 admitted"
    said = "user: 1,200 rows, 200.0 kB, 1,300 admitted, 100 expired, 90% of look-ups hit"
    assert words.table_line(user) == said


def test_a_job_that_cannot_start_says_why() -> None:
    server = ServerStatus(job="j", shard=0, shards=1, term=0, ready=False, problem="the disk is full")
    status = LocalStatus.model_construct(phase="Running", server=server, processes=[])
    assert words.progress_line(status).endswith("; problem: the disk is full")


def training(worker: int, seconds: float | None) -> MemberStatus:
    fields: dict[str, Any] = {"incarnation": worker, "pid": 70 + worker, "host": "h", "joined_version": 0}
    return MemberStatus(worker=worker, state="training", step_seconds=seconds, **fields)


def process(worker: int, **fields: Any) -> ProcessStatus:
    given: dict[str, Any] = {"role": "worker", "index": worker, "pid": 70 + worker, "state": "training"}
    return ProcessStatus(**{**given, **fields})


def shown(status: LocalStatus) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(frame(status, width=console.width))
    return console.export_text()


def test_a_job_that_starts_says_what_it_waits_for(tmp_path: Path) -> None:
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=False)
    starting = [process(0, role="ps", state="serving"), process(1, state="starting")]
    status = LocalStatus(
        job="j",
        launcher_pid=1,
        started=0,
        updated=0,
        workers=1,
        checkpoints=str(tmp_path),
        processes=starting,
    )
    assert "waiting for worker 1 to start" in shown(status)
    joined = server.model_copy(update={"members": [training(1, None)]})
    status = status.model_copy(update={"server": joined})
    assert words.progress_line(status) == "waiting for the first values of the model"
    (tmp_path / "partial-1-0-0000000000").mkdir()
    (tmp_path / "partial-1-0-0000000000" / "shard-0-of-1.safetensors").write_bytes(bytes(204_000))
    assert words.progress_line(status) == "writing version 0, 204.0 kB"
    assert "writing version 0, 204.0 kB" in shown(status)
    server = joined.model_copy(update={"ready": True})
    for version, percent, waits in ((0, 0, True), (5, 50, False), (9, 100, True)):
        done = server.model_copy(update={"progress": Progress(version=version, percent=percent)})
        status = status.model_copy(update={"server": done})
        assert ("writing version 0" in shown(status)) == waits


@pytest.mark.parametrize(
    ("seconds", "rate", "text"),
    [
        ([0.2, 0.3], 1200.0, "1,200 samples/s"),
        ([3.1, 2.9, 9.0], 4.2, "3.1 s/step  4.2 samples/s"),
        ([3.1, None], None, "3.1 s/step"),
        ([3.1], 0.0, "3.1 s/step"),
        ([None], None, None),
    ],
)
def test_of_long_steps_the_duration_is_said(
    seconds: list[float | None], rate: float | None, text: str | None
) -> None:
    progress = Progress(samples_per_second=rate)
    members = [training(worker, each) for worker, each in enumerate(seconds)]
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress, members=members)
    assert words.pace(server) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, None), (7, "7 s"), (59, "59 s"), (61, "1 min"), (890, "15 min"), (7630, "2 h 07 min")],
)
def test_the_remaining_time_is_said_no_more_exactly_than_it_is_known(
    seconds: int | None, text: str | None
) -> None:
    assert words.eta(Progress(eta_seconds=seconds)) == text


@pytest.mark.parametrize(("phase", "listed"), [("Running", False), ("Succeeded", True)])
def test_the_workers_that_are_done_are_listed_when_the_job_is_over(phase: Phase, listed: bool) -> None:
    member = training(1, 0.5).model_copy(update={"state": "left", "steps": 1234})
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, members=[member])
    processes = [process(1, state="ended", exit=0)]
    status = LocalStatus(
        job="j",
        phase=phase,
        launcher_pid=1,
        started=0,
        updated=0,
        workers=1,
        server=server,
        processes=processes,
    )
    assert ("worker 1" in shown(status), "1,234" in shown(status)) == (listed, listed)


def test_a_job_that_only_uses_tensors_has_no_progress_to_tell() -> None:
    worker: dict[str, Any] = {
        "role": "worker",
        "index": 0,
        "pid": 7,
        "state": "running",
        "exit": None,
        "restarts": 0,
    }
    processes = [ProcessStatus(**worker), ProcessStatus(**{**worker, "index": 1, "exit": 0})]
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=True)
    status = LocalStatus.model_construct(phase="Running", server=server, processes=processes)
    assert words.progress_line(status) == f"{words.ONLY_TENSORS}  1 worker"
    assert state_of(Process(role="worker", index=0, pid=7, started=0.0), server) == "running"
    member = MemberStatus(worker=0, incarnation=1, pid=7, host="h", joined_version=0, state="joining")
    assert server.only_tensors
    assert not server.model_copy(update={"members": [member]}).only_tensors
    assert not server.model_copy(update={"progress": Progress(version=3)}).only_tensors, "of a checkpoint"
    assert not server.model_copy(update={"progress": Progress(records_expected=9)}).only_tensors
    assert not server.model_copy(update={"ready": False}).only_tensors


def summary_of(
    progress: Progress,
    *,
    ready: bool = True,
    phase: str = "Succeeded",
    checkpoints: str = "/kept/run-3",
    message: str = "",
) -> dict[str, str]:
    server = ServerStatus(job="j", shard=0, shards=1, term=1, ready=ready, progress=progress)
    record = SimpleNamespace(last=server, loss_curve=list, samples_per_second=None)
    status = SimpleNamespace(checkpoints=checkpoints)
    verdict = SimpleNamespace(message=message, phase=phase, reason="")
    outcome = SimpleNamespace(record=record, verdict=verdict, status=status, unreached=())
    return dict(words.summary(cast(Any, outcome)))


def test_the_value_of_the_best_version_is_not_taken_for_a_version() -> None:
    found = EvaluationStatus(version=39, metrics={"prec@1": 34.3}, best_version=30, best=40.0, evaluated=4)
    said = summary_of(Progress(version=39, evaluation=found))
    assert said["best"] == "version 30 with 40; its checkpoint is kept"


def test_the_cause_of_a_failure_is_said_without_the_output() -> None:
    message = (
        "ValueError: no (worker 0 exited with 1). Processes have failed once, more than backoffLimit 0 "
        "allows. The last output of worker 0:\nTraceback (most recent call last):\nValueError: no"
    )
    assert summary_of(Progress(), phase="Failed", message=message)["cause"] == (
        "ValueError: no (worker 0 exited with 1). Processes have failed once, more than backoffLimit 0 allows"
    )
    assert summary_of(Progress(), phase="Failed", message="one\ntwo")["cause"] == "one"


def test_the_summary_names_the_directory_that_has_the_model() -> None:
    assert summary_of(Progress(version=39, durable_version=39))["checkpoints"] == "/kept/run-3"
    default = "/state/j/checkpoints/run-3"
    said = summary_of(Progress(version=39, durable_version=39), checkpoints=default)["checkpoints"]
    assert said == f"{default} (kept for 2 more runs)"
    assert "checkpoints" not in summary_of(Progress(version=39))
    failed = summary_of(Progress(version=39, durable_version=39), phase="Failed")
    assert "checkpoints" not in failed, "the line about --resume names it"


def test_the_summary_of_a_job_that_no_worker_has_joined_says_so() -> None:
    assert summary_of(Progress(), ready=False) == {"warning": words.NOTHING_TRAINED}
    assert summary_of(Progress(), ready=False, phase="Failed", message="one\ntwo") == {"cause": "one"}
