"""Real training on a real cluster, and what a node's loss looks like: nothing is lost or counted twice.

A process that is killed on one machine leaves closed connections and nobody behind. A lost node leaves a
process that may live on, unheard, and a pod that was only struck off the list.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.job import API_VERSION, KIND
from elastic_ps.drill.history import Data, check
from tests.e2e.cluster import Cluster, ClusterError, wait_for
from tests.testing.operator_process import HISTORIES, TRAINING_IMAGE, Jobs, OperatorProcess
from tests.testing.recorded_job import CONFIG, histories, hurry, template

pytestmark = pytest.mark.usefixtures("definition", "training_images")

LIMIT = timedelta(minutes=5)
RECORDS, EPOCHS = 600, 8


@pytest.fixture
def jobs(local_cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(local_cluster, namespace, TRAINING_IMAGE)


def members(jobs: Jobs) -> list[dict[str, Any]]:
    """All stays in the job, in joining order; none if the parameter server does not answer."""
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/lost-ps-0:8080/proxy/status"
    answer = jobs.kubectl("get", "--raw", path, check=False).stdout
    found: list[dict[str, Any]] = json.loads(answer)["members"] if answer else []
    return found


def stays(jobs: Jobs, worker: int) -> list[str]:
    """The states of a worker's stays."""
    return [member["state"] for member in members(jobs) if member["worker"] == worker]


def wait_training(jobs: Jobs, worker: int, cluster: Cluster) -> None:
    """Wait until a worker that has been lost is back."""

    def explain() -> str:
        pod = f"lost-worker-{worker}"
        with contextlib.suppress(ClusterError, OSError):
            os.kill(cluster.pod_pid(pod, namespace=jobs.namespace), signal.SIGUSR1)
            time.sleep(1)  # it says where its threads are
        log = jobs.kubectl("logs", "--tail=100", pod, check=False)
        return f"{stays(jobs, worker)}; {jobs.job('lost')['status']}; it wrote: {log.stdout}{log.stderr}"

    wait_for(
        lambda: len(seen := stays(jobs, worker)) > 1 and seen[-1] == "training",
        what=f"worker {worker} is back",
        timeout=timedelta(minutes=10),
        explain=explain,
    )


def start(jobs: Jobs, *, workers: int, **spec: Any) -> None:
    """Start the job, and wait until so many workers have made some versions."""
    job = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "lost"},
        "spec": {
            "entrypoint": "slow:main",
            "arguments": {"records": RECORDS, "epochs": EPOCHS},
            "image": TRAINING_IMAGE,
            "parameterServer": {
                "checkpoint": {"interval": "3s", "volumeClaim": {"storage": "1Gi"}},
                "template": template("parameter-server"),
            },
            "worker": {"replicas": workers, "leaseDuration": "4s", "template": template("worker")},
            "data": {"shardRecords": 40},
            **spec,
        },
    }
    jobs.cluster.apply(HISTORIES, CONFIG, job, namespace=jobs.namespace)
    jobs.wait_status("lost", phase="Running", workers=f"{workers}/{workers}", timeout=timedelta(minutes=10))
    assert all(stays(jobs, worker) for worker in range(workers)), "a worker is ready when it has joined"
    jobs.wait_version("lost", 50)


def lose_parameter_server(jobs: Jobs) -> None:
    """Strike its pod off, and wait until another one has begun a new term."""
    jobs.kubectl("delete", "pod", "lost-ps-0", "--force", "--grace-period=0")
    wait_for(
        lambda: jobs.job("lost")["status"]["parameterServer"].get("term") == 2,
        what="another parameter server has begun a new term",
        timeout=LIMIT,
    )


def assert_each_record_counted_once(jobs: Jobs, tmp_path: Path) -> None:
    """Wait for the job's end."""
    assert not jobs.progress("lost")["finished"], (
        "the job ended before it had lost enough; give it more epochs"
    )
    hurry(jobs)
    jobs.wait_status("lost", phase="Succeeded", timeout=timedelta(minutes=10))
    status = jobs.job("lost")["status"]
    assert status["parameterServer"]["term"] == 2
    assert status["progress"]["recordsApplied"] == RECORDS * EPOCHS
    assert check(histories(jobs, tmp_path), Data(RECORDS, EPOCHS)) == []


def test_lost_parameter_server_and_lost_workers(
    jobs: Jobs, operator: OperatorProcess, local_cluster: Cluster, tmp_path: Path
) -> None:
    """One after the other: a parameter server struck off, a worker out of reach for a while, one for good."""
    start(jobs, workers=3)
    before = jobs.identities("lost")
    assert {member["transport"] for member in members(jobs)} == {"tcp"}, "the Service has the data port"

    lose_parameter_server(jobs)
    wait_training(jobs, 1, local_cluster)

    local_cluster.cut("lost-worker-1", namespace=jobs.namespace)
    wait_for(lambda: stays(jobs, 1)[-1:] == ["lost"], what="who is out of reach is given up", timeout=LIMIT)
    local_cluster.heal("lost-worker-1", namespace=jobs.namespace)
    wait_training(jobs, 1, local_cluster)

    local_cluster.cut("lost-worker-2", namespace=jobs.namespace)
    jobs.kubectl("delete", "pod", "lost-worker-2", "--force", "--grace-period=0")
    jobs.wait_replaced("lost", "lost-worker-2", before)
    jobs.wait_status("lost", workers="3/3")
    wait_training(jobs, 2, local_cluster)

    assert_each_record_counted_once(jobs, tmp_path)
    after = jobs.identities("lost")
    for worker in ("lost-worker-0", "lost-worker-1"):
        assert after[worker] == before[worker], "who trains is not restarted"
    assert jobs.job("lost")["status"]["worker"]["failures"] == 0


@pytest.mark.nightly
def test_workers_that_add_up_gradients_among_themselves(
    jobs: Jobs, idle: OperatorProcess, local_cluster: Cluster, tmp_path: Path
) -> None:
    """`strategy: all-reduce` beside TLS: their number changes, one is killed, so is the parameter server."""
    idle.start(f"--tls-secret={jobs.namespace}/authority", "--http-from=[]")
    start(jobs, workers=2, strategy="all-reduce", unencryptedAllReduce=True)
    jobs.kubectl("get", "networkpolicy", "lost-workers")
    before = jobs.identities("lost")

    jobs.kubectl("scale", "tj/lost", "--replicas=3")
    wait_for(lambda: stays(jobs, 2)[-1:] == ["training"], what="a third worker trains", timeout=LIMIT)
    os.kill(local_cluster.pod_pid("lost-worker-1", namespace=jobs.namespace), signal.SIGKILL)
    wait_training(jobs, 1, local_cluster)
    lose_parameter_server(jobs)
    for worker in (0, 1, 2):
        wait_training(jobs, worker, local_cluster)
    jobs.wait_status("lost", workers="3/3")  # else the one that is not ready goes first
    jobs.kubectl("scale", "tj/lost", "--replicas=2")
    wait_for(lambda: stays(jobs, 2)[-1:] == ["left"], what="the third worker leaves", timeout=LIMIT)

    assert_each_record_counted_once(jobs, tmp_path)
    assert jobs.identities("lost")["lost-worker-0"] == before["lost-worker-0"], "who trains is not restarted"
