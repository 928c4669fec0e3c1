"""`elastic-ps train`: a network of the zoo, without a job file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from elastic_ps import load_checkpoint
from elastic_ps.api.job import parse_job
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.contrib.zoo.scores import evaluate
from tests.testing import mpirun
from tests.testing.datafiles import write_cifar10, write_mnist
from tests.testing.launching import Here

LIMIT = 300
"""Seconds that a program may take; it only ends a test that has failed."""


def command(directory: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a directory, with the jobs' state below it."""
    return subprocess.run(
        [str(each) for each in argv],
        cwd=directory,
        env={
            **mpirun.variables(directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def elastic_ps(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return command(directory, sys.executable, "-m", "elastic_ps.cli", *arguments)


def test_a_network_is_trained_and_what_is_left_is_plain_torch(tmp_path: Path) -> None:
    flags = (
        "--network lenet --dataset Digits --lr 0.1 --momentum 0.9 --batch-size 32 --epochs 2 --num-workers 2"
    )
    done = elastic_ps(
        tmp_path,
        *("train", *flags.split(), "--train-dir", "kept", "--eval-freq", 25, "--evaluate", "--report", "out"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["records_applied"] == 2 * 1437
    assert report["metrics"]["prec@5"] >= report["metrics"]["prec@1"]
    last = report["evaluations"][-1]
    assert last["version"] == report["version"]
    assert last["metrics"]["prec@1"] == pytest.approx(report["metrics"]["prec@1"])
    for name in ("test loss", "prec@1", "prec@5"):
        assert name in done.stdout
    model = LeNet(size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
    version = load_checkpoint(tmp_path / "kept", model, optimizer)
    assert version == report["version"]
    scores = evaluate(model, digits()[1], batch_size=100)
    assert scores.prec1 == pytest.approx(report["metrics"]["prec@1"])
    assert scores.loss == pytest.approx(report["metrics"]["test_loss"], rel=1e-4)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_more_steps_of_a_run_that_has_ended_need_more_epochs(tmp_path: Path) -> None:
    train = ("train", "--network", "lenet", "--dataset", "digits", "--epochs", 1)
    done = elastic_ps(tmp_path, *train, "--max-steps", 2, "--train-dir", "kept")
    assert done.returncode == 0, done.stderr
    done = elastic_ps(tmp_path, *train, "--max-steps", 4, "--resume", "kept")
    assert done.returncode == 2
    assert "the earlier run was ended at step 2, so this one made no step. Raise --epochs, too" in done.stderr
    done = elastic_ps(tmp_path, *train[:-1], 2, "--max-steps", 4, "--resume", "kept", "--report", "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["version"] == 4


PS_PYTORCH = """
--lr=0.1 --momentum=0.9 --max-steps=4 --epochs=100 --network=ResNet32 --dataset=Cifar10 --batch-size=5
--comm-type=Bcast --num-aggregate=2 --mode=normal --kill-threshold=6.8 --eval-freq=2 --compress-grad=compress
--enable-gpu= --train-dir=output/models/
"""
"""The flags of ps_pytorch's own script, with a smaller network, fewer steps, and as many workers as ranks."""


@pytest.mark.nightly
def test_a_command_line_of_ps_pytorch_runs_with_another_program(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar10_data")
    done = command(tmp_path, *mpirun.command(3, "elastic_ps.cli", "train", *PS_PYTORCH.split()))
    assert done.returncode == 0, done.stderr
    assert "4 steps are done, as --max-steps asks" in done.stdout
    for note in ("--comm-type changes", "--kill-threshold changes"):
        assert done.stderr.count(note) == 1
    assert "--compress-grad" not in done.stderr, "it is lossless: zstd"
    versions = [path.name for path in (tmp_path / "output" / "models").glob("version-*")]
    assert "version-0000000004" in versions
    status = json.loads((tmp_path / "state/elastic-ps/resnet32-cifar10/status.json").read_text())
    assert {member["worker"] for member in status["server"]["members"]} == {0, 1}
    assert "prec@5" in status["server"]["progress"]["metrics"]


ALONE: dict[str, tuple[dict[str, Any], float]] = {
    "GPT": (
        {
            "dataset": "text",
            "data_dir": "text.txt",
            "lr": 0.05,
            "momentum": 0.9,
            "batch_size": 2,
            "epochs": 8,
        },
        50,
    ),
    "LeNet": ({"dataset": "MNIST", "lr": 0.02, "momentum": 0.8, "batch_size": 10, "epochs": 40}, 80),
}
"""Arguments, and the lowest prec@1. A GPT that has only learnt which bytes there are comes to 10."""

ON_DIGITS = {"LeNet": (15, 90), "ResNet32": (5, 90)}
"""Epochs, and the lowest prec@1; both come to 97. ResNet18 and deeper ones take minutes of processor time."""


@pytest.mark.parametrize("network", ALONE)
@pytest.mark.nightly
def test_other_networks_train_on_other_data(tmp_path: Path, network: str) -> None:
    write_mnist(tmp_path / "mnist_data")
    (tmp_path / "text.txt").write_text("0123456789" * 300)
    arguments, least = ALONE[network]
    assert trained_alone(tmp_path, network, arguments) >= least


@pytest.mark.parametrize("network", ON_DIGITS)
@pytest.mark.nightly
def test_the_digits_are_learned(tmp_path: Path, network: str) -> None:
    epochs, least = ON_DIGITS[network]
    arguments = {"dataset": "digits", "lr": 0.05, "momentum": 0.9, "batch_size": 32, "epochs": epochs}
    assert trained_alone(tmp_path, network, arguments) >= least


def trained_alone(directory: Path, network: str, arguments: dict[str, Any]) -> float:
    """The prec@1 that a network comes to in one process."""
    program = f"from elastic_ps.contrib.zoo.train import main; main(network={network!r}, **{arguments!r})"
    done = command(directory, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    scores = done.stdout.splitlines()[-1]
    assert scores.startswith("test loss ")
    return float(scores.partition("prec@1 ")[2].partition(",")[0])


def test_a_dry_run_prints_the_job_that_would_run(tmp_path: Path, elastic_ps_here: Here) -> None:
    flags = ("--network", "vgg-11", "--dataset", "cifar10", "--num-workers", 4, "--num-aggregate", 3)
    done = elastic_ps_here("train", *flags, "--weight-decay", 5e-4, "--enable-gpu", "--dry-run")
    assert done.returncode == 0, done.stderr
    job = parse_job(yaml.safe_load(done.stdout), source="the output")
    assert job.name == "vgg11-cifar10"
    assert job.spec.arguments["weight_decay"] == 5e-4
    assert job.spec.arguments["enable_gpu"] is True
    assert (job.spec.worker.replicas, job.spec.consistency.backup_workers) == (4, 1)
    assert not (tmp_path / "state").exists()


BAD_INPUT = {
    "aggregate": ("--num-workers 2 --num-aggregate 3", "--num-aggregate is 3, but there are 2 workers"),
    "network": ("--network LeNte", "did you mean LeNet?"),
    "data set": ("--dataset Cifar", "there is no data set 'Cifar'; did you mean Cifar10? There are: digits,"),
    "rate": ("--lr fast", "'fast' is not a number of at least 0"),
    "count": ("--batch-size 0", "'0' is not a whole number of at least 1"),
    "gpu": ("--enable-gpu maybe", "'maybe' is neither yes nor no"),
    "gpu and not": ("--enable-gpu --no-cuda", "contradict each other"),
    "data": (
        "--network ResNet18 --dataset Cifar10",
        "cifar10_data does not exist; expected the files of Cifar10",
    ),
    "data of digits": ("--dataset digits --data-dir .", "digits has no files to look for"),
    "claim": ("--data-claim data", "--data-claim data is for a cluster"),
    "claim of checkpoints": ("--train-claim kept", "--train-claim kept is for a cluster"),
    "directory of checkpoints": (
        "--apply --image i --train-dir kept",
        "--train-dir kept is a directory of this machine, which the job's pods cannot reach",
    ),
    "image": ("--apply", "--apply needs --image"),
    "report": ("--dry-run --report out", "--report has no effect"),
    "workers": ("--dry-run -- --lr 0.1", "takes arguments after --"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_starts_nothing(tmp_path: Path, elastic_ps_here: Here, case: str) -> None:
    flags, message = BAD_INPUT[case]
    done = elastic_ps_here("train", *flags.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "state").exists()


def test_data_that_is_wrong_ends_the_job_as_bad_input(tmp_path: Path) -> None:
    (write_mnist(tmp_path / "mnist_data") / "t10k-labels-idx1-ubyte").unlink()
    done = elastic_ps(tmp_path, "train", "--network", "LeNet", "--num-workers", 1)
    assert done.returncode == 2
    assert "there is no file t10k-labels-idx1-ubyte in mnist_data" in done.stderr
