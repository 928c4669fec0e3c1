"""Which job a command line of `elastic-ps train` stands for."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.job import parse_job
from elastic_ps.cli.parser import build_parser
from elastic_ps.cli.train_flags import ARGUMENTS
from elastic_ps.contrib.zoo.evaluate import main as evaluate
from elastic_ps.contrib.zoo.job import Flags, job_of
from elastic_ps.contrib.zoo.train import choose_device, main
from elastic_ps.errors import InvalidJob, UserError
from tests.testing import machine


def spec_of(flags: Flags) -> Any:
    document, job, _ = job_of(flags)
    assert parse_job(document, source="again") == job
    return job.spec


def test_what_nobody_says_is_left_to_the_entrypoint_and_to_the_job() -> None:
    document, job, notes = job_of(Flags(arguments={}))
    assert document["spec"] == {
        "entrypoint": "elastic_ps.contrib.zoo.train:main",
        "arguments": {"network": "LeNet", "dataset": "MNIST"},
        "worker": {"replicas": 2},
        "consistency": {"mode": "sync"},
    }
    assert (job.name, notes) == ("lenet-mnist", [])


def test_flags_become_arguments_and_fields() -> None:
    spec = spec_of(
        Flags(
            arguments={"network": "resnet-18", "dataset": "CIFAR-100", "lr": 0.1},
            num_workers=4,
            num_aggregate=3,
            eval_freq=20,
            train_dir=Path("kept"),
            compress_grad="int8",
            image="image:1",
        )
    )
    assert spec.arguments == {"network": "ResNet18", "dataset": "Cifar100", "lr": 0.1}
    assert (spec.worker.replicas, spec.consistency.backup_workers) == (4, 1)
    checkpoint = spec.parameter_server.checkpoint
    assert (checkpoint.every_versions, checkpoint.path) == (20, "kept")
    assert (spec.compression.codec, spec.image) == ("int8", "image:1")


def test_the_evaluator_gets_what_concerns_it() -> None:
    arguments = {"network": "LeNet", "dataset": "MNIST", "lr": 0.1, "test_batch_size": 7, "data_dir": "/data"}
    spec = spec_of(Flags(arguments=arguments, evaluate=True, eval_freq=20, data_claim="claim"))
    evaluator = spec.evaluator
    assert evaluator is not None
    wanted = {"network": "LeNet", "dataset": "MNIST", "test_batch_size": 7, "data_dir": "/data"}
    assert (evaluator.entrypoint, evaluator.arguments) == ("elastic_ps.contrib.zoo.evaluate:main", wanted)
    assert {*wanted} <= {*inspect.signature(evaluate).parameters}
    assert evaluator.every == 20
    assert evaluator.best is not None
    assert evaluator.best.metric == "prec@1"
    pod: Any = evaluator.template["spec"]
    assert (pod["containers"][0]["name"], pod["volumes"][0]["name"]) == ("evaluator", "data")


def test_the_defaults_are_those_of_ps_pytorch() -> None:
    """As its README and its parser say."""
    defaults = {name: each.default for name, each in inspect.signature(main).parameters.items()}
    assert defaults == {
        "network": "LeNet",
        "dataset": "MNIST",
        "data_dir": None,
        "batch_size": 128,
        "test_batch_size": 500,
        "epochs": 100,
        "max_steps": 10_000,
        "lr": 0.01,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "seed": 1,
        "log_interval": 10,
        "enable_gpu": False,
    }
    assert {*ARGUMENTS, "enable_gpu"} == set(defaults)


@pytest.mark.parametrize(
    ("given", "meant"),
    [([], False), (["--enable-gpu="], False), (["--enable-gpu=False"], False), (["--enable-gpu"], True),
     (["--enable-gpu=yes"], True)],
)  # fmt: skip
def test_an_empty_enable_gpu_is_no(given: list[str], meant: bool) -> None:
    assert build_parser().parse_args(["train", *given]).enable_gpu is meant


def test_there_are_as_many_workers_as_are_waited_for() -> None:
    spec = spec_of(Flags(arguments={}, num_aggregate=5))
    assert (spec.worker.replicas, spec.consistency.backup_workers) == (5, 0)


@pytest.mark.parametrize("codec", ["none", "int8", "mine:Halves"])
def test_gradients_are_encoded_as_the_flag_says(codec: str) -> None:
    assert spec_of(Flags(arguments={}, compress_grad=codec)).compression.codec == codec


def test_bounded_staleness() -> None:
    spec = spec_of(Flags(arguments={}, mode="bounded", max_staleness=8))
    assert (spec.consistency.mode, spec.consistency.max_staleness) == ("bounded", 8)


def test_the_gpu_of_a_worker_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch would take memory of GPU 0, too."""
    chosen: list[torch.device] = []
    machine.has_gpus(monkeypatch, 2, chosen.append)
    assert choose_device(enable_gpu=False, worker=3) == torch.device("cpu")
    assert not chosen
    assert choose_device(enable_gpu=True, worker=3) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(enable_gpu=True, worker=0) == torch.device("cuda", 1), "worker 0 has both"


def test_pods_get_a_gpu_and_the_data() -> None:
    arguments = {"enable_gpu": True, "data_dir": "/data"}
    document, _, _ = job_of(Flags(arguments=arguments, data_claim="mnist"))
    pod = document["spec"]["worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "worker"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data", "readOnly": True}]
    assert pod["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "mnist"}}]


def test_checkpoints_are_kept_in_a_claim() -> None:
    checkpoint = spec_of(Flags(arguments={}, train_claim="kept", eval_freq=5)).parameter_server.checkpoint
    assert (checkpoint.existing_claim, checkpoint.every_versions) == ("kept", 5)


def test_a_flag_that_changes_nothing_is_told() -> None:
    _, _, notes = job_of(Flags(arguments={}, foreign=["--comm-type"]))
    assert [note.partition(":")[0] for note in notes] == ["--comm-type changes nothing"]


def test_compress_loses_nothing() -> None:
    _, job, notes = job_of(Flags(arguments={}, compress_grad="compress"))
    assert (job.spec.compression.codec, job.spec.compression.lossless) == ("none", "zstd")
    assert notes == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "network": ({"arguments": {"network": "ResNet20"}}, "did you mean ResNet"),
    "data set": ({"arguments": {"dataset": "cifar"}}, r"did you mean Cifar10\?"),
    "kinds": (
        {"arguments": {"network": "gpt"}},
        "GPT takes records of kind text, .* MNIST .* GPT is trained on text",
    ),
    "aggregate": ({"num_workers": 2, "num_aggregate": 5}, "--num-aggregate is 5, but there are 2 workers"),
    "mode": ({"mode": "async"}, "--mode is 'async'; expected one of normal, sync, kill, bounded"),
    "kill": ({"mode": "kill", "num_workers": 3}, "--mode kill .* needs --num-aggregate below .* which is 3"),
    "staleness": ({"mode": "bounded"}, "--mode bounded needs --max-staleness"),
    "stale": ({"max_staleness": 3}, "--max-staleness has no meaning with --mode normal"),
    "both": (
        {"mode": "bounded", "max_staleness": 3, "num_workers": 3, "num_aggregate": 2},
        "--num-aggregate 2 has no meaning",
    ),
    "codec": ({"compress_grad": "zip"}, "--compress-grad is 'zip'; expected one of compress, none, bf16"),
    "claim": (
        {"data_claim": "mnist", "arguments": {"data_dir": "here"}},
        "needs --data-dir, the absolute path .*; given: here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_be_used_are_named(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        job_of(Flags(**{"arguments": {}, **given}))


def test_a_name_that_no_job_may_have_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"metadata\.name"):
        job_of(Flags(arguments={}, name="My Job"))


def test_a_name_that_is_not_known_is_told_those_that_have_data() -> None:
    with pytest.raises(UserError, match=r"there are: LeNet, .*, GPT$"):
        job_of(Flags(arguments={"network": "Foo"}))
