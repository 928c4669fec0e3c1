"""What an outage of the cluster itself does to jobs: its API server is away, its only node is drained."""

from __future__ import annotations

import time

import pytest

from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.cluster.layout import NODE
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess

pytestmark = [pytest.mark.usefixtures("definition"), pytest.mark.alone]


@pytest.fixture
def jobs(local_cluster: Cluster, namespace: str, python_image: str) -> Jobs:
    return Jobs(local_cluster, namespace, python_image)


@pytest.mark.nightly
def test_api_server_away(jobs: Jobs, operator: OperatorProcess, local_cluster: Cluster) -> None:
    jobs.apply("api", worker={"replicas": 1})
    jobs.wait_status("api", phase="Running")
    before = jobs.identities("api")
    local_cluster.stop("kube-apiserver")
    try:
        assert local_cluster.kubectl("get", "nodes", check=False).returncode != 0
        time.sleep(10)
        assert operator.alive
        assert operator.get("/healthz") == "ok"
    finally:
        local_cluster.start("kube-apiserver")
    # These try again to reach the API server ever more rarely, at last every half minute, and are not what is
    # tried here. New ones ask at once.
    for component in ("kube-controller-manager", "kube-scheduler", "kubelet"):
        local_cluster.stop(component)
        local_cluster.start(component)
    jobs.kubectl("scale", "tj/api", "--replicas=2")
    jobs.wait_status("api", workers="2/2", timeout=3 * LIMIT)
    assert before.items() <= jobs.identities("api").items()


def test_a_drain_of_the_only_node_keeps_to_a_budget(
    jobs: Jobs, operator: OperatorProcess, local_cluster: Cluster
) -> None:
    """A budget counts the workers that the job wants; with nowhere else to go, the second one stays."""
    jobs.apply("drained")
    workers = {"elastic-ps.dev/job": "drained", "elastic-ps.dev/role": "worker"}
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": workers}}
    version = "v1" if "policy/v1\n" in jobs.kubectl("api-versions").stdout else "v1beta1"
    metadata = {
        "apiVersion": f"policy/{version}",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "drained"},
    }
    jobs.cluster.apply({**metadata, "spec": budget}, namespace=jobs.namespace)
    jobs.wait_status("drained", phase="Running", workers="2/2")
    before = jobs.identities("drained")
    wait_for(
        lambda: (
            jobs.cluster.get("-n", jobs.namespace, "pdb", "drained")
            .get("status", {})
            .get("disruptionsAllowed")
            == 1
        ),
        what="the budget lets one worker go",
        timeout=LIMIT,
    )
    drain = ("drain", NODE, "--delete-emptydir-data", "--pod-selector=elastic-ps.dev/job=drained")
    try:
        told = jobs.kubectl(*drain, "--timeout=12s", check=False)
        assert "violate the pod's disruption budget" in told.stderr
        left = [name for name, identity in jobs.identities("drained").items() if identity == before.get(name)]
        assert len(left) == 1
        assert left[0].startswith("drained-worker-")
        jobs.wait_condition("drained", "Degraded", "Unschedulable")
    finally:
        jobs.kubectl("uncordon", NODE)
    jobs.wait_status("drained", phase="Running", workers="2/2")
    after = jobs.identities("drained")
    assert after[left[0]] == before[left[0]], "who stayed is not restarted"
    jobs.kubectl("delete", "pdb", "drained")
    try:
        jobs.kubectl(*drain, "--timeout=60s")  # without a budget it ends
        assert after.items().isdisjoint(jobs.identities("drained").items())
    finally:
        jobs.kubectl("uncordon", NODE)
    jobs.wait_status("drained", phase="Running", workers="2/2")
    assert jobs.job("drained")["status"]["worker"]["failures"] == 0
