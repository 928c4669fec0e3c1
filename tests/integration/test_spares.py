"""A process that waits takes the place of one that is killed, and the job goes on as always."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elastic_ps.drill.history import check
from elastic_ps.drill.recorded import read
from elastic_ps.job import TrainingJob, parse_job
from elastic_ps.local import Launcher, Options
from tests.integration.launching import wait_for_workers
from tests.polling import eventually


def spares() -> set[int]:
    """The processes that wait, and were started here."""
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            program = (each / "cmdline").read_bytes().split(b"\0")[1:3]
        except OSError:
            continue
        if parent == os.getpid() and program == [b"-m", b"elastic_ps.spare"]:
            found.add(int(each.name))
    return found


def make_job() -> TrainingJob:
    return parse_job(
        {
            "apiVersion": "elastic-ps.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "spares"},
            "spec": {
                "entrypoint": "tests.integration.scripts.steady:main",
                "arguments": {"records": 1_000_000, "seconds": 0.02},
                "worker": {"replicas": 2},
                "parameterServer": {"checkpoint": {"everyVersions": 1}},
            },
        },
        source="test",
    )


def alive(launcher: Launcher, role: str, index: int) -> int | None:
    """The process of a role that runs now."""
    for process in launcher.status().processes:
        if (process.role, process.index) == (role, index) and process.state not in ("ended", "starting"):
            return process.pid
    return None


def replaced(launcher: Launcher, role: str, index: int, waiting: int) -> bool:
    """Whether the process that has waited trains now, or serves."""
    return alive(launcher, role, index) == waiting


def test_a_worker_and_a_parameter_server_are_replaced_by_spares(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    with Launcher(make_job(), Options(root=tmp_path, history=history, spares=1)) as launcher:
        launcher.start()
        wait_for_workers(launcher, lambda workers: len(workers) == 2, "both workers train")
        for role, index in (("worker", 1), ("ps", 0), ("worker", 1)):
            busy = {process.pid for process in launcher.status().processes}
            [waiting] = eventually(lambda busy=busy: spares() - busy, "a spare process waits")  # type: ignore[misc]
            log = launcher.directory.log(role, index)  # type: ignore[arg-type]
            before = log.stat().st_size
            killed = eventually(lambda r=role, i=index: alive(launcher, r, i), "it works")  # type: ignore[misc]
            os.kill(killed, signal.SIGKILL)
            eventually(lambda r=role, i=index, w=waiting: replaced(launcher, r, i, w), "it is replaced")  # type: ignore[misc]
            assert role == "worker" or log.stat().st_size > before, (
                "its output goes where that of the one before went"
            )
        launcher.stop("enough")
        launcher.wait()
    assert not spares()
    assert check(read(history), None) == []


def test_a_spare_that_was_killed_is_replaced_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with Launcher(make_job(), Options(root=tmp_path, spares=1)) as launcher:
        launcher.start()
        wait_for_workers(launcher, lambda workers: len(workers) == 2, "both workers train")
        [first] = eventually(spares, "a spare process waits")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: spares() - {first}, "another one waits")
        launcher.stop("enough")
        launcher.wait()
    assert not spares()
