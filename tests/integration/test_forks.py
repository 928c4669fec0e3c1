"""The processes of a local job are forks of one that has imported torch, and as good as others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.contract import exits
from elastic_ps.drill.history import check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import UserError
from elastic_ps.local import Launcher, Options, Programs, preflight
from elastic_ps.local.forks import ForkServer
from tests.testing import launching
from tests.testing.forked import forked
from tests.testing.launching import gone, version_of, wait_for_workers
from tests.testing.polling import LIMIT, eventually


def job(name: str = "forks", **spec: Any) -> TrainingJob:
    described = {
        "entrypoint": "tests.testing.scripts.steady:main",
        "arguments": {"records": 1_000_000, "seconds": 0.02},
        "worker": {"replicas": 2},
        "parameterServer": {"checkpoint": {"everyVersions": 1}},
    }
    document = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {**described, **spec},
    }
    return parse_job(document, source="test")


def servers() -> list[psutil.Process]:
    """The fork servers of this process, but for the one that tests share."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # an earlier test's, which has ended
            if each.pid != launching.forks().pid and each.cmdline()[1:3] == ["-m", "elastic_ps.forkserver"]:
                found.append(each)
    return found


def alive(launcher: Launcher, role: str, index: int) -> int | None:
    """The process of a role that does its work now."""
    for process in launcher.status().processes:
        if (process.role, process.index) == (role, index) and process.state not in ("ended", "starting"):
            return process.pid
    return None


def both_train(launcher: Launcher) -> None:
    wait_for_workers(launcher, lambda workers: len(workers) == 2, "both workers train")


def test_a_script_is_tried_although_no_temporary_file_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    preflight.check_entrypoint(job(), Programs(), launching.forks())
    with pytest.raises(UserError, match="no_such_module"):
        preflight.check_entrypoint(job(entrypoint="no_such_module:main"), Programs(), launching.forks())


@pytest.mark.nightly
def test_a_process_that_is_killed_is_replaced_by_a_fork(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    with Launcher(job(), Options(root=tmp_path, history=history)) as launcher:
        launcher.start()
        both_train(launcher)
        [server] = servers()
        for role, index in (("worker", 1), ("ps", 0)):
            killed = eventually(lambda r=role, i=index: alive(launcher, r, i), "it works")  # type: ignore[misc]
            os.kill(killed, signal.SIGKILL)
            eventually(
                lambda r=role, i=index, k=killed: alive(launcher, r, i) not in (None, k),  # type: ignore[misc]
                "another one takes its place",
            )
            pid = alive(launcher, role, index)
            assert pid is not None
            assert psutil.Process(pid).ppid() == server.pid
            assert psutil.Process(pid).name() == f"{role}-{index}"
        both_train(launcher)
        launcher.stop("enough")
        launcher.wait()
    assert not servers()
    assert check(read(history), None) == []


@pytest.mark.nightly
def test_when_the_fork_server_dies_its_processes_end_and_others_take_their_places(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    with Launcher(job(), Options(root=tmp_path, history=history)) as launcher:
        launcher.start()
        both_train(launcher)
        before = [process.pid for process in launcher.status().processes]
        [server] = servers()
        server.kill()
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in before), "all of them end")
        eventually(lambda: alive(launcher, "ps", 0), "the parameter server is started by itself")
        both_train(launcher)
        launcher.stop("enough")
        launcher.wait()
    assert check(read(history), None) == []


def test_a_signal_that_all_processes_get_leaves_time_for_a_last_checkpoint(tmp_path: Path) -> None:
    """A system that ends a session or a service sends SIGTERM, and SIGHUP, to every process of it."""
    rare = job(parameterServer={"checkpoint": {"interval": "1h"}})
    with Launcher(rare, Options(root=tmp_path)) as launcher:
        launcher.start()
        both_train(launcher)
        eventually(lambda: version_of(launcher) > 2, "some versions")
        [server] = servers()
        launcher.stop("the machine shuts down")
        for pid in [server.pid, *(process.pid for process in launcher.status().processes)]:
            for number in (signal.SIGTERM, signal.SIGHUP):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        launcher.wait()
        outcome = launcher.outcome()
    assert outcome.verdict.reason == "Stopped"
    assert max(int(path.name[8:]) for path in launcher.checkpoints.glob("version-*")) > 2
    assert not servers()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer({**os.environ, "OMP_NUM_THREADS": "1"})
    yield server
    server.close()


PROBE = """
import json, os, random, sys
import numpy, torch
print(json.dumps({
    "numbers": [random.random(), float(numpy.random.random()), torch.rand(()).item()],
    "threads": torch.get_num_threads(),
    "variable": os.environ.get("PROBED"), "inherited": "HOME" in os.environ,
    "directory": os.getcwd(), "arguments": sys.argv[1:], "session": os.getsid(0) == os.getpid(),
    "descriptors": len(os.listdir("/proc/self/fd")) - 1,
}))
def main(): pass
"""


class Run:
    """A check of a job, which imports its entrypoint."""

    def __init__(
        self, forks: ForkServer, entrypoint: str, variables: Mapping[str, str], *, directory: Path
    ) -> None:
        self.forks = forks
        self.out = tempfile.TemporaryFile()  # noqa: SIM115 (`ended` closes it)
        self.err = tempfile.TemporaryFile()  # noqa: SIM115
        argv: Sequence[str] = Programs().check(job(entrypoint=entrypoint, arguments={}).spec)
        before = Path.cwd()
        os.chdir(directory)
        try:
            descriptors = {self.out.fileno(): (1,), self.err.fileno(): (2,)}
            pid = forks.start(argv, variables=variables, descriptors=descriptors, name="probe")
        finally:
            os.chdir(before)
        assert pid is not None
        self.pid = pid

    def ended(self) -> tuple[int, str, str]:
        """Its exit status, and what it wrote."""
        statuses: list[int | None] = []

        def over() -> bool:
            statuses.append(self.forks.status(self.pid))
            return statuses[-1] is not None

        eventually(over, "it ends")
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        assert statuses[-1] is not None
        return statuses[-1], *texts  # type: ignore[return-value]


def test_a_fork_is_like_a_process_that_was_started_by_itself(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    found = []
    for threads in ("1", "3"):
        variables = {"PROBED": threads, "OMP_NUM_THREADS": threads}
        status, out, err = Run(forks, "probe:main", variables, directory=tmp_path).ended()
        assert (status, err) == (0, "")
        found.append(json.loads(out))
    one, other = found
    assert not set(one["numbers"]) & set(other["numbers"])
    assert [each["threads"] for each in found] == [1, 3]
    assert [each["variable"] for each in found] == ["1", "3"]
    for each in found:
        assert (each["inherited"], each["directory"]) == (False, str(tmp_path))
        assert (each["arguments"], each["session"]) == ([], True), "those of a check are its own"
        assert each["descriptors"] == 3


def test_what_it_writes_and_its_exit_status_arrive(forks: ForkServer, tmp_path: Path) -> None:
    status, _, err = Run(forks, "nowhere:main", dict(os.environ), directory=tmp_path).ended()
    assert status == exits.INVALID
    assert "nowhere" in err


def test_it_is_ended_with_what_it_has_started(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    for number, group in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        run = Run(forks, "sleeps:main", dict(os.environ), directory=tmp_path)

        def started(run: Run = run) -> int:
            return int(os.pread(run.out.fileno(), 100, 0) or 0)

        child = eventually(started, "it starts a process")
        forks.signal(run.pid, number, group=group)
        assert run.ended()[0] == -number
        eventually(lambda child=child: not psutil.pid_exists(child), "that ends, too")  # type: ignore[misc]


def test_a_script_may_close_its_outputs(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "closes.py").write_text(
        "import sys\nsys.stdout.close()\nsys.stderr = None\ndef main(): pass\n"
    )
    assert Run(forks, "closes:main", dict(os.environ), directory=tmp_path).ended() == (0, "", "")


def test_what_is_logged_after_a_script_has_closed_stderr_fails_nothing() -> None:
    code = (
        "import logging, sys\nfrom elastic_ps.process import lifecycle\n"
        "lifecycle.log_as('worker-0')\nsys.stderr.close()\n"
        "logging.getLogger('elastic_ps').warning('joins again')\nprint('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("goes on\n", "")


ENDS = """
import atexit, logging

def registered():
    import torch
    print(torch.ones(2).sum().item())

class Handler(logging.Handler):
    def close(self):
        import json
        print(json.dumps("closed"))

handler = Handler()
atexit.register(registered)
def main(): pass
"""


def test_its_end_copies_only_a_part_of_the_shared_memory(forks: ForkServer, tmp_path: Path) -> None:
    def new_memory() -> int:
        """The bytes that the forks which have ended had copied or allocated."""
        faults = Path(f"/proc/{forks.pid}/stat").read_text().rpartition(")")[2].split()[8]
        return int(faults) * os.sysconf("SC_PAGE_SIZE")

    (tmp_path / "ends.py").write_text(ENDS)
    assert forks.ready(timedelta(seconds=LIMIT))
    before, shared = new_memory(), psutil.Process(forks.pid).memory_full_info().uss
    ended = Run(forks, "ends:main", dict(os.environ), directory=tmp_path).ended()
    assert ended == (0, '2.0\n"closed"\n', "")
    assert new_memory() - before < shared / 2


def test_what_it_cannot_start_is_left_to_others(forks: ForkServer) -> None:
    for argv in (
        [sys.executable, "-c", "pass"],
        [sys.executable, "-m", "http.server"],
        [sys.executable],
        ["/bin/true", "-m", "elastic_ps.worker"],
        [sys.executable, "-m", "elastic_ps.worker", "x" * 2_000_000],
    ):
        assert forks.start(argv, variables={}, descriptors={}, name="other") is None
        assert psutil.Process(forks.pid).status() != psutil.STATUS_ZOMBIE, "it goes on"


SCARCE = """
import os

def fork(fork=os.fork):
    os.fork = fork
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = fork
"""
"""Python runs it at its start as `sitecustomize`: the system gives no process, once."""


def test_when_the_system_gives_no_process_the_fork_server_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SCARCE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    server = ForkServer({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    with contextlib.closing(server):
        argv = [sys.executable, "-m", "elastic_ps.worker"]
        assert server.start(argv, variables={}, descriptors={}, name="first") is None, (
            "it is started otherwise"
        )
        pid = server.start(argv, variables={}, descriptors={}, name="second")
        assert pid is not None
        eventually(lambda: server.status(pid) is not None, "a worker without its variables ends")


def test_without_its_process_it_starts_nothing() -> None:
    server = ForkServer(dict(os.environ))
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: server.ready(timedelta(0)), "nobody waits for it")
    argv = [sys.executable, "-m", "elastic_ps.worker"]
    assert server.start(argv, variables={}, descriptors={}, name="worker") is None
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_a_detached_job_keeps_its_fork_server(tmp_path: Path) -> None:
    """The command in the foreground ends, and leaves it to the launcher in the background."""
    document = job("detached").model_dump(mode="json", by_alias=True, exclude_defaults=True)
    (tmp_path / "job.json").write_text(json.dumps(document))
    status = tmp_path / "elastic-ps" / "detached" / "status.json"

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "elastic_ps.cli", *arguments]
        variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("run", "--detach", str(tmp_path / "job.json"))
    try:
        pids = [process["pid"] for process in json.loads(status.read_text())["processes"]]
        parents = {psutil.Process(pid).parent() for pid in pids}
        assert [each.cmdline()[2] for each in parents if each] == ["elastic_ps.forkserver"]
    finally:
        run("stop", "detached")
    eventually(lambda: not any(each and each.is_running() for each in parents), "it ends with the job")


@pytest.mark.parametrize("meanwhile", [contextlib.nullcontext, forked])
def test_what_it_has_started_ends_with_it(
    tmp_path: Path, meanwhile: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """A check has no lifeline: it shall not outlive a launcher that is killed.

    A process that was forked has the launcher's side of the socket, too.
    """
    (tmp_path / "waits.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(1000)\n")
    server = ForkServer(dict(os.environ))
    run = Run(server, "waits:main", dict(os.environ), directory=tmp_path)
    eventually(lambda: os.pread(run.out.fileno(), 100, 0), "it is imported")
    with meanwhile():
        server.close()
        run.out.close()
        run.err.close()
        eventually(lambda: not psutil.pid_exists(run.pid), "it ends", within=30)


@pytest.mark.parametrize("threads", ["3,2", "0", "many"])
def test_numbers_of_threads_are_read_as_by_a_fresh_process(
    forks: ForkServer, tmp_path: Path, threads: str
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    variables = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": threads}
    status, out, err = Run(forks, "probe:main", variables, directory=tmp_path).ended()
    assert (status, err) == (0, "")
    if threads == "3,2":
        assert json.loads(out)["threads"] == 3


def test_the_directory_may_be_gone(forks: ForkServer, tmp_path: Path) -> None:
    """A program that is started without the fork server begins in the directory that was removed, too."""
    (tmp_path / "removed").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    try:
        argv = [sys.executable, "-m", "elastic_ps.worker"]
        assert forks.start(argv, variables={}, descriptors={}, name="worker") is None
    finally:
        os.chdir(before)


def test_nobody_waits_for_its_imports_to_end_it(tmp_path: Path) -> None:
    """As after a Ctrl-C while they go on."""
    code = "import pathlib, time\ntime.sleep(8)\npathlib.Path(__file__).with_name('imported').touch()\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ForkServer({**os.environ, "PYTHONPATH": path}).close()
    assert not (tmp_path / "imported").exists()


def test_it_does_not_go_on_importing_for_a_launcher_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(1000)\n"
    )
    code = (
        "import os, sys, time\nfrom elastic_ps.local.forks import ForkServer\n"
        "path = os.pathsep.join([sys.argv[1], *sys.path])\n"
        "forks = ForkServer({**os.environ, 'PYTHONPATH': path})\n"
        "print(forks.pid, flush=True)\ntime.sleep(1000)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        try:
            eventually((tmp_path / "importing").exists, "it imports")
            launcher.kill()
            eventually(lambda: gone(pid), "it ends", within=30)
        finally:
            launcher.kill()
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
