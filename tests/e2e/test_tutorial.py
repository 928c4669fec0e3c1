"""What docs/tutorial.md has the reader do on a cluster, with its commands, its Dockerfile and its job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.cluster import Cluster, build_image
from tests.e2e.cluster.images import find_image
from tests.testing.operator_process import ROOT, TRAINING_IMAGE, Jobs
from tests.testing.tutorial import blocks, commands

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("definition", "training_images", "operator")]

Shell = Callable[[str], str]


@pytest.fixture
def jobs(local_cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(local_cluster, namespace, TRAINING_IMAGE)


@pytest.fixture
def shell(jobs: Jobs, tmp_path: Path) -> Shell:
    """Runs commands in a directory with the project's manifests, as a user whose namespace is the test's."""
    config = tmp_path / "kubeconfig"
    config.write_text(jobs.cluster.kubeconfig.read_text())
    variables = jobs.cluster.environment(config)
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")

    def run(text: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", text], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
        return done.stdout

    run(f"kubectl config set-context --current --namespace={jobs.namespace}")
    return run


def test_the_sample_survives_what_the_page_does_to_it_and_its_model_is_taken_out(
    shell: Shell, jobs: Jobs, tmp_path: Path
) -> None:
    apply, watch = commands("get tj digits -w").splitlines()
    assert watch.startswith("kubectl get tj digits -w")
    shell(apply)
    jobs.wait_status("digits", phase="Running", workers="2/2", timeout=timedelta(minutes=10))
    shell(commands("kubectl scale tj/digits"))
    jobs.wait_status("digits", phase="Succeeded", timeout=timedelta(minutes=15))
    status = jobs.job("digits")["status"]
    assert status["progress"]["recordsApplied"] == status["progress"]["recordsExpected"]
    assert "test_accuracy" in shell(commands("kubectl scale tj/digits").splitlines()[-1])
    shell(commands("take-model.yaml"))
    assert load_file(tmp_path / "model.safetensors")


def test_a_script_of_ones_own_trains(
    shell: Shell, jobs: Jobs, local_cluster: Cluster, tmp_path: Path
) -> None:
    (script,), (dockerfile,), (_, job) = blocks("python"), blocks("dockerfile"), blocks("yaml")
    (image,) = re.findall(r"docker build -t (localhost/mine\S*)", commands("localhost/mine"))
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "Dockerfile").write_text(dockerfile)
    (tmp_path / "mine.yaml").write_text(job)
    # In place of `docker build` and `kind load`, as the page says; anew on another training image.
    build_image(tmp_path / "Dockerfile", tmp_path, image, {"BASE_DIGEST": find_image(TRAINING_IMAGE).digest})
    local_cluster.load_image(image)
    said = shell(commands("kubectl apply -f mine.yaml"))
    assert "accuracy on held-out digits: " in said
    jobs.wait_status("mine", phase="Succeeded", timeout=timedelta(minutes=10))
    shell(commands("kubectl delete tj digits mine").splitlines()[0])
    jobs.wait_gone("mine")
