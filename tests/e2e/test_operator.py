"""The operator against a real API server, scheduler and kubelet: converges, comes to rest, loses nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, ClusterError, GivenCluster, wait_for
from tests.e2e.cluster.layout import NODE
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess, requests, writes

CLAIM = {"checkpoint": {"volumeClaim": {"storage": "10Mi"}}}


pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str, python_image: str) -> Jobs:
    return Jobs(cluster, namespace, python_image)


def test_comes_to_rest(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("rest", parameterServer=CLAIM)
    jobs.wait_status("rest", phase="Running", workers="2/2")
    wait_for(lambda: reconciles(operator) == reconciles_later(operator), what="no more passes", timeout=LIMIT)
    version = jobs.job("rest")["metadata"]["resourceVersion"]
    # A new operator looks at every job.
    operator.close()
    operator.start()
    wait_for(lambda: reconciles(operator) >= 1, what="a pass", timeout=LIMIT)
    assert reconciles_later(operator) == 1, "nothing has changed, so nobody looks"
    assert operator.writes() == 0
    assert jobs.job("rest")["metadata"]["resourceVersion"] == version
    assert jobs.job("rest")["metadata"].get("annotations", {}).keys() <= {LAST_APPLIED}
    assert "finalizers" not in jobs.job("rest")["metadata"]


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def reconciles_later(operator: OperatorProcess) -> float:
    """The number of passes three seconds from now."""
    time.sleep(3)
    return reconciles(operator)


def reconciles(operator: OperatorProcess) -> float:
    """The number of passes so far; 0 while the operator starts."""
    try:
        text = operator.get("/metrics")
    except OSError:
        return 0.0
    lines = [line for line in text.splitlines() if "reconciles_total{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_scale_up_and_down_restarts_nobody(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("scale")
    jobs.wait_status("scale", phase="Running", workers="2/2")
    before = jobs.identities("scale")
    jobs.kubectl("scale", "tj/scale", "--replicas=4")
    jobs.wait_status("scale", workers="4/4")
    after = jobs.identities("scale")
    assert before.items() <= after.items()
    raw = f"/apis/elastic-ps.dev/v1alpha1/namespaces/{jobs.namespace}/trainingjobs/scale/scale"
    scale = jobs.kubectl("get", "--raw", raw).stdout
    assert '"replicas":4' in scale
    assert '"selector":"elastic-ps.dev/job=scale,elastic-ps.dev/role=worker"' in scale
    jobs.kubectl("scale", "tj/scale", "--replicas=1")
    wait_for(lambda: len(jobs.pods("scale")) == 2, what="three workers leave", timeout=LIMIT)
    jobs.wait_status("scale", workers="1/1")
    stayed = jobs.identities("scale")
    assert stayed == {name: before[name] for name in ("scale-ps-0", "scale-worker-0")}
    status = jobs.job("scale")["status"]["worker"]
    assert (status["failures"], status["restarts"]) == (0, 0)


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


def test_api_server_away(jobs: Jobs, operator: OperatorProcess, local_cluster: Cluster) -> None:
    jobs.apply("api", worker={"replicas": 1})
    jobs.wait_status("api", phase="Running")
    before = jobs.identities("api")
    local_cluster.stop("kube-apiserver")
    try:
        time.sleep(30)
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


def test_deletion_leaves_nothing(jobs: Jobs, operator: OperatorProcess) -> None:
    """But the checkpoints that are to be kept, from which another job continues."""
    retained = {"checkpoint": {"volumeClaim": {"storage": "10Mi", "retain": True}}}
    jobs.apply("kept", parameterServer=retained, worker={"replicas": 1})
    jobs.apply("gone", parameterServer={**CLAIM, "replicas": 2})
    jobs.wait_status("gone", phase="Running", workers="2/2")
    jobs.wait_status("kept", phase="Running", workers="1/1")
    jobs.kubectl("delete", "tj", "gone", "kept")
    jobs.wait_gone("gone")
    wait_for(lambda: not jobs.pods("kept"), what="the pods of the other are gone", timeout=LIMIT)
    resumed = {"checkpoint": {"resumeFrom": {"job": "kept"}}}
    jobs.apply("next", parameterServer=resumed, worker={"replicas": 1})
    jobs.wait_status("next", phase="Running", workers="1/1")


def test_api_requests_use_what_is_granted(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("verbs")
    jobs.wait_status("verbs", phase="Running")
    used = requests(operator.get("/metrics"))
    assert {verb for verb, _ in used if writes(verb)} <= {"create", "update", "delete", "patch"}


def failing(code: int) -> list[str]:
    return [
        "python3",
        "-c",
        f"import sys, time; time.sleep(1); print('cannot go on', file=sys.stderr); sys.exit({code})",
    ]


def test_worker_that_fails_until_the_limit(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("fails", command=failing(1), worker={"replicas": 1}, runPolicy={"backoffLimit": 1})
    message = jobs.wait_condition("fails", "Failed", "BackoffLimitExceeded")
    assert "exited with 1" in message
    assert "cannot go on" in message
    status = jobs.job("fails")["status"]
    assert status["worker"]["failures"] == 2
    assert {"WorkerFailed", "FailedBackoffLimitExceeded"} <= jobs.events("fails").keys()
    wait_for(lambda: list(jobs.pods("fails")) == ["fails-worker-0"], what="the PS ends", timeout=LIMIT)


def test_worker_that_says_the_job_is_invalid(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("invalid", command=failing(78))
    assert "cannot go on" in jobs.wait_condition("invalid", "Failed", "InvalidJob")


def test_worker_that_is_killed_is_replaced(
    jobs: Jobs, operator: OperatorProcess, local_cluster: Cluster
) -> None:

    jobs.apply("kill", worker={"replicas": 1})
    jobs.wait_status("kill", phase="Running")
    before = jobs.identities("kill")
    os.kill(local_cluster.pod_pid("kill-worker-0", namespace=jobs.namespace), signal.SIGKILL)
    jobs.wait_replaced("kill", "kill-worker-0", before)
    jobs.wait_status("kill", phase="Running", workers="1/1")
    status = jobs.job("kill")["status"]["worker"]
    assert (status["failures"], status["restarts"]) == (1, 1), "nothing says that it was a disruption"
    assert "WorkerKilled" in jobs.events("kill")


def with_worker(**container: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "worker", **container}]}}}


def test_worker_out_of_memory(jobs: Jobs, operator: OperatorProcess) -> None:
    limit = {"limits": {"memory": "48Mi"}}
    hungry = ["python3", "-c", "x = bytearray(400 << 20); x[::4096] = b'1' * len(x[::4096])"]
    worker = {"replicas": 1, **with_worker(resources=limit)}
    jobs.apply("oom", command=hungry, worker=worker, runPolicy={"backoffLimit": 1})
    message = jobs.wait_condition("oom", "Failed", "BackoffLimitExceeded")
    assert "out of memory (its limit is 48Mi)" in message
    assert "48Mi" in jobs.events("oom")["OutOfMemory"]
    assert jobs.job("oom")["status"]["worker"]["failures"] == 2


def test_worker_that_is_evicted(jobs: Jobs, operator: OperatorProcess) -> None:
    """By the kubelet, because it uses more disk than its limit; and politely, as `kubectl drain` does.

    The first one counts: it is evicted again wherever it runs.
    """
    noisy = ["python3", "-u", "-c", "import time; print('x' * (4 << 20)); time.sleep(9999)"]
    limit = {"limits": {"ephemeral-storage": "1Mi"}}
    worker = {"replicas": 1, **with_worker(resources=limit)}
    jobs.apply("evict", command=noisy, worker=worker, runPolicy={"backoffLimit": 100})
    jobs.apply("drain", worker={"replicas": 1})
    for name in ("evict", "drain"):
        jobs.wait_status(name, phase="Running")
    evicted, drained = jobs.identities("evict"), jobs.identities("drain")
    api = jobs.kubectl("api-versions").stdout
    jobs.kubectl(
        *("create", "--raw", f"/api/v1/namespaces/{jobs.namespace}/pods/drain-worker-0/eviction", "-f", "-"),
        stdin=json.dumps(
            {
                "apiVersion": "policy/v1" if "policy/v1\n" in api else "policy/v1beta1",
                "kind": "Eviction",
                "metadata": {"name": "drain-worker-0", "namespace": jobs.namespace},
            }
        ),
    )
    jobs.wait_replaced("drain", "drain-worker-0", drained)
    wait_for(lambda: "Evicted" in jobs.events("evict"), what="the eviction is told", timeout=LIMIT)
    assert jobs.events("evict")["Evicted"].startswith("evict-worker-0 was evicted: ")
    assert "evict-worker-0 was evicted: " in jobs.events("evict")["DegradedEvicted"]
    jobs.wait_replaced("evict", "evict-worker-0", evicted)
    assert jobs.job("evict")["status"]["worker"]["failures"] >= 1
    assert jobs.job("drain")["status"]["worker"].get("restarts") == 0


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


def test_deadline_and_what_is_left_after_it(jobs: Jobs, operator: OperatorProcess) -> None:
    late = {"activeDeadlineSeconds": 8}
    jobs.apply("kept", worker={"replicas": 1}, runPolicy={**late, "cleanPodPolicy": "None"})
    jobs.apply("swept", worker={"replicas": 1}, runPolicy={**late, "cleanPodPolicy": "All"})
    ttl = {"ttlSecondsAfterFinished": 3}
    jobs.apply("gone", worker={"replicas": 1}, runPolicy={**late, **ttl})
    for name in ("kept", "swept"):
        message = jobs.wait_condition(name, "Failed", "DeadlineExceeded")
        assert "activeDeadlineSeconds: 8" in message
        assert jobs.job(name)["status"]["phase"] == "Failed"
    wait_for(lambda: not jobs.pods("swept"), what="all pods of the one are deleted", timeout=LIMIT)
    jobs.wait_gone("gone")
    assert jobs.kubectl("get", "tj", "gone", check=False).returncode != 0
    assert jobs.identities("kept").keys() == {"kept-ps-0", "kept-worker-0"}


def test_image_that_is_missing(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("image", worker=with_worker(image="localhost/no-such-image:1"))
    assert "no-such-image" in jobs.wait_condition("image", "Degraded", "ImagePullFailed")
    assert jobs.job("image")["status"]["phase"] == "Pending"
    assert "ImagePullFailed" in jobs.kubectl("get", "tj", "image").stdout
    jobs.apply("image", worker=with_worker(image=jobs.image))
    jobs.wait_status("image", phase="Running", workers="2/2")


def test_unschedulable_worker_with_enough_others(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("full", worker={"replicas": 1})
    jobs.wait_status("full", phase="Running")
    jobs.patch("full", {"worker": {"replicas": 2, "template": big(jobs, "full")}})
    message = jobs.wait_condition("full", "Degraded", "Unschedulable")
    assert "full-worker-1" in message
    assert jobs.job("full")["status"]["phase"] == "Running"
    assert "DegradedUnschedulable" in jobs.events("full")


def big(jobs: Jobs, name: str) -> dict[str, Any]:
    template: dict[str, Any] = jobs.job(name)["spec"]["worker"]["template"]
    template["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "500"}}
    return template


def test_deterministic_job_is_not_scaled(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("fixed", consistency={"deterministic": True})
    jobs.wait_status("fixed", phase="Running", workers="2/2")
    refused = jobs.kubectl("scale", "tj/fixed", "--replicas=3", check=False)
    if refused.returncode != 0:
        assert "consistency.deterministic" in refused.stderr, "a server that knows CEL"
        return
    assert "3 has no effect" in jobs.wait_condition("fixed", "Degraded", "SpecNotFollowed")
    assert jobs.identities("fixed").keys() == {"fixed-ps-0", "fixed-worker-0", "fixed-worker-1"}


def test_quota(jobs: Jobs, operator: OperatorProcess) -> None:
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


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"worker": {"replicas": 0}}, "spec.worker.replicas"),
        ({"entrypoint": "no colon"}, "spec.entrypoint"),
        ({"runPolicy": {"cleanPodPolicy": "Some"}}, "spec.runPolicy.cleanPodPolicy"),
        ({"data": {"shardRecord": 1}}, "shardRecord"),
    ],
)
def test_bad_spec_is_refused_by_kubectl(jobs: Jobs, spec: dict[str, Any], word: str) -> None:
    with pytest.raises(ClusterError) as refused:
        jobs.apply("bad", **spec)
    assert word in str(refused.value)


def test_bad_spec_that_only_the_operator_sees(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply(
        "template", worker={"template": {"spec": {"containers": [{"name": "worker", "command": "x"}]}}}
    )
    message = jobs.wait_condition("template", "Failed", "InvalidSpec")
    assert "spec.worker.template" in message
    assert "template-worker-0" in message
    before = operator.writes()
    time.sleep(8)
    assert operator.writes() - before <= 1, "there is no retry loop"
