"""The benchmark of what remains of the speed under faults: its schedule, and the jobs that it measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import get_args

import pytest

from benchmarks import goodput
from benchmarks.goodput import (
    LASTING,
    TORCHRUN,
    TORCHRUN_TUNED,
    chosen,
    make_parser,
    measure,
    schedule,
    systems,
)
from benchmarks.goodput_found import Fault, Measured, rival
from benchmarks.goodput_machines import ROOT, variables
from benchmarks.goodput_systems import CLEAN, Kind, System, make_job, modes


def test_the_faults_follow_from_the_seed() -> None:
    faults = schedule(7, 600.0, 3, 10.0)
    assert faults == schedule(7, 600.0, 3, 10.0)
    assert faults != schedule(8, 600.0, 3, 10.0)
    assert faults == sorted(faults)
    assert {fault.kind for fault in faults} == set(get_args(Kind))
    assert {fault.worker for fault in faults} == {0, 1, 2}
    assert all(0 < fault.at < 540 and LASTING[0] <= fault.lasting <= LASTING[1] for fault in faults)
    assert 30 < len(faults) < 80


def test_only_the_wanted_kinds_strike_and_last_as_long_as_is_said() -> None:
    faults = schedule(7, 600.0, 3, 10.0, lasting=(10.0, 30.0), kinds=("kill", "slow"))
    assert {fault.kind for fault in faults} == {"kill", "slow"}
    assert all(10 <= fault.lasting <= 30 for fault in faults)
    assert max(fault.lasting for fault in faults) > LASTING[1]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--lasting", "8"),
        ("--lasting", "30,10"),
        ("--lasting", "0,inf"),
        ("--lasting", "a,b"),
        ("--kinds", "kill,burn"),
        ("--gone", "-1"),
        ("--gone", "nan"),
        ("--gone", "soon"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_was_given(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([f"{option}={text}"])
    said = capsys.readouterr().err
    assert f"argument {option}: " in said
    assert text.rpartition(",")[2] in said


def test_options_are_read() -> None:
    parsed = make_parser().parse_args(
        ["--lasting", "10,30", "--kinds", "slow, kill", "--machines", "--gone", "5"]
    )
    assert (parsed.lasting, parsed.kinds, parsed.gone) == ((10.0, 30.0), ("kill", "slow"), 5.0)
    assert make_parser().parse_args([]).lasting == LASTING


def test_how_long_a_machine_is_away_needs_machines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        goodput.main(["--gone", "5"])
    assert "it needs --machines" in capsys.readouterr().err


def test_machines_are_compared_with_the_faster_torchrun() -> None:
    def at(rate: float) -> tuple[Measured, Measured]:
        return Measured(100.0, 60.0, 0, [], CLEAN), Measured(rate, 60.0, 0, [], CLEAN)

    assert {TORCHRUN, TORCHRUN_TUNED} < set(systems(3, gone=20.0))
    assert rival({TORCHRUN: at(20.0), TORCHRUN_TUNED: at(30.0), "bounded": at(90.0)}) == 30.0
    assert rival({"bounded": at(90.0)}) is None


@pytest.mark.parametrize("workers", [1, 3])
def test_each_mode_is_one_that_a_job_can_have(tmp_path: Path, workers: int) -> None:
    for consistency in modes(workers).values():
        assert make_job(tmp_path, workers, consistency).spec.worker.replicas == workers


def test_systems_are_chosen_by_how_their_names_begin() -> None:
    known = list(systems(3))
    assert chosen([], known) == known
    assert known[0] == TORCHRUN
    assert chosen(["local", "torchrun"], known) == [
        TORCHRUN,
        "local diloco",
        "local quorum",
        "local downpour",
    ]
    with pytest.raises(ValueError, match="no system that begins with 'ddp'; there are torchrun DDP; "):
        chosen(["sync", "ddp"], known)


class Counting:
    """A system of which a sample counts each time that somebody asks; it is interrupted at one of them."""

    def __init__(self, interrupt_at: int) -> None:
        self.asked, self.interrupt_at, self.over = 0, interrupt_at, False

    def samples(self) -> int | None:
        self.asked += 1
        if self.asked == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.asked

    def pid(self, worker: int) -> int | None:
        return None

    def kill(self, worker: int) -> bool:
        return False

    def kill_server(self) -> bool:
        return False

    def finish(self) -> str:
        return f"5 records in the model, {CLEAN}"

    @contextmanager
    def open(self, _directory: Path) -> Iterator[System]:
        try:
            yield self
        finally:
            self.over = True


def test_what_was_found_until_an_interruption_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = Counting(interrupt_at=0), Counting(interrupt_at=5)
    words = "--minutes 0.02 --quiet 0.001 --every 0.1 --json"
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.chdir(tmp_path)
    status = goodput.main(
        [*words.split(), str(tmp_path / "j")],
        offered=lambda *_: {"sync": first.open, "async": second.open},
        planned=lambda *_, **__: [Fault(0.0, "slow", 0, 1.0), Fault(0.1, "slow", 1, 1.0)],
    )
    assert status == 0
    said = capsys.readouterr().out
    assert "\nsync " in said
    assert "\nasync " in said
    assert "interrupted: async had " in said
    assert (first.over, second.over) == (True, True)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_measurement_that_is_interrupted_before_anything_counts_ends() -> None:
    interrupted = Event()
    interrupted.set()
    system = Counting(interrupt_at=0)
    system.samples = lambda: None  # type: ignore[method-assign]
    assert measure(system.open, 600.0, [], interrupted, workers=1).struck == 0
    assert system.over


STOPPED = """
import os, signal, time
signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"thawed\\n"))
while True:
    print(time.monotonic(), flush=True)
    time.sleep(0.005)
"""


def test_a_freeze_is_not_over_before_its_time_though_another_one_ends() -> None:
    """The process that is frozen says when it runs, and that it was thawed."""
    system = Counting(interrupt_at=0)
    faults = [Fault(0.0, "freeze", 0, 3.0), Fault(0.0, "freeze", 0, 0.1)]
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            system.pid = lambda worker: process.pid  # type: ignore[method-assign]
            struck = measure(system.open, 4.0, faults, Event(), workers=1).struck
            lines = [first]
            while "thawed\n" not in lines[:-1] and (line := process.stdout.readline()):
                lines.append(line)
        finally:
            process.kill()
        lines += [*process.stdout][:-1]  # the last one may be half of one
    assert (struck, lines.count("thawed\n")) == (2, 1)
    thawed = lines.index("thawed\n")
    assert float(lines[thawed + 1]) - float(lines[thawed - 1]) >= 2.99


def test_a_process_that_is_started_finds_packages_where_this_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/mine")
    found = variables(RUST_LOG="warn")
    assert found["PYTHONPATH"] == f"{ROOT}{os.pathsep}/opt/mine"
    assert (found["RUST_LOG"], found["PATH"]) == ("warn", os.environ["PATH"])
    monkeypatch.delenv("PYTHONPATH")
    assert variables()["PYTHONPATH"] == str(ROOT)


def test_a_system_that_does_not_train_is_said_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad = Counting(interrupt_at=0), Counting(interrupt_at=0)
    bad.samples = lambda: None  # type: ignore[method-assign]

    @contextmanager
    def failing(directory: Path) -> Iterator[System]:
        (directory / "log-0").write_text("Traceback:\nModuleNotFoundError: No module named 'torchft'\n")
        with bad.open(directory) as system:
            yield system

    monkeypatch.chdir(tmp_path)
    words = ["--minutes", "0.001", "--quiet", "0.001"]
    systems = {"torchft": failing, "sync": good.open}
    assert goodput.main(words, offered=lambda *_: systems, limit=0.1) == 1
    said = capsys.readouterr().out
    assert "log-0 ends with: ModuleNotFoundError: No module named 'torchft'" in said
    assert "\nsync " in said
    assert bad.over
