"""A training job on a real cluster is changed with `kubectl patch`: no pod is made again, nothing is lost."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.job import API_VERSION, KIND
from elastic_ps.drill.history import Data, check, consistencies
from tests.e2e.cluster import Cluster, wait_for
from tests.testing.operator_process import HISTORIES, TRAINING_IMAGE, Jobs, OperatorProcess
from tests.testing.recorded_job import CONFIG, histories, hurry, template

pytestmark = pytest.mark.usefixtures("definition", "training_images")

RECORDS, EPOCHS = 600, 4


@pytest.fixture
def jobs(local_cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(local_cluster, namespace, TRAINING_IMAGE)


def test_a_job_is_changed_while_it_trains(jobs: Jobs, operator: OperatorProcess, tmp_path: Path) -> None:
    job = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "changing"},
        "spec": {
            "entrypoint": "slow:main",
            "arguments": {"records": RECORDS, "epochs": EPOCHS},
            "image": TRAINING_IMAGE,
            "parameterServer": {
                "checkpoint": {"volumeClaim": {"storage": "1Gi"}},
                "template": template("parameter-server"),
            },
            "worker": {"replicas": 2, "template": template("worker")},
            "data": {"shardRecords": 40},
        },
    }

    def change(wanted: dict[str, Any], words: str, *, what: str = "consistency") -> None:
        jobs.patch("changing", {what: wanted})
        wait_for(
            lambda: jobs.job("changing")["status"]["parameterServer"].get(what) == words,
            what=f"{what} is {words}",
            timeout=timedelta(minutes=10),
            explain=lambda: str(jobs.job("changing")["status"]),
        )

    jobs.cluster.apply(HISTORIES, CONFIG, job, namespace=jobs.namespace)
    jobs.wait_status("changing", phase="Running", workers="2/2", timeout=timedelta(minutes=10))
    jobs.wait_version("changing", 10)
    before = jobs.identities("changing")
    change({"mode": "bounded", "maxStaleness": 8}, "mode: bounded, maxStaleness: 8")
    change({"mode": "async", "maxStaleness": None}, "mode: async")
    change({"codec": "int8", "values": "bf16"}, "codec: int8, values: bf16", what="compression")
    assert jobs.identities("changing") == before, "no pod was made again"
    assert not jobs.progress("changing")["finished"], "the job ended too soon; give it more epochs"
    hurry(jobs)
    jobs.wait_status("changing", phase="Succeeded", timeout=timedelta(minutes=10))
    status = jobs.job("changing")["status"]
    assert (status["parameterServer"]["term"], status["worker"]["failures"]) == (4, 0)
    found = histories(jobs, tmp_path)
    assert [each.mode for _, each in sorted(consistencies(found).items())] == [
        "sync",
        "bounded",
        "async",
        "async",
    ]
    assert check(found, Data(RECORDS, EPOCHS)) == []
    events = jobs.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}").stdout.split()
    assert {"ConsistencyChanged", "CompressionChanged"} <= set(events)
