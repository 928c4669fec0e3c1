"""Commands that are carried out in this process, where something in their way can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ps.checkpoint import files
from elastic_ps.cli.commands import command_of
from elastic_ps.cli.view import PlainDisplay
from elastic_ps.local.state import JobDirectory, LocalStatus, start_time
from tests.testing.launching import PROGRAMS, fake_document


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "elastic-ps"


def command(*words: str) -> int:
    return command_of(words, PROGRAMS)()


def test_a_display_that_fails_does_not_end_the_job(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: Any) -> None:
        raise ValueError("nothing can be drawn")

    monkeypatch.setattr(PlainDisplay, "update", fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("def main(**arguments):\n    pass\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(fake_document(records=800)))
    assert command("run", str(file)) == 0
    said = capsys.readouterr()
    assert "the display has failed, and the job goes on without it" in said.err
    assert "ValueError: nothing can be drawn" in said.err
    assert "succeeded" in said.out


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
    state: Path, stranger: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = JobDirectory("j")
    lock = directory.claim()
    try:
        lock.truncate(0)
        lock.write(str(stranger.pid))
        lock.flush()
        directory.write_status(status(stranger.pid, (start_time(stranger.pid) or 0) - 100))
        assert command("stop", "j") == 2
    finally:
        files.unlock(lock)
    assert "j runs, but not here: its launcher is process" in capsys.readouterr().err
    assert stranger.poll() is None


def test_the_last_line_of_a_log_is_shown_although_it_has_no_end(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = JobDirectory("j")
    files.unlock(directory.claim())
    directory.write_status(status(os.getpid(), None))
    directory.log("worker", 0).write_text("one\n50 %|#####     |")
    assert command("logs", "j", "--worker", "0") == 0
    assert capsys.readouterr().out == "one\n50 %|#####     |\n"
