"""One operator, alone with its jobs: it comes to rest, hears of every change, and may be away."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.e2e.cluster import GivenCluster, wait_for
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess

CLAIM = {"checkpoint": {"volumeClaim": {"storage": "10Mi"}}}
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str, python_image: str) -> Jobs:
    return Jobs(cluster, namespace, python_image)


def test_comes_to_rest(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("rest", parameterServer=CLAIM)
    jobs.wait_status("rest", phase="Running", workers="2/2")
    wait_for(
        lambda: 0 < reconciles(operator) == later(lambda: reconciles(operator)),
        what="no more passes",
        timeout=LIMIT,
    )
    version = jobs.job("rest")["metadata"]["resourceVersion"]
    # A new operator looks at every job.
    operator.close()
    operator.start()
    wait_for(lambda: reconciles(operator) >= 1, what="a pass", timeout=LIMIT)
    assert later(lambda: reconciles(operator)) == 1, "nothing has changed, so nobody looks"
    assert operator.writes() == 0
    assert jobs.job("rest")["metadata"]["resourceVersion"] == version
    assert jobs.job("rest")["metadata"].get("annotations", {}).keys() <= {LAST_APPLIED}
    assert "finalizers" not in jobs.job("rest")["metadata"]


def later(count: Callable[[], float]) -> float:
    """The number three seconds from now."""
    time.sleep(3)
    return count()


def reconciles(operator: OperatorProcess) -> float:
    """The number of passes so far; 0 while the operator starts."""
    try:
        text = operator.get("/metrics")
    except OSError:
        return 0.0
    lines = [line for line in text.splitlines() if "reconciles_total{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.nightly
def test_watches_alone_tell_of_every_change(jobs: Jobs, idle: OperatorProcess) -> None:
    """Nothing is listed and no job looked at again for an hour, and the workers do not end by themselves."""
    idle.start("--resync=1h", "--poll=1h")
    deaf = ["python3", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(9999)"]
    jobs.apply("watch", command=deaf)
    jobs.wait_status("watch", phase="Running", workers="2/2")
    before = jobs.identities("watch")
    jobs.kubectl("delete", "pod", "watch-worker-1", "--wait=false")
    jobs.wait_replaced("watch", "watch-worker-1", before)
    jobs.wait_status("watch", phase="Running", workers="2/2")
    jobs.patch("watch", {"runPolicy": {"suspend": True}})
    jobs.wait_status("watch", phase="Suspended")
    assert jobs.pods("watch") == {}


@pytest.mark.nightly
def test_operator_away(jobs: Jobs, operator: OperatorProcess) -> None:
    for name in ("scaled", "edited", "deleted"):
        jobs.apply(name, worker={"replicas": 1})
    for name in ("scaled", "edited", "deleted"):
        jobs.wait_status(name, phase="Running")
    before = jobs.identities("scaled")
    operator.close()
    jobs.kubectl("scale", "tj/scaled", "--replicas=3")
    jobs.patch("edited", {"runPolicy": {"suspend": True}})
    jobs.kubectl("delete", "tj", "deleted")
    jobs.wait_gone("deleted")
    assert jobs.identities("scaled") == before, "who trains goes on"
    operator.start()
    jobs.wait_status("scaled", workers="3/3")
    jobs.wait_status("edited", phase="Suspended")
    assert before.items() <= jobs.identities("scaled").items()
    wait_for(lambda: not jobs.pods("edited"), what="the suspended job's pods end", timeout=LIMIT)
    jobs.patch("edited", {"runPolicy": {"suspend": False}})
    jobs.wait_status("edited", phase="Running", workers="1/1")


@pytest.mark.nightly
def test_a_job_grows_when_its_quota_allows_it(jobs: Jobs, operator: OperatorProcess) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    jobs.cluster.apply({**quota, "spec": {"hard": {"pods": "2"}}}, namespace=jobs.namespace)
    wait_for(
        lambda: bool(jobs.cluster.get("-n", jobs.namespace, "quota", "few").get("status", {}).get("hard")),
        what="the quota is in force",
        timeout=LIMIT,
    )
    jobs.apply("quota", worker={"replicas": 2})
    assert "exceeded quota" in jobs.wait_condition("quota", "Degraded", "QuotaExceeded")
    jobs.wait_status("quota", phase="Running", workers="1/2")
    jobs.kubectl("delete", "quota", "few")
    jobs.wait_status("quota", workers="2/2")


def test_bad_spec_that_only_the_operator_sees(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply(
        "template", worker={"template": {"spec": {"containers": [{"name": "worker", "command": "x"}]}}}
    )
    message = jobs.wait_condition("template", "Failed", "InvalidSpec")
    assert "spec.worker.template" in message
    assert "template-worker-0" in message
    wait_for(
        lambda: operator.writes() == later(operator.writes),
        what="it writes no more: there is no retry loop",
        timeout=LIMIT,
    )
