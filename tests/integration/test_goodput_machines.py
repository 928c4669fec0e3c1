"""The machines that come and go in the benchmark of what remains of the speed under faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.goodput_machines import (
    ROOT,
    Machines,
    kill_all_of,
    kill_with_descendants,
    program,
    seconds_away,
    send_away,
    signal_to,
)
from benchmarks.goodput_torchrun import TUNED, command, last_error
from tests.testing.polling import eventually

pytestmark = pytest.mark.nightly  # the benchmark's means, which no user has

WITH_A_SESSION = (
    "import subprocess, sys, time\n"
    "if len(sys.argv) > 1: subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)\n"
    "time.sleep(600)"
)
"""A program that starts another one, as torchrun's agent does: in a session of its own."""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed at the end, with what they have started."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            kill_with_descendants(process.pid)
        process.wait()


def start(started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    started.append(subprocess.Popen([sys.executable, "-c", WITH_A_SESSION, WITH_A_SESSION]))
    return started[-1]


def children(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def test_a_process_is_killed_with_what_it_has_started_in_other_sessions(
    started: list[subprocess.Popen[bytes]],
) -> None:
    ours = start(started)
    eventually(lambda: len(children(ours.pid)) == 1, "there is a child")
    (child,) = children(ours.pid)
    signal_to(child.pid, signal.SIGSTOP)  # it may be frozen
    assert kill_with_descendants(ours.pid)
    assert ours.wait() == -signal.SIGKILL
    eventually(lambda: not runs(child), "the child is dead")
    assert not kill_with_descendants(ours.pid)


def test_a_machine_that_was_killed_is_away_while_the_others_stay(
    started: list[subprocess.Popen[bytes]],
) -> None:
    machines = Machines(2, lambda _machine: start(started), gone=600.0)
    try:
        eventually(lambda: None not in (machines.pid(0), machines.pid(1)), "both are there")
        other = machines.pid(1)
        assert machines.kill(0)
        assert machines.pid(0) is None
        assert not machines.kill(0)
        assert machines.pid(1) == other
    finally:
        machines.close()
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_a_machine_comes_back_and_that_it_was_killed_is_not_held_against_it(
    started: list[subprocess.Popen[bytes]],
) -> None:
    machines = Machines(1, lambda _machine: start(started), gone=0.3)
    try:
        eventually(lambda: machines.pid(0) is not None, "it is there")
        before = machines.pid(0)
        assert machines.kill(0)
        eventually(lambda: machines.pid(0) not in (None, before), "it is back")
        assert machines.ended == 0
    finally:
        machines.close()


def test_a_program_that_ends_by_itself_is_started_again_and_counted(
    started: list[subprocess.Popen[bytes]],
) -> None:
    machines = Machines(1, lambda _machine: start(started), gone=600.0)
    try:
        eventually(lambda: machines.pid(0) is not None, "it is there")
        before = machines.pid(0)
        assert before is not None
        os.kill(before, signal.SIGKILL)  # by nobody who has asked the machines to
        eventually(lambda: machines.pid(0) not in (None, before), "it is started again")
        assert machines.ended == 1
    finally:
        machines.close()


def test_a_worker_begins_when_its_machine_is_back(tmp_path: Path) -> None:
    """The program becomes the worker, which says what it lacks here."""
    send_away(tmp_path, 0, 600.0)
    send_away(tmp_path, 1, 1.0)
    assert 0.0 < seconds_away(tmp_path, 0) <= 600.0
    assert seconds_away(tmp_path, 2) == 0.0
    done = subprocess.run(
        program(tmp_path),
        env={**os.environ, "ELASTIC_PS_INDEX": "1", "ELASTIC_PS_JOB": "digits"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert seconds_away(tmp_path, 1) == 0.0
    assert done.returncode != 0
    assert "ELASTIC_PS_" in done.stderr


def test_whether_the_job_is_right_is_found_out_at_once(tmp_path: Path) -> None:
    send_away(tmp_path, 0, 600.0)
    words = [*program(tmp_path), "--check", "{}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert "error: spec: " in done.stderr


def test_the_last_error_of_the_newest_log_is_told(tmp_path: Path) -> None:
    assert last_error(tmp_path) == "they named no error"
    (tmp_path / "log-0").write_text("ConnectionError: old\n")
    os.utime(tmp_path / "log-0", (1.0, 1.0))
    (tmp_path / "log-1").write_text("RuntimeError: before\n  RendezvousClosedError\nfine\n")
    assert last_error(tmp_path) == "RendezvousClosedError"


def test_an_agent_gets_its_options_before_the_script_and_the_arguments_after_it(tmp_path: Path) -> None:
    words = command(tmp_path, ["--nnodes", "1:3"], ["--machine", "2"])
    assert words.index("--nnodes") < words.index("-m", 3) < words.index("--ddp") < words.index("--machine")


def test_torchrun_knows_the_times_that_are_set() -> None:
    """Torch passes over settings that it does not know."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous

    class Backend(dynamic_rendezvous.RendezvousBackend):
        name = "none"

        def get_state(self) -> None: ...

        def set_state(self, state: bytes, token: object = None) -> None: ...

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    parameters = RendezvousParameters("c10d", "localhost", "goodput", 1, 3, **TUNED)
    settings = dynamic_rendezvous.create_handler(store, Backend(), parameters).settings
    assert settings.timeout.last_call.total_seconds() == 1
    assert settings.keep_alive_interval.total_seconds() == 1


def test_every_process_of_a_directory_is_killed(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys, time\n"
        "if len(sys.argv) == 5: subprocess.Popen([*sys.argv[1:], 'the child of the child'])\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", child, sys.executable, "-c", child, str(tmp_path)]
    ours = subprocess.Popen(command)
    try:
        eventually(lambda: len(list(_naming(tmp_path))) == 2, "there is a child of the child")
        kill_all_of(tmp_path)
        assert ours.wait() == -signal.SIGKILL
        assert list(_naming(tmp_path)) == []
    finally:
        ours.kill()
        ours.wait()


def _naming(path: Path) -> Iterator[int]:
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path) in each.read_text(errors="replace"):
                yield int(each.parent.name)
        except OSError:
            pass
