"""What the operator makes of jobs on a real API server, scheduler and kubelet: it converges, loses nothing.

All tests share one operator and its namespace.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, ClusterError, GivenCluster, wait_for
from tests.e2e.conftest import new_namespace
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess, requests, writes

CLAIM = {"checkpoint": {"volumeClaim": {"storage": "10Mi"}}}


pytestmark = pytest.mark.usefixtures("definition")


@pytest.fixture(scope="module")
def operator(cluster: GivenCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    with new_namespace(cluster) as namespace:
        process = OperatorProcess(cluster.kubeconfig, namespace, log)
        process.start()
        yield process
        process.close()


@pytest.fixture
def jobs(cluster: GivenCluster, operator: OperatorProcess, python_image: str) -> Iterator[Jobs]:
    jobs = Jobs(cluster, operator.namespace, python_image)
    written = operator.log.stat().st_size
    yield jobs
    jobs.kubectl("delete", "tj", "--all", "--wait=false")
    print(operator.log.read_text()[written:][-6000:])


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


def test_deletion_leaves_nothing(jobs: Jobs, operator: OperatorProcess) -> None:
    """But the checkpoints that are to be kept, from which another job continues."""
    retained = {"checkpoint": {"volumeClaim": {"storage": "10Mi", "retain": True}}}
    jobs.apply("retains", parameterServer=retained, worker={"replicas": 1})
    jobs.apply("deleted", parameterServer={**CLAIM, "replicas": 2})
    jobs.wait_status("deleted", phase="Running", workers="2/2")
    jobs.wait_status("retains", phase="Running", workers="1/1")
    jobs.kubectl("delete", "tj", "deleted", "retains")
    jobs.wait_gone("deleted")
    wait_for(lambda: not jobs.pods("retains"), what="the pods of the other are gone", timeout=LIMIT)
    resumed = {"checkpoint": {"resumeFrom": {"job": "retains"}}}
    jobs.apply("next", parameterServer=resumed, worker={"replicas": 1})
    jobs.wait_status("next", phase="Running", workers="1/1")


@pytest.mark.nightly
def test_a_claim_that_two_jobs_use_goes_with_the_last_of_them(jobs: Jobs, operator: OperatorProcess) -> None:
    def owners() -> list[str]:
        found = jobs.cluster.get("-n", jobs.namespace, "pvc")["items"]
        claims = [claim for claim in found if claim["metadata"]["name"].startswith("earlier-")]
        return sorted(ref["name"] for claim in claims for ref in claim["metadata"]["ownerReferences"])

    jobs.apply("earlier", parameterServer=CLAIM, worker={"replicas": 1})
    jobs.wait_status("earlier", phase="Running", workers="1/1")
    resumed = {"checkpoint": {"resumeFrom": {"job": "earlier"}}}
    jobs.apply("later", parameterServer=resumed, worker={"replicas": 1})
    jobs.wait_status("later", phase="Running", workers="1/1")
    wait_for(lambda: owners() == ["earlier", "later"], what="both own the claim", timeout=LIMIT)
    jobs.kubectl("delete", "tj", "earlier")
    wait_for(lambda: not jobs.pods("earlier"), what="its pods are gone", timeout=LIMIT)
    wait_for(lambda: owners() == ["later"], what="the claim stays", timeout=LIMIT)
    jobs.kubectl("delete", "tj", "later")
    wait_for(lambda: owners() == [], what="the claim is gone", timeout=LIMIT)


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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_worker_out_of_memory(jobs: Jobs, operator: OperatorProcess) -> None:
    limit = {"limits": {"memory": "48Mi"}}
    hungry = ["python3", "-c", "x = bytearray(400 << 20); x[::4096] = b'1' * len(x[::4096])"]
    worker = {"replicas": 1, **with_worker(resources=limit)}
    jobs.apply("oom", command=hungry, worker=worker, runPolicy={"backoffLimit": 1})
    message = jobs.wait_condition("oom", "Failed", "BackoffLimitExceeded")
    assert "out of memory (its limit is 48Mi)" in message
    assert "48Mi" in jobs.events("oom")["OutOfMemory"]
    assert jobs.job("oom")["status"]["worker"]["failures"] == 2


@pytest.mark.nightly
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
    jobs.wait_replaced("evict", "evict-worker-0", evicted)
    assert "DegradedEvicted" not in jobs.events("evict")
    assert jobs.job("evict")["status"]["worker"]["failures"] >= 1
    assert jobs.job("drain")["status"]["worker"].get("restarts") == 0


@pytest.mark.nightly
def test_deadline_and_what_is_left_after_it(jobs: Jobs, operator: OperatorProcess) -> None:
    late = {"activeDeadlineSeconds": 8}
    jobs.apply("kept", worker={"replicas": 1}, runPolicy={**late, "cleanPodPolicy": "None"})
    jobs.apply("swept", worker={"replicas": 1}, runPolicy={**late, "cleanPodPolicy": "All"})
    ttl = {"ttlSecondsAfterFinished": 3}
    jobs.apply("gone", worker={"replicas": 1}, runPolicy={**late, **ttl})
    for name in ("kept", "swept"):
        message = jobs.wait_condition(name, "Failed", "DeadlineExceeded")
        assert "activeDeadlineSeconds (8 s)" in message
        assert jobs.job(name)["status"]["phase"] == "Failed"
    wait_for(lambda: not jobs.pods("swept"), what="all pods of the one are deleted", timeout=LIMIT)
    jobs.wait_gone("gone")
    assert jobs.kubectl("get", "tj", "gone", check=False).returncode != 0
    assert jobs.identities("kept").keys() == {"kept-ps-0", "kept-worker-0"}


@pytest.mark.nightly
def test_image_that_is_missing(jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.apply("image", worker=with_worker(image="localhost/no-such-image:1"))
    assert "no-such-image" in jobs.wait_condition("image", "Degraded", "ImagePullFailed")
    assert jobs.job("image")["status"]["phase"] == "Pending"
    assert "ImagePullFailed" in jobs.kubectl("get", "tj", "image").stdout
    jobs.apply("image", worker=with_worker(image=jobs.image))
    jobs.wait_status("image", phase="Running", workers="2/2")


@pytest.mark.nightly
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
