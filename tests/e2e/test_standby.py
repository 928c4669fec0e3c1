"""A standby on a real cluster, and `elastic-ps drill` of a TrainingJob."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Cluster, GivenCluster, wait_for
from tests.e2e.cluster.base import find_kubectl
from tests.testing.operator_process import HISTORIES, ROOT, TRAINING_IMAGE, Jobs, OperatorProcess, digits

pytestmark = pytest.mark.usefixtures("definition", "training_images")

TRAINED = timedelta(minutes=10)


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace, TRAINING_IMAGE)


def following(jobs: Jobs) -> int:
    """How many standbys have every round."""
    status = jobs.job("digits").get("status") or {}
    return int(status.get("parameterServer", {}).get("standbys", 0))


def wait_unsaved(jobs: Jobs, rounds: int) -> None:
    """Wait until the shard is followed and so many rounds are on no disk."""

    def reached() -> bool:
        now = jobs.progress("digits")
        return following(jobs) == 1 and now["version"] > now["durableVersion"] + rounds

    wait_for(
        reached,
        what=f"the standby follows, {rounds} versions beyond the checkpoint",
        timeout=timedelta(minutes=3),
        explain=lambda: str(jobs.job("digits").get("status")),
    )


def test_no_round_is_lost_with_the_parameter_server(
    operator: OperatorProcess, jobs: Jobs, local_cluster: Cluster
) -> None:
    job = digits(epochs=30)
    job["spec"]["parameterServer"]["durability"] = "standby"
    job["spec"]["parameterServer"]["checkpoint"]["interval"] = "1h"
    jobs.cluster.apply(job, namespace=jobs.namespace)
    jobs.wait_status("digits", phase="Running", workers="2/2", timeout=timedelta(minutes=3))
    wait_unsaved(jobs, 30)
    before = jobs.identities("digits")
    assert before.keys() == {"digits-ps-0", "digits-standby-0", "digits-worker-0", "digits-worker-1"}
    # Frozen first: a parameter server that is asked to end would write a checkpoint.
    os.kill(local_cluster.pod_pid("digits-ps-0", namespace=jobs.namespace), signal.SIGSTOP)
    lost = jobs.progress("digits")
    assert lost["finished"] is False, (
        "the job ended before its parameter server was lost; give it more epochs"
    )
    assert lost["version"] > lost["durableVersion"]
    jobs.kubectl("delete", "pod", "digits-ps-0", "--force", "--grace-period=0")

    def gone_on() -> re.Match[str] | None:
        log = jobs.kubectl("logs", "digits-ps-0", check=False).stdout
        return re.search(r"term 2 continues from version (\d+)", log)

    wait_for(
        lambda: gone_on() is not None,
        what="another parameter server goes on",
        timeout=timedelta(minutes=3),
        explain=lambda: jobs.kubectl("logs", "digits-ps-0", check=False).stdout,
    )
    found = gone_on()
    assert found is not None
    assert int(found[1]) >= lost["version"], "rounds were lost"
    jobs.wait_status("digits", phase="Succeeded", timeout=TRAINED)
    status, after = jobs.job("digits")["status"], jobs.identities("digits")
    assert status["parameterServer"]["term"] == 2
    assert status["progress"]["recordsApplied"] == status["progress"]["recordsExpected"]
    workers = {"digits-worker-0", "digits-worker-1"}
    assert {name: after[name] for name in workers} == {name: before[name] for name in workers}
    assert status["worker"]["restarts"] == 0


def test_a_drill_loses_nothing(operator: OperatorProcess, jobs: Jobs, tmp_path: Path) -> None:
    """As the histories of all pods say, not as the parameter server counts."""
    jobs.cluster.apply(HISTORIES, namespace=jobs.namespace)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(digits("drilled", epochs=100)))
    command = [sys.executable, "-m", "elastic_ps.cli", "drill", str(tmp_path / "job.yaml"), "--seed", "3"]
    command += ["--faults", "kill-worker,kill-ps", "--histories", "histories"]
    command += ["--namespace", jobs.namespace, "--report", str(tmp_path / "report")]
    path = f"{find_kubectl().parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "KUBECONFIG": str(jobs.cluster.kubeconfig), "PATH": path}
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "drill.json").read_text())
    assert [fault["state"] for fault in report["faults"]] == ["recovered"] * 2
    assert report["violations"] == []
    assert report["commits"] > 0
