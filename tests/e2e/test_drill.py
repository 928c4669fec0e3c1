"""`elastic-ps drill` of a TrainingJob on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import GivenCluster
from tests.testing.operator_process import HISTORIES, ROOT, TRAINING_IMAGE, Jobs, OperatorProcess, digits

pytestmark = pytest.mark.usefixtures("definition", "training_images")


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace, TRAINING_IMAGE)


@pytest.mark.nightly
def test_a_drill_loses_nothing(operator: OperatorProcess, jobs: Jobs, tmp_path: Path) -> None:
    """As the histories of all pods say, not as the parameter server counts."""
    jobs.cluster.apply(HISTORIES, namespace=jobs.namespace)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(digits("drilled", epochs=100)))
    command = [sys.executable, "-m", "elastic_ps.cli", "drill", str(tmp_path / "job.yaml"), "--seed", "3"]
    command += ["--faults", "kill-worker,kill-ps", "--histories", "histories"]
    command += ["--namespace", jobs.namespace, "--report", str(tmp_path / "report")]
    variables = jobs.cluster.environment()
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "drill.json").read_text())
    assert [fault["state"] for fault in report["faults"]] == ["recovered"] * 2
    assert report["violations"] == []
    assert report["commits"] > 0
