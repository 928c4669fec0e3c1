"""A standby on a real cluster."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest

from tests.e2e.cluster import Cluster, GivenCluster, wait_for
from tests.testing.operator_process import TRAINING_IMAGE, Jobs, OperatorProcess, digits

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
        timeout=timedelta(minutes=10),
        explain=lambda: str(jobs.job("digits").get("status")),
    )


@pytest.mark.nightly
def test_no_round_is_lost_with_the_parameter_server(
    operator: OperatorProcess, jobs: Jobs, local_cluster: Cluster
) -> None:
    job = digits(epochs=200)
    job["spec"]["parameterServer"]["durability"] = "standby"
    job["spec"]["parameterServer"]["checkpoint"]["interval"] = "1h"
    jobs.cluster.apply(job, namespace=jobs.namespace)
    jobs.wait_status("digits", phase="Running", workers="2/2", timeout=timedelta(minutes=10))
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
        timeout=timedelta(minutes=10),
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
