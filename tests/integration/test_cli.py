"""`elastic-ps` as a person uses it: command lines, signals, exit codes, what is printed and written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from elastic_ps.cli.run import AT_ONCE
from tests.testing.launching import FAKE, Here, fake_document, gone
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change

FOREVER = 10_000_000
COMMAND = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup starts ignores it
from elastic_ps.cli import main
from elastic_ps.local import Programs
programs = Programs(server=(sys.executable, {FAKE!r}, "ps"), worker=(sys.executable, {FAKE!r}, "worker"))
sys.exit(main(programs=programs))
"""


class Place:
    """A directory with a script, its own state directory, and the commands given in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state" / "elastic-ps"
        self._started: list[subprocess.Popen[str]] = []
        (path / "script.py").write_text("def main(): ...\n")

    def job(self, name: str = "fake", *, workers: int = 2, spec: Any = None, **arguments: Any) -> str:
        document = fake_document(name, workers=workers, **arguments)
        document["spec"] |= spec or {}
        (self.path / "job.yaml").write_text(yaml.safe_dump(document))
        return "job.yaml"

    def start(self, *arguments: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*through, sys.executable, "-c", COMMAND, *arguments],
            cwd=self.path,
            env={**os.environ, "XDG_STATE_HOME": str(self.path / "state"), "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, through=through)
        out, err = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def status(self, name: str = "fake") -> dict[str, Any]:
        """The content of a job's status.json; empty if there is none."""
        try:
            content: dict[str, Any] = json.loads((self.state / name / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return content

    def workers(self) -> dict[int, int]:
        processes = self.status().get("processes", [])
        return {p["index"]: p["pid"] for p in processes if p["state"] == "training"}

    def training(self, count: int) -> dict[int, int]:
        return eventually(
            lambda: self.workers() if len(self.workers()) == count else None, f"{count} workers train"
        )

    def pids(self) -> list[int]:
        return [process["pid"] for process in self.status()["processes"]]

    def clean(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for path in self.state.glob("*/status.json"):
            status = json.loads(path.read_text())
            if status["phase"] in ("Pending", "Running") and not gone(status["launcherPid"]):
                os.kill(status["launcherPid"], signal.SIGKILL)
            for process in status["processes"]:
                eventually(lambda pid=process["pid"]: gone(pid), f"process {process} ends")  # type: ignore[misc]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.clean()


def test_help_is_quick_and_teaches(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "elastic_ps.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for word in ("run", "train", "status", "scale", "logs", "stop", "examples:", "exit codes:"):
        assert word in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "pydantic", "rich", "matplotlib", "numpy", "grpc", "kopf"}


def test_the_launcher_loads_neither_torch_nor_the_programs(place: Place) -> None:
    modules = ("cli.run", "cli.train", "cli.control", "local.report")
    code = f"import sys, {', '.join(f'elastic_ps.{module}' for module in modules)}\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'kopf', 'matplotlib', 'grpc')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_run_scales_and_reports(place: Place) -> None:
    job = place.job(records=4000, pair_from=100, company=3)
    done = place.run(
        "run",
        job,
        "--scale",
        "30:3",
        "--scale",
        "99999:2",
        "--report",
        "out",
        "--trace",
        "t.json",
        "--output",
        "all",
    )
    assert done.returncode == 0, done.stderr
    assert "fake succeeded" in done.stdout
    assert "97.50 %" in done.stdout
    assert "scaled from 2 to 3 workers" in done.stdout
    assert "worker 2 joined at version" in done.stdout
    assert "99999:2 had no effect" in done.stdout
    assert "All output: elastic-ps logs fake" in done.stdout
    assert "ps-0      | serving" in done.stdout
    report = json.loads((place.path / "out" / "run.json").read_text())
    assert report["phase"] == "Succeeded"
    assert report["test_accuracy"] == 0.975
    assert (report["records_applied"], report["records_expected"]) == (4000, 4000)
    assert 0 < report["samples_per_second"] < 100_000
    assert report["duration_seconds"] > 0
    assert report["loss"][-1][0] == 500
    assert report["diverged"] is None
    assert {"id", "pid", "joined_version", "left_version", "steps"} <= set(report["workers"][0])
    assert (place.path / "out" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((place.path / "t.json").read_text())["traceEvents"]


def test_a_failed_job_shows_the_end_of_the_log(place: Place) -> None:
    done = place.run(
        "run", place.job(records=FOREVER, fail={"0": 5}, spec={"runPolicy": {"backoffLimit": 0}})
    )
    assert done.returncode == 1
    assert "BackoffLimitExceeded" in done.stderr
    assert done.stderr.startswith("error: job 'fake' failed: worker 0 exited with 5")
    assert "fake worker 0 ends with 5" in done.stdout, "worker 0's output is shown"
    assert "fake worker 0 ends with 5" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_cannot_work_is_bad_input(place: Place) -> None:
    done = place.run("run", place.job(records=FOREVER, fail={"0": 78}))
    assert done.returncode == 2
    assert "fake worker 0 ends with 78" in done.stderr


@pytest.mark.parametrize("encoding", per_change(["utf-8", "ascii"], keep=["utf-8"]))
def test_a_terminal_shows_live_progress(place: Place, encoding: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", place.job(records=1600, pair_from=1)],
        cwd=place.path,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(place.path / "state"),
            "TERM": "xterm",
            "COLUMNS": "80",
            "PYTHONIOENCODING": encoding,
        },
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert process.wait(timeout=LIMIT) == 0
    bar = "━" if encoding == "utf-8" else "-"
    assert "the display has failed" not in shown.decode()
    for part in ("worker 1 joined", "samples/s", "training", "epoch 1 of 1", "succeeded", bar):
        assert part in shown.decode()


@pytest.mark.parametrize(
    ("number", "code"),
    per_change(
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], keep=[(signal.SIGTERM, 143)]
    ),
)
def test_a_signal_stops_the_job_and_leaves_nothing(place: Place, number: signal.Signals, code: int) -> None:
    process = place.start("run", place.job(records=FOREVER, child=True))
    place.training(2)
    pids = place.pids() + [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == code
    assert all(gone(pid) for pid in pids)
    assert "--resume" in err, f"the way on is shown: {place.status()}"
    assert {member["state"] for member in place.status()["server"]["members"]} == {"left"}
    assert place.status()["phase"] == "Suspended"


@pytest.mark.parametrize("module", ["argparse", "rich", "yaml"])
def test_an_interrupt_while_the_command_is_imported_is_a_sentence(place: Place, module: str) -> None:
    place.job()
    (place.path / f"{module}.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path('importing').touch()\n"
        "try:\n"
        "    while True:\n        time.sleep(0.01)\n"  # a signal just before one long sleep would not end it
        "except BaseException as error:\n    raise RuntimeError from error\n"
    )
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from elastic_ps.cli import main\nsys.exit(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "run", "job.yaml"], cwd=place.path, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            eventually((place.path / "importing").exists, "the module is being imported")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "stopped by SIGINT: nothing was started\n")


def test_a_second_interrupt_kills(place: Place) -> None:
    process = place.start("run", place.job(records=FOREVER, stubborn=True))
    place.training(2)
    pids = place.pids()
    process.send_signal(signal.SIGINT)
    eventually(lambda: place.status()["reason"] == "Stopped", "the job is being stopped")
    time.sleep(2 * AT_ONCE.total_seconds())  # as a person's second one, it does not come together with it
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "killing worker" in out + err
    assert "did not end within" not in out + err, "without waiting for those who do not listen"
    assert all(gone(pid) for pid in pids)


def test_only_a_repeated_signal_kills_and_never_the_end_of_the_terminal(place: Place) -> None:
    process = place.start("run", place.job(records=FOREVER, stubborn=True))
    place.training(2)
    pids = place.pids()
    process.send_signal(signal.SIGINT)
    eventually(lambda: place.status()["reason"] == "Stopped", "the job is being stopped")
    first = place.start("stop", "fake")
    assert first.stderr is not None
    assert "A second `elastic-ps stop` kills all of its processes" in first.stderr.readline()
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(2 * AT_ONCE.total_seconds())
    assert not any(gone(pid) for pid in pids)
    assert place.run("stop", "fake").returncode == 0
    assert all(gone(pid) for pid in pids)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 130


@pytest.mark.nightly
def test_signals_that_come_together_are_one(place: Place) -> None:
    """`timeout` sends SIGTERM to the command, and once more to its group."""
    process = place.start("run", place.job(records=FOREVER))
    place.training(2)
    process.send_signal(signal.SIGSTOP)  # both are there when it goes on
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
        process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode in (143, 129)
    assert "killing" not in out + err
    assert place.status()["phase"] == "Suspended"


def test_a_killed_launcher_leaves_nothing_and_its_name_is_free(place: Place) -> None:
    process = place.start("run", place.job(records=FOREVER))
    place.training(2)
    pids = place.pids()
    process.kill()
    process.communicate()
    eventually(lambda: all(gone(pid) for pid in pids), "the processes end with their launcher")
    shown = json.loads(place.run("status", "fake", "--json").stdout)
    assert (shown["phase"], shown["reason"]) == ("Failed", "LauncherLost")
    assert {process["state"] for process in shown["processes"]} == {"ended"}
    assert re.match(rf"the launcher \(pid {process.pid}\) is gone(;|$)", shown["message"])
    assert place.run("run", place.job(records=80)).returncode == 0


def test_a_detached_job_is_followed_scaled_and_stopped(place: Place) -> None:
    started = place.run("run", place.job(records=FOREVER), "--detach")
    assert started.returncode == 0, started.stderr
    assert "elastic-ps stop fake" in started.stdout
    before = place.training(2)
    assert "fake" in place.run("status").stdout
    shown = json.loads(place.run("status", "job.yaml", "--json").stdout)
    assert shown["phase"] == "Running"
    scaled = place.run("scale", "fake", "--workers", "3")
    assert (scaled.returncode, scaled.stdout) == (0, "fake: from 2 to 3 workers\n")
    after = place.training(3)
    assert {index: after[index] for index in (0, 1)} == before
    assert "worker 0 has" in place.run("logs", "fake", "--worker", "0").stdout
    refused = place.run("run", "job.yaml")
    assert refused.returncode == 2
    assert "already runs" in refused.stderr
    follower = place.start("logs", "fake", "-f")
    stopped = place.run("stop", "fake")
    assert stopped.returncode == 0
    assert "--resume" in stopped.stdout
    followed, _ = follower.communicate(timeout=LIMIT)
    assert "worker-2  | worker 2 has" in followed
    assert all(gone(pid) for pid in place.pids())
    assert place.run("stop", "fake").returncode == 0
    assert place.run("scale", "fake", "--workers", "1").returncode == 2


def test_a_detached_job_that_fails_to_start_says_so(place: Place) -> None:
    done = place.run("run", place.job(server_fails=True), "--detach")
    assert done.returncode == 1
    assert "the fake server cannot start" in done.stderr


def test_closing_the_output_stops_the_job(place: Place) -> None:
    process = place.start("run", place.job(records=FOREVER))
    place.training(2)
    pids = place.pids()
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.wait(timeout=LIMIT)
    assert process.returncode == 1
    assert all(gone(pid) for pid in pids)


def test_a_full_disk_with_the_output_stops_no_job(place: Place) -> None:
    done = place.run("run", place.job(records=2000), through=("sh", "-c", 'exec "$@" >/dev/full', "sh"))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert place.status()["phase"] == "Succeeded"


def test_a_failure_is_told_although_the_output_cannot_be_written(place: Place) -> None:
    done = place.run("run", place.job(server_fails=True), through=("sh", "-c", 'exec "$@" >/dev/full', "sh"))
    assert done.returncode == 1
    assert "error: job 'fake' failed" in done.stderr
    assert "the fake server cannot start" in done.stderr


def test_a_file_gets_no_live_display_whatever_the_environment_says(place: Place) -> None:
    done = place.run("run", place.job(records=400), through=("env", "FORCE_COLOR=1", "TTY_COMPATIBLE=1"))
    assert done.returncode == 0, done.stderr
    assert "\x1b[?25l" not in done.stdout, "the cursor is hidden"


@pytest.mark.nightly
def test_an_output_that_is_closed_from_the_start_is_not_written_to(place: Place) -> None:
    done = place.run("run", place.job(records=200), through=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_name_that_this_locale_cannot_encode_is_a_sentence(place: Place) -> None:
    (place.path / "schön.py").write_text("")
    variables = ("env", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0")
    done = place.run("run", "schön.py", through=variables)
    assert done.returncode == 2
    assert "this locale cannot encode" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_status_has_any_character_in_any_locale(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from elastic_ps.local.state import write_atomically\n"
        f"write_atomically(Path({str(tmp_path / 'status.json')!r}), 'f' + chr(252) + 'r')"
    )
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, check=True)
    assert (tmp_path / "status.json").read_bytes() == b"f\xc3\xbcr"


def test_resume_hands_the_directory_to_the_parameter_server(place: Place) -> None:
    place.run("run", place.job(records=80, spec={"parameterServer": {"checkpoint": {"path": "ckpt"}}}))
    again = place.run("run", "job.yaml")
    assert again.returncode == 2
    assert "--resume ckpt" in again.stderr
    assert place.run("run", "job.yaml", "--resume", "ckpt").returncode == 0
    assert f"serving require None {place.path}/ckpt" in place.run("logs", "fake", "--ps", "0").stdout


BAD_INPUT = {
    "no such file": (["run", "other.yaml"], {}, "cannot read the job file other.yaml"),
    "unknown field": (["run", "job.yaml"], {"wroker": {}}, "did you mean 'worker'?"),
    "replicas": (["run", "job.yaml"], {"worker": {"replicas": 0}}, "replicas"),
    "workers": (["run", "job.yaml", "--workers", "9"], {"worker": {"maxReplicas": 4}}, "maxReplicas 4"),
    "scale": (["run", "job.yaml", "--scale", "5:9"], {"worker": {"maxReplicas": 4}}, "--scale 5:9"),
    "scale twice": (["run", "job.yaml", "--scale", "5:1", "--scale", "5:2"], {}, "version 5 twice"),
    "scale of fixed shares": (
        ["run", "job.yaml", "--scale", "5:3"],
        {"consistency": {"deterministic": True}},
        "--scale 5:3: worker.replicas cannot change with consistency.deterministic",
    ),
    "output": (["run", "job.yaml", "--output", "worker"], {}, "try worker-0, all or none"),
    "set": (["run", "job.yaml", "--set", "worker.replica=2"], {}, "did you mean 'replicas'?"),
    "scale syntax": (["run", "job.yaml", "--scale", "5"], {}, "VERSION:N"),
    "workers syntax": (["run", "job.yaml", "--workers", "0"], {}, "not a number of workers"),
    "processes syntax": (["run", "job.yaml", "--processes", "0"], {}, "not a number of processes"),
    "ps syntax": (["run", "job.yaml", "--ps", "0"], {}, "not a number of parameter servers"),
    "ps": (["run", "job.yaml", "--ps", "2"], {"strategy": "all-reduce"}, "--ps 2"),
    "no module": (["run", "job.yaml"], {"entrypoint": "nowhere:main"}, "No module named 'nowhere'"),
    "broken script": (["run", "job.yaml"], {"entrypoint": "broken:main"}, "division by zero"),
    "report": (["run", "job.yaml", "--report", "script.py/out"], {}, "--report: cannot write"),
    "trace": (["run", "job.yaml", "--trace", "script.py/t.json"], {}, "--trace: cannot write"),
    "trace directory": (["run", "job.yaml", "--trace", "."], {}, "is a directory"),
    "resume": (["run", "job.yaml", "--resume", "."], {}, "no complete checkpoint"),
    "resume a file": (
        ["run", "job.yaml", "--resume", "job.yaml"],
        {},
        "this is a file; expected",
    ),
    "resume nowhere": (["run", "job.yaml", "--resume", "nowhere"], {}, "no such directory"),
    "unknown job": (["status", "nobody"], {}, "no job 'nobody' on this machine; no job has run yet"),
    "empty file": (["run", os.devnull], {}, "got nothing: it is empty"),
    "a file for a directory": (["drill", "job.yaml", "--report", "script.py"], {}, "it is not a directory"),
    "nothing to export": (["export", "nowhere", "out.pt"], {}, "nowhere: there is no such directory"),
    "a file to export": (["export", "job.yaml", "out.pt"], {}, "job.yaml: there is no such directory"),
    "a script to drill": (["drill", "script.py"], {}, "script.py is a script"),
    "other histories": (["drill", "job.yaml", "--report", "."], {}, "it is not from a drill"),
    "unknown job to stop": (["stop", "nobody"], {}, "no job 'nobody'"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_starts_nothing(place: Place, elastic_ps_here: Here, case: str) -> None:
    arguments, spec, message = BAD_INPUT[case]
    (place.path / "broken.py").write_text("1 / 0\n")
    (place.path / "history").mkdir()
    place.job(spec=spec, records=8)
    done = elastic_ps_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not place.state.exists()
    if case != "broken script" and case != "no module":
        assert "Traceback" not in done.stderr
