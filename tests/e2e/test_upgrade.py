"""A job that an operator of before certificates has started goes on under today's; nothing is lost."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from elastic_ps.drill.history import Data, check
from tests.e2e.cluster import Cluster, wait_for
from tests.testing.operator_process import HISTORIES, TRAINING_IMAGE, Jobs, OperatorProcess
from tests.testing.recorded_job import CONFIG, histories, hurry

pytestmark = [pytest.mark.usefixtures("definition", "training_images"), pytest.mark.nightly]

OLDER = Path(__file__).parent / "older.yaml"
"""The job as its operator has left it."""

MINUTES = timedelta(minutes=10)


@pytest.fixture
def jobs(local_cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(local_cluster, namespace, TRAINING_IMAGE)


def leave(jobs: Jobs) -> Data:
    """The job, all that belongs to it, and its status, with no operator; what it trains."""
    job, *_ = yaml.safe_load_all(OLDER.read_text())
    status = job.pop("status")
    jobs.cluster.apply(HISTORIES, CONFIG, job, namespace=jobs.namespace)
    uid = jobs.job("older")["metadata"]["uid"]
    text = OLDER.read_text().replace("JOB-UID", uid).replace("JOB-NAMESPACE", jobs.namespace)
    _, *objects = yaml.safe_load_all(text)
    jobs.cluster.apply(*objects, namespace=jobs.namespace)
    patch = json.dumps({"status": status})
    jobs.kubectl("patch", "tj", "older", "--subresource=status", "--type=merge", "-p", patch)
    arguments = job["spec"]["arguments"]
    return Data(arguments["records"], arguments["epochs"])


def test_a_job_of_an_older_operator_goes_on_and_ends(
    jobs: Jobs, idle: OperatorProcess, tmp_path: Path
) -> None:
    """It is scaled, and its parameter server is replaced: by what the job was started with, without TLS."""
    data = leave(jobs)
    wait_for(
        lambda: "of job older serves" in jobs.kubectl("logs", "older-ps-0", check=False).stdout,
        what="the older parameter server serves",
        timeout=MINUTES,
    )
    started = jobs.identities("older")
    idle.start(f"--tls-secret={jobs.namespace}/authority")
    jobs.wait_version("older", 20)
    assert jobs.identities("older") == started, "the operator replaces nothing"
    degraded = jobs.condition("older", "Degraded")
    assert degraded["reason"] != "SpecNotFollowed", degraded
    jobs.kubectl("scale", "tj/older", "--replicas=2")
    jobs.kubectl("delete", "pod", "older-ps-0", "--wait=false")
    jobs.wait_replaced("older", "older-ps-0", started)
    jobs.wait_status("older", workers="2/2")
    hurry(jobs)
    jobs.wait_status("older", phase="Succeeded", timeout=MINUTES)
    after, status = jobs.identities("older"), jobs.job("older")["status"]
    assert after["older-worker-0"] == started["older-worker-0"]
    assert status["parameterServer"]["term"] == 2
    assert status["worker"]["failures"] == 0
    assert status["progress"]["recordsApplied"] == data.records * data.epochs
    assert check(histories(jobs, tmp_path), data) == []
    found = jobs.cluster.get("-n", jobs.namespace, "services,secrets", "-l", "elastic-ps.dev/job=older")
    assert [item["metadata"]["name"] for item in found["items"]] == ["older-ps-0"]
