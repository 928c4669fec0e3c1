"""`mpirun -n N elastic-ps run`, with a real mpirun: the one beside this Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from elastic_ps.checkpoint.store import Store
from elastic_ps.contract import env
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.local import JobDirectory
from elastic_ps.local.state import LocalStatus
from tests.testing import mpirun
from tests.testing.polling import LIMIT, eventually

ROOT = Path(__file__).parents[2]


class Ranks:
    """Runs of a job under mpirun; whatever is left of them is killed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs: list[subprocess.Popen[str]] = []

    def job(self, **spec: Any) -> Path:
        """A job of one worker, if nothing else is said."""
        given = {"entrypoint": "tests.testing.scripts.steady:main", **spec}
        document = {
            "apiVersion": "elastic-ps.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "ranks"},
        }
        path = self.directory / "job.yaml"
        path.write_text(json.dumps({**document, "spec": {"worker": {"replicas": 1}, **given}}))
        return path

    def start(self, ranks: int, *arguments: object) -> subprocess.Popen[str]:
        """`mpirun -n ranks elastic-ps run arguments`."""
        return self.start_module(ranks, "elastic_ps.cli", "run", *arguments)

    def start_module(self, ranks: int, module: str, *arguments: object) -> subprocess.Popen[str]:
        """`mpirun -n ranks python -m module arguments`."""
        run = subprocess.Popen(
            mpirun.command(ranks, module, *arguments),
            env=mpirun.variables(self.directory),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._runs.append(run)
        return run

    def run(self, ranks: int, *arguments: object) -> tuple[int, str, str]:
        """Exit status, standard output and standard error, at the end."""
        run = self.start(ranks, *arguments)
        out, err = run.communicate(timeout=300)
        return run.returncode, out, err

    def status(self) -> LocalStatus | None:
        return JobDirectory("ranks", root=self.directory / "elastic-ps").read_status()

    def trains(self, version: int = 1) -> LocalStatus:
        """Wait until it does."""

        def look() -> LocalStatus | None:
            status = self.status()
            if status is None or status.phase != "Running" or status.server is None:
                return None
            return status if status.server.progress.version >= version else None

        found = eventually(look, "the job trains")
        assert found is not None
        return found

    def pids(self) -> dict[str, int]:
        status = self.status()
        assert status is not None
        return {f"{p.role}-{p.index}": p.pid for p in status.processes}

    def close(self) -> None:
        for run in self._runs:
            mpirun.end(run)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def slow(records: int) -> dict[str, Any]:
    return {"arguments": {"records": records, "widths": [6, 64, 64, 1], "seconds": 0.1, "hurry": "hurry"}}


def test_each_rank_but_the_first_is_a_worker_and_the_summary_is_printed_once(ranks: Ranks) -> None:
    job = ranks.job(arguments={"records": 400, "widths": [6, 16, 1]})
    code, out, err = ranks.run(3, job, "--report", ranks.directory)
    assert code == 0, err
    assert out.count("400 of 400 in the model") == 1
    assert "\x1b" not in out, "no live display"
    report = json.loads((ranks.directory / "run.json").read_text())
    assert (report["phase"], report["records_applied"]) == ("Succeeded", 400)
    assert sorted(worker["id"] for worker in report["workers"]) == [0, 1]


@pytest.mark.nightly
def test_what_is_trained_is_the_same_to_the_bit_as_without_mpi(ranks: Ranks) -> None:
    """With two parameter servers, of which the file says nothing. Also if MPI carries the gradients."""
    kept: list[dict[str, torch.Tensor]] = []
    for way in ("mpirun", "mpi", "alone"):
        path = ranks.directory / way
        job = ranks.job(
            arguments={"records": 200, "widths": [6, 64, 1]},
            consistency={"deterministic": True},
            worker={"replicas": 2},
            parameterServer={"bucketBytes": 1024, "checkpoint": {"path": str(path)}},
        )
        if way != "alone":
            transport = ["--transport", "mpi"] if way == "mpi" else []
            code, out, err = ranks.run(3, job, "--ps", 2, *transport)
            assert ("transport     mpi" in out) == (way == "mpi"), out
        else:
            command = [sys.executable, "-m", "elastic_ps.cli", "run", str(job), "--ps", "2"]
            done = subprocess.run(
                command, env=mpirun.variables(ranks.directory), capture_output=True, text=True, timeout=300
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        assert code == 0, err
        assert "200 of 200 in the model" in out
        assert {"ps-0", "ps-1"} <= ranks.pids().keys()
        store = Store(path)
        shards = sorted(store.path(store.versions()[-1]).glob("shard-*.safetensors"))
        assert len(shards) == 2
        kept.append(
            {f"{n} {name}": t for n, shard in enumerate(shards) for name, t in load_file(shard).items()}
        )
    alone = kept.pop()
    for each in kept:
        assert each.keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in each.items())


@pytest.mark.nightly
def test_a_worker_that_dies_is_started_again_on_its_rank_and_more_can_be_added(ranks: Ranks) -> None:
    run = ranks.start(3, ranks.job(worker={"replicas": 1, "maxReplicas": 3}, **slow(4000)))
    ranks.trains(3)
    first = ranks.pids()["worker-1"]
    parent = psutil.Process(first).parent()
    os.kill(first, signal.SIGKILL)
    second = eventually(
        lambda: (pid := ranks.pids().get("worker-1")) and pid != first and pid, "it is started again"
    )
    assert psutil.Process(second).parent() == parent, "by the rank"
    JobDirectory("ranks", root=ranks.directory / "elastic-ps").scale(3)
    eventually(lambda: "worker-2" in ranks.pids(), "a third worker")
    (ranks.directory / "hurry").touch()
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "4,000 of 4,000 in the model" in out


@pytest.mark.nightly
def test_through_mpi_a_worker_and_a_parameter_server_that_die_are_replaced_and_no_record_is_lost(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens on a port that another host could reach. MPI may allow one thread at a time only."""
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    checkpoint = {"interval": "200ms", "path": str(ranks.directory / "kept")}
    server = {"replicas": 2, "checkpoint": checkpoint}
    job = ranks.job(worker={"replicas": 2}, parameterServer=server, **slow(4000))
    history = ranks.directory / "history"
    run = ranks.start_module(3, "tests.testing.scripts.relayed", job, history)
    for name in ("worker-1", "ps-0", "worker-0", "ps-1"):
        status = ranks.trains(3)
        assert status.server is not None
        pid, version = ranks.pids()[name], status.server.progress.version
        listening = [at.laddr.ip for at in psutil.Process(ranks.pids()["ps-0"]).net_connections("tcp")]
        assert set(listening) <= {"127.0.0.1"}
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: ranks.pids().get(name, pid) != pid, f"{name} is started again")  # noqa: B023
        ranks.trains(version + 5)
    status = ranks.trains()
    assert status.server is not None
    assert {member.transport for member in status.server.members} == {"mpi"}
    (ranks.directory / "hurry").touch()
    out, err = run.communicate(timeout=LIMIT)
    assert (run.returncode, out) == (0, "Succeeded\n"), err
    assert check(read(history), Data(4000, 1)) == []


@pytest.mark.nightly
def test_what_ends_mpirun_ends_everything_and_the_job_goes_on_with_resume(ranks: Ranks) -> None:
    job = ranks.job(
        parameterServer={"checkpoint": {"interval": "200ms", "path": str(ranks.directory / "kept")}},
        **slow(800),
    )
    run = ranks.start(3, job)
    status = ranks.trains(5)
    eventually(lambda: list((ranks.directory / "kept").glob("version-*/manifest.json")), "a checkpoint")
    agent = psutil.Process(ranks.pids()["worker-0"]).parent()
    assert agent is not None
    agent.kill()
    run.communicate(timeout=LIMIT)
    assert run.returncode != 0
    eventually(lambda: not any(psutil.pid_exists(p.pid) for p in status.processes), "nothing is left")
    (ranks.directory / "hurry").touch()
    code, out, err = ranks.run(2, job, "--resume", ranks.directory / "kept")
    assert code == 0, err
    assert "800 of 800 in the model" in out


@pytest.mark.nightly
def test_a_script_that_uses_mpi_itself_is_alone_there(ranks: Ranks) -> None:
    (ranks.directory / "alone.py").write_text(
        "from mpi4py import MPI\n"
        "from tests.testing.scripts.steady import main as train\n"
        "def main(**arguments):\n"
        "    assert MPI.COMM_WORLD.Get_size() == 1\n"
        "    train(**arguments)\n"
    )
    arguments = {"records": 40, "widths": [6, 16, 1]}
    run = ranks.start(2, ranks.job(entrypoint="alone:main", arguments=arguments))
    out, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, err
    assert "40 of 40 in the model" in out


@pytest.mark.nightly
def test_a_rank_that_fails_ends_all_ranks(ranks: Ranks) -> None:
    module = "tests.testing.scripts.failing_rank"
    run = ranks.start_module(3, module, "run", ranks.job(**slow(2000)))
    status = ranks.trains()
    os.kill(ranks.pids()["worker-0"], signal.SIGKILL)
    _, err = run.communicate(timeout=LIMIT)
    assert run.returncode != 0
    assert "this rank fails" in err
    eventually(lambda: not any(psutil.pid_exists(p.pid) for p in status.processes), "nothing is left")


def test_an_order_and_an_answer_that_are_both_large_do_not_wait_for_each_other(ranks: Ranks) -> None:
    run = ranks.start_module(2, "tests.testing.scripts.orders")
    out, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, err
    assert out == "closed\n"


@pytest.mark.nightly
def test_a_job_that_is_wrong_ends_all_ranks_with_a_sentence(ranks: Ranks) -> None:
    code, _, err = ranks.run(2, ranks.job(entrypoint="nowhere:main"))
    assert code == 2, err
    assert "nowhere" in err
    code, _, err = ranks.run(3, ranks.job(worker={"replicas": 1, "maxReplicas": 1}))
    assert code == 2
    assert re.search(r"--workers: .*2.*1", err), err
    code, _, err = ranks.run(2, ranks.job(strategy="all-reduce"), "--transport", "mpi")
    assert code == 2
    assert "--transport mpi: with strategy all-reduce" in err
    for option in ("--detach", "--bind"):
        code, _, err = ranks.run(2, ranks.job(), option)
        assert code == 2
        assert f"{option} is not possible under mpirun" in err


@pytest.mark.parametrize("ranks_given", [0, 1])
def test_without_ranks_nothing_can_travel_through_mpi(ranks: Ranks, ranks_given: int) -> None:
    if ranks_given:
        code, _, err = ranks.run(1, ranks.job(), "--transport", "mpi")
    else:
        command = [sys.executable, "-m", "elastic_ps.cli", "run", str(ranks.job()), "--transport", "mpi"]
        environment = mpirun.variables(ranks.directory)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        code, err = done.returncode, done.stderr
    assert code == 2
    assert "--transport mpi needs other ranks, which relay the calls. Start the job with mpirun" in err
    assert ranks.status() is None, "nothing was started"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "0", "SLURM_NTASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "1"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_NTASKS": "1"}, True),
    ],
)
def test_a_process_knows_whether_it_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in (*env.RANKS, *env.SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.started_by_mpirun() is expected


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "raise ImportError('libmpi.so: no such file')",
            "MPI cannot be used: libmpi.so: no such file. Install mpi4py for this Python",
        ),
        (
            "class MPI:\n    THREAD_SERIALIZED = 2\n    Query_thread = staticmethod(lambda: 1)\n",
            "the MPI library was built without threads; elastic-ps needs at least MPI_THREAD_SERIALIZED",
        ),
    ],
    ids=["no library", "no threads"],
)
def test_where_mpi_cannot_be_used_a_sentence_says_why(tmp_path: Path, module: str, said: str) -> None:
    (tmp_path / "mpi4py.py").write_text(module)
    done = subprocess.run(
        [sys.executable, "-m", "elastic_ps.cli", "run", "job.yaml"],
        env={**os.environ, "PMIX_RANK": "0", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
