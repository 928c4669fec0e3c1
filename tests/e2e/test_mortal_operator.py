"""An operator that dies after each of its writes, alone and as one of two: nothing is lost or made twice."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_operator.api import EXIT_TEST
from tests.e2e.cluster import GivenCluster, wait_for
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess

CLAIM = {"checkpoint": {"volumeClaim": {"storage": "10Mi"}}}

pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str, python_image: str) -> Jobs:
    return Jobs(cluster, namespace, python_image)


@pytest.mark.nightly
def test_killed_between_any_two_writes(jobs: Jobs, idle: OperatorProcess) -> None:
    """Each start ends after one more write, so that the operator dies after every write there is."""
    jobs.apply("killed", parameterServer=CLAIM, worker={"replicas": 3})
    deaths = 0

    def runs() -> bool:
        status = jobs.job("killed").get("status") or {}
        return (status.get("phase"), status.get("summary", {}).get("workers")) == ("Running", "3/3")

    while not runs() and deaths < 40:
        idle.start("--fail-after-writes=1")
        wait_for(lambda: not idle.alive or runs(), what="the operator dies, or the job runs", timeout=LIMIT)
        deaths += not idle.alive
        assert idle.close() in (0, EXIT_TEST)
    assert 5 <= deaths < 40
    idle.start()
    jobs.wait_status("killed", phase="Running", workers="3/3")
    wanted = {"killed-ps-0", *(f"killed-worker-{index}" for index in range(3))}
    assert set(jobs.identities("killed")) == wanted
    print(f"the operator died {deaths} times, once after each of its writes")


@pytest.mark.nightly
def test_two_operators_that_die_after_each_write_start_a_job_together(
    jobs: Jobs, cluster: GivenCluster, tmp_path: Path
) -> None:
    """Each time the other one takes the lease over and goes on with what is there."""
    lease = [f"--lease={jobs.namespace}/operator", "--lease-duration=2s", "--fail-after-writes=1"]
    pair = [
        OperatorProcess(cluster.kubeconfig, jobs.namespace, tmp_path / f"operator-{index}.log")
        for index in range(2)
    ]
    deaths = 0
    jobs.apply("pair", parameterServer=CLAIM, worker={"replicas": 1})

    def runs() -> bool:
        nonlocal deaths
        for operator in pair:
            if not operator.alive:
                assert operator.close() in (None, EXIT_TEST)
                # A new pod, with a name of its own.
                operator.start(*lease, f"--identity=operator-{deaths}")
                deaths += 1
        return bool((jobs.job("pair").get("status") or {}).get("phase") == "Running")

    try:
        wait_for(runs, what="the job runs", timeout=timedelta(minutes=3))
    finally:
        for operator in pair:
            operator.close()
    assert deaths >= 6
    assert set(jobs.identities("pair")) == {"pair-ps-0", "pair-worker-0"}
    status = jobs.job("pair")["status"]
    assert (status["worker"]["failures"], status["worker"]["restarts"]) == (0, 0)
    holder = cluster.get("-n", jobs.namespace, "lease", "operator")["spec"]
    assert holder["leaseTransitions"] >= 4, "they took turns"


@pytest.mark.nightly
@pytest.mark.parametrize("count", range(1, 7))
def test_failure_is_counted_once(jobs: Jobs, idle: OperatorProcess, count: int) -> None:
    """Wherever between counting a failed worker and replacing it the operator dies."""
    once = "import os, sys, time; time.sleep(1); sys.exit(1)"
    jobs.apply("dies", command=["python3", "-c", once], worker={"replicas": 1}, runPolicy={"backoffLimit": 1})
    deaths = 0
    for _ in range(12):
        idle.start(f"--fail-after-writes={count}")
        wait_for(
            lambda: not idle.alive or jobs.condition("dies", "Failed").get("status") == "True",
            what="the operator dies, or has nothing left to count",
            timeout=LIMIT,
        )
        if idle.alive:
            idle.close(signal.SIGKILL)
            break
        deaths += 1
    assert deaths >= 2
    idle.start()
    jobs.wait_condition("dies", "Failed", "BackoffLimitExceeded")
    assert jobs.job("dies")["status"]["worker"]["failures"] == 2
