"""Commands that are carried out in this process, where something in their way can fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic_ps.checkpoint import files
from elastic_ps.cli import control, drill
from elastic_ps.cli.view import PlainDisplay
from elastic_ps.local import script
from elastic_ps.local.state import JobDirectory, LocalStatus, start_time
from tests.testing import machine
from tests.testing.launching import Here, fake_document


def test_a_display_that_fails_does_not_end_the_job(
    tmp_path: Path, elastic_ps_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.fails(monkeypatch, PlainDisplay, "update", ValueError("nothing can be drawn"))
    (tmp_path / "script.py").write_text("def main(**arguments):\n    pass\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(fake_document(records=800)))
    done = elastic_ps_here("run", file)
    assert done.returncode == 0
    assert "the display has failed, and the job goes on without it" in done.stderr
    assert "ValueError: nothing can be drawn" in done.stderr
    assert "succeeded" in done.stdout


def test_a_drill_that_was_interrupted_may_be_repeated(
    tmp_path: Path, elastic_ps_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, history: Path, **__: object) -> None:
        history.mkdir(exist_ok=True)
        (history / "ps-0-1.jsonl").touch()
        raise SystemExit(130)

    monkeypatch.setattr(drill, "run", interrupted)
    (tmp_path / "script.py").write_text("def main(**arguments):\n    pass\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(fake_document(records=800)))
    for _ in range(2):
        done = elastic_ps_here("drill", file, "--report", tmp_path / "out", "--seed", "7")
        assert done.returncode == 130, done.stderr
    report = json.loads((tmp_path / "out" / "drill.json").read_text())
    assert (report["passed"], report["seed"]) == (False, 7)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the number here which a launcher has elsewhere."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def status(pid: int, started: int | None) -> LocalStatus:
    return LocalStatus(
        job="j",
        phase="Running",
        launcher_pid=pid,
        launcher_start_time=started,
        started=0.0,
        updated=0.0,
        workers=1,
    )


def test_a_job_whose_launcher_is_elsewhere_is_not_stopped_here(
    elastic_ps_here: Here, stranger: subprocess.Popen[bytes]
) -> None:
    directory = JobDirectory("j")
    lock = directory.claim()
    try:
        lock.truncate(0)
        lock.write(str(stranger.pid))
        lock.flush()
        directory.write_status(status(stranger.pid, (start_time(stranger.pid) or 0) - 100))
        done = elastic_ps_here("stop", "j")
    finally:
        files.unlock(lock)
    assert done.returncode == 2
    assert "j runs, but not here: its launcher is process" in done.stderr
    assert stranger.poll() is None


@pytest.mark.parametrize(
    "words", ["stop", "logs", "status", "scale --workers=2", "set compression.codec=int8"]
)
def test_a_script_of_another_directory_is_not_taken_for_the_one_that_runs(
    tmp_path: Path, elastic_ps_here: Here, words: str
) -> None:
    command, *options = words.split()
    ran, other = tmp_path / "a" / "train.py", tmp_path / "b" / "train.py"
    for path in (ran, other):
        path.parent.mkdir()
        path.touch()
    directory = JobDirectory("train")
    files.unlock(directory.claim())
    directory.write_job(script.job_of(ran, ()))
    directory.write_status(status(os.getpid(), None).model_copy(update={"job": "train", "phase": "Failed"}))
    done = elastic_ps_here(command, other, *options)
    assert done.returncode == 2
    assert f"the job 'train' runs {ran}, and not {other}" in done.stderr
    assert str(other) not in elastic_ps_here(command, ran, *options).stderr


FINISHES = """
import os, signal, time
from elastic_ps.local.state import JobDirectory, LocalStatus, start_time
directory = JobDirectory("j")
lock = directory.claim()
said = {"job": "j", "started": 0.0, "updated": 0.0, "workers": 1, "launcher_pid": os.getpid()}
said["launcher_start_time"] = start_time(os.getpid())
def finish(*_):
    directory.write_status(LocalStatus(phase="Succeeded", **said))
    os._exit(0)
signal.signal(signal.SIGTERM, finish)
directory.write_status(LocalStatus(phase="Running", **said))
print("ready", flush=True)
while True:
    time.sleep(0.01)  # a signal just before a longer sleep would not end it
"""


def test_a_job_that_succeeds_while_it_is_stopped_is_not_to_be_continued(elastic_ps_here: Here) -> None:
    with subprocess.Popen([sys.executable, "-c", FINISHES], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "ready\n"
            done = elastic_ps_here("stop", "j")
        finally:
            launcher.kill()
    assert (done.returncode, done.stdout) == (0, "j succeeded before it was stopped\n")


def test_the_last_line_of_a_log_is_shown_although_it_has_no_end(elastic_ps_here: Here) -> None:
    directory = JobDirectory("j")
    files.unlock(directory.claim())
    directory.write_status(status(os.getpid(), None))
    directory.log("worker", 0).write_text("one\n50 %|#####     |")
    done = elastic_ps_here("logs", "j", "--worker", "0")
    assert done.returncode == 0
    assert done.stdout == "one\n50 %|#####     |\n"


def test_what_cannot_be_read_elsewhere_is_no_problem_of_the_state(
    elastic_ps_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program of a person who has no home."""
    denied = PermissionError(13, "Permission denied", "/elsewhere")
    machine.fails(monkeypatch, control, "status", denied)
    monkeypatch.delenv("XDG_STATE_HOME")
    machine.fails(monkeypatch, Path, "home", RuntimeError("Could not determine home directory."))
    done = elastic_ps_here("status")
    assert (done.returncode, done.stderr) == (2, "error: Permission denied: /elsewhere\n")


@pytest.mark.parametrize(
    "words", ["status j", "stop j", "logs j", "scale j --workers 2", "set j checkpoint.keep=2"]
)
def test_a_state_that_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, elastic_ps_here: Here, words: str
) -> None:
    (tmp_path / "state" / "elastic-ps").mkdir(parents=True)
    (tmp_path / "state" / "elastic-ps" / "j").write_text("no directory")
    done = elastic_ps_here(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: .*Not a directory: .*j/status.json. Set XDG_STATE_HOME .*\n", done.stderr)
