"""`elastic-ps train --apply`, to an API server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_operator import submit
from elastic_ps.job import parse_job
from tests.unit.api_server import ApiServer, Refusal, Request

ROOT = Path(__file__).parents[2]
JOB = """
apiVersion: elastic-ps.dev/v1alpha1
kind: TrainingJob
metadata: {name: mine}
spec: {entrypoint: "script:main", image: image:1}
"""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


def test_flags_become_a_job_on_the_cluster(server: ApiServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic_ps.cli", "train", "--network", "LeNet", "--dataset", "digits"]
    done = subprocess.run(
        [*command, "--lr", "0.1", "--num-workers", "3", "--apply", "--image", "image:1"],
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
    assert job.spec.entrypoint == "elastic_ps.zoo.train:main"
    assert (job.spec.arguments["lr"], job.spec.worker.replicas, job.spec.image) == (0.1, 3, "image:1")
    (request,) = server.asked("POST", "trainingjobs")
    assert request.headers["authorization"] == "Bearer secret"


@pytest.fixture
def given(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job on standard input, and a kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB))


@pytest.mark.usefixtures("given")
def test_another_namespace(server: ApiServer) -> None:
    assert submit.main(["--namespace", "team"]) == 0
    assert server.get("trainingjobs", "mine", "team")["spec"]["image"] == "image:1"


REFUSED = {
    (409, "AlreadyExists"): "has a TrainingJob mine already: delete it with `kubectl --namespace default",
    (404, "NotFound"): "does not know TrainingJobs",
    (422, "Invalid"): "refuses the job: 422 Invalid",
    (403, "Forbidden"): "the API server refuses the job: 403 Forbidden",
}


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(("code", "reason"), REFUSED)
def test_what_the_cluster_refuses_is_told(
    server: ApiServer, capsys: pytest.CaptureFixture[str], code: int, reason: str
) -> None:
    def refuse(request: Request) -> None:
        raise Refusal(code, reason, "no")

    server.refuse = refuse
    assert submit.main([]) == 2
    assert REFUSED[code, reason] in capsys.readouterr().err


@pytest.mark.usefixtures("given")
def test_a_cluster_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert submit.main([]) == 2
    assert "no cluster is configured" in capsys.readouterr().err


def test_a_silent_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB))
    server.close()
    assert submit.main([]) == 1
    assert "the API server does not answer" in capsys.readouterr().err
