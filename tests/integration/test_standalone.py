"""A script that nobody started as part of a job, and a plain script as a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from elastic_ps.contract import env
from tests.testing.launching import Here

ROOT = Path(__file__).resolve().parents[2]

DIGITS = """
import functools, sys
import torch
from examples.digits import train

def main(epochs, out):
    models = []
    lenet, connect = train.LeNet, train.elastic_ps.connect
    train.LeNet = lambda **options: models.append(lenet(**options)) or models[0]
    train.elastic_ps.connect = functools.partial(connect, "job.yaml")
    train.main(epochs=epochs)
    torch.save(models[0].state_dict(), out)

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""

PLAIN = """
import json, os, sys
from pathlib import Path
import torch
import elastic_ps
import beside

assert beside.__file__ == str(Path(__file__).with_name("beside.py"))
session = elastic_ps.connect()
model = torch.nn.Linear(3, 1)
optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=float(sys.argv[2])), model)
data = torch.utils.data.TensorDataset(torch.ones(24, 3), torch.ones(24, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)
left_open = open(f"read-{session.worker}", "w")
def read(batch): left_open.write("*" * len(batch))
records = 0
for x, y in session.loader(loader, epochs=2):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    records += len(x)
    read(x)
print(json.dumps([__name__, sys.argv, records, session.version, session.is_chief]))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **env.inherited(),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "XDG_STATE_HOME": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, text=True, capture_output=True, timeout=300
    )


def logs(folder: Path, job: str) -> list[str]:
    return [
        path.read_text() for path in sorted((folder / "state/elastic-ps" / job / "logs").glob("worker-*"))
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "compare.py").write_text(DIGITS)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "beside.py").write_text("")
    return tmp_path


def write_job(folder: Path, **spec: Any) -> None:
    document = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "compare"},
        "spec": {"entrypoint": "compare:main", **spec},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.nightly
def test_a_script_alone_trains_what_a_job_with_one_worker_trains(folder: Path) -> None:
    write_job(
        folder,
        arguments={"epochs": 2, "out": "job.pt"},
        parameterServer={"replicas": 2},
        consistency={"deterministic": True},
        data={"seed": 3, "shardRecords": 100},
    )
    job = run(folder, "-m", "elastic_ps.cli", "run", "job.yaml")
    assert job.returncode == 0, job.stdout + job.stderr
    alone = run(folder, "compare.py", "2", "alone.pt")
    assert alone.returncode == 0, alone.stderr
    assert "trains alone: one worker, no checkpoints" in alone.stderr
    theirs, ours = torch.load(folder / "job.pt"), torch.load(folder / "alone.pt")
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), name


def test_a_plain_script_runs_as_a_job_with_its_own_command_line(folder: Path) -> None:
    done = run(folder, "-m", "elastic_ps.cli", "run", "plain.py", "--workers", "2", "--", "--lr", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for log in logs(folder, "plain") for line in log.splitlines() if line.startswith("[")]
    seen = [yaml.safe_load(line) for line in told]
    assert [name for name, *_ in seen] == ["__main__", "__main__"]
    assert {tuple(argv) for _, argv, *_ in seen} == {(str(folder / "plain.py"), "--lr", "0.01")}
    assert sum(records for _, _, records, *_ in seen) == 48
    assert sorted(chief for *_, chief in seen) == [False, True]
    assert sum(file.stat().st_size for file in folder.glob("read-*")) == 48, "written as the processes end"
    status = run(folder, "-m", "elastic_ps.cli", "status", "plain.py")
    assert "Succeeded" in status.stdout


def test_the_same_script_runs_alone(folder: Path) -> None:
    done = run(folder, "plain.py", "--lr", "0.01")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == ["__main__", ["plain.py", "--lr", "0.01"], 48, 12, True]


def test_a_session_that_cannot_be_made_leaves_nothing_to_close(folder: Path) -> None:
    write_job(folder, compression={"codec": "nowhere:Codec"})
    (folder / "wrong.py").write_text("import elastic_ps\nelastic_ps.connect('job.yaml')\n")
    done = run(folder, "wrong.py")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "atexit" not in done.stderr


CELLS = """
import gc, weakref
import torch
import elastic_ps

def cell():
    session, model = elastic_ps.connect(), torch.nn.Linear(3, 1)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for x, y in session.loader(torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), 4):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [weakref.ref(each) for each in (session, model, optimizer)]

first, second = cell(), cell()
gc.collect()
print([each() is not None for each in first + second])
"""


@pytest.mark.nightly
def test_a_cell_that_runs_again_does_not_keep_the_model_before(folder: Path) -> None:
    (folder / "cells.py").write_text(CELLS)
    done = run(folder, "cells.py")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plain.txt"], "cannot read the job file"),
        (["missing.py"], "cannot read the script missing.py: No such file"),
        (["broken.py"], "the script broken.py is not Python: '(' was never closed"),
        (["script.py", "--set", "arguments.lr=1"], "Give a script its arguments after --"),
        (["job.yaml", "--", "--lr", "1"], "job.yaml is not one; put --lr 1 into its spec.arguments"),
        (
            ["job.yaml"],
            "spec.arguments do not fit the entrypoint main(epochs, out): missing a required argument",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    folder: Path, elastic_ps_here: Here, monkeypatch: pytest.MonkeyPatch, command: list[str], said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "broken.py").write_text("print(\n")
    (folder / "script.py").touch()
    write_job(folder, arguments={"epochs": 1})
    done = elastic_ps_here("run", *command, programs=None)
    assert done.returncode == 2
    assert said in done.stderr
    assert not list((folder / "state").rglob("logs"))


def test_an_argument_of_the_script_without_dashes_is_told_where_it_belongs(
    folder: Path, elastic_ps_here: Here
) -> None:
    done = elastic_ps_here("run", "plain.py", "--workers", "2", "--lr", "0.1")
    assert done.returncode == 2
    assert (
        "unrecognized arguments: --lr 0.1. Arguments of the script follow --: plain.py -- --lr 0.1"
        in done.stderr
    )
    done = elastic_ps_here("run", "job.yaml", "--lr", "0.1")
    assert done.stderr.startswith("error: unrecognized arguments: --lr 0.1\n")


def test_arguments_after_dashes_belong_to_run(folder: Path, elastic_ps_here: Here) -> None:
    done = elastic_ps_here("stop", "plain.py", "--", "1")
    assert done.returncode == 2
    assert "only `elastic-ps run` takes arguments after --" in done.stderr
