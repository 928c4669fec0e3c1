"""Each example does what its first lines say, with the command that they name."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from elastic_operator import builders, crd
from elastic_ps import load_checkpoint
from elastic_ps.api.job import KIND, load_job, parse_job
from elastic_ps.cli.parser import build_parser
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


def trained(example: str, directory: Path, *, records: int) -> Drill:
    """Run the example as it says."""
    given = command(example)
    assert given.command == "run"
    job = load_job(ROOT / given.job)
    job.spec.parameter_server.checkpoint.path = str(directory / "checkpoints")
    done = run(job, (), options=Options(forks=forks(), root=directory), history=directory / "history")
    assert done.passed, "\n".join(map(str, [done.result, *done.violations]))
    assert done.records == records
    return done


def metrics(done: Drill) -> dict[str, float]:
    assert done.result.progress is not None
    return dict(done.result.progress.metrics)


def test_images_are_classified_also_without_a_gpu(tmp_path: Path) -> None:
    assert metrics(trained("gpu", tmp_path, records=8 * 1437))["test_accuracy"] > 0.8


def test_a_stream_without_an_end_is_trained_as_far_as_the_job_says(tmp_path: Path) -> None:
    progress = trained("streaming", tmp_path, records=4000).result.progress
    assert progress is not None
    assert progress.loss is not None
    assert progress.loss < 4, "it begins with the logarithm of 256, which is 5.5"


def test_two_networks_learn_in_turn(tmp_path: Path) -> None:
    """The generator draws nearly a circle, and the critic is limited."""
    assert metrics(trained("gan", tmp_path, records=40 * 1024))["distance"] < 0.3
    both = networks()
    load_checkpoint(tmp_path / "checkpoints", both)
    assert max(float(p.detach().abs().max()) for p in both["critic"].parameters()) < 0.1001


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
