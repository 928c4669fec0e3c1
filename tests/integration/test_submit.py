"""`elastic-ps train --apply`, as a process, to an API server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_ps.api.job import parse_job
from tests.testing.api_server import ApiServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with closing(ApiServer()) as server:
        yield server


@pytest.mark.parametrize("claim", [[], ["--train-claim", "kept"]])
def test_flags_become_a_job_on_the_cluster(server: ApiServer, tmp_path: Path, claim: list[str]) -> None:
    command = [sys.executable, "-m", "elastic_ps.cli", "train", "--network", "LeNet", "--dataset", "digits"]
    done = subprocess.run(
        [*command, "--lr", "0.1", "--num-workers", "3", "--apply", "--image", "image:1", *claim],
        env={
            **os.environ,
            "KUBECONFIG": str(server.kubeconfig(tmp_path)),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'operator'}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kubectl --namespace default get tj lenet-digits" in done.stdout
    job = parse_job(server.get("trainingjobs", "lenet-digits"), source="the cluster")
    assert job.spec.entrypoint == "elastic_ps.contrib.zoo.train:main"
    assert (job.spec.arguments["lr"], job.spec.worker.replicas, job.spec.image) == (0.1, 3, "image:1")
    (request,) = server.asked("POST", "trainingjobs")
    assert request.headers["authorization"] == "Bearer secret"
    assert job.spec.parameter_server.checkpoint.existing_claim == ("kept" if claim else None)
    assert ("the trained model is lost with the job's pods" in done.stderr) is (not claim)
