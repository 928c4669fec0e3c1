"""How fast the operator deals with many jobs at once, and how many API requests a job costs it.

    KUBECONFIG=... python -m benchmarks.operator --jobs 100

Needs a cluster that serves TrainingJobs; it starts an operator of its own for a namespace of its own. The
jobs have `workers: 1` and containers that cannot be scheduled on purpose (`--image none`), so that what is
measured is the operator and the API server, not the node. The floor it is compared with is measured in the
same run: the time that the same objects take when one client creates them one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from elastic_operator import builders
from elastic_operator.wiring import service
from elastic_ps.api.job import TrainingJobSpec
from tests.e2e.cluster import GivenCluster, wait_for
from tests.testing.operator_process import OperatorProcess, requests, sleeper

UNSCHEDULABLE = {"template": {"spec": {"nodeSelector": {"elastic-ps.dev/benchmark": "no-such-node"}}}}


def job(index: int, image: str) -> dict[str, Any]:
    worker = {"replicas": 1, **UNSCHEDULABLE}
    return sleeper(f"bench-{index}", image, parameterServer=UNSCHEDULABLE, worker=worker)


def floor(cluster: GivenCluster, namespace: str, jobs: int, image: str) -> float:
    """Seconds for one kubectl to create the objects of as many jobs, without an operator."""
    objects = []
    for index in range(jobs):
        document = job(index, image)
        document["metadata"] |= {"namespace": namespace, "uid": "none", "name": f"floor-{index}"}
        spec = TrainingJobSpec.model_validate(document["spec"])
        parts = [
            service(document),
            builders.pod(document, spec, "ps", 0),
            builders.pod(document, spec, "worker", 0),
        ]
        for part in parts:
            del part["metadata"]["ownerReferences"]
            objects.append(part)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    begin = time.monotonic()
    cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=text)
    return time.monotonic() - begin


def measure(cluster: GivenCluster, namespace: str, jobs: int, image: str) -> dict[str, float]:
    """Apply all jobs, wait until each has its pods and a status; the figures."""
    with tempfile.TemporaryDirectory() as directory:
        operator = OperatorProcess(cluster.kubeconfig, namespace, Path(directory) / "operator.log")
        operator.start()
        try:
            wait_for(lambda: _ready(operator), what="the operator is ready", timeout=timedelta(minutes=1))
            before = requests(operator.get("/metrics"))
            begin = time.monotonic()
            cluster.apply(*(job(index, image) for index in range(jobs)), namespace=namespace)
            applied = time.monotonic() - begin
            wait_for(
                lambda: _reconciled(cluster, namespace) == jobs,
                what="all jobs are reconciled",
                timeout=timedelta(minutes=10),
                interval=timedelta(seconds=1),
            )
            total = time.monotonic() - begin
            after = requests(operator.get("/metrics"))
        finally:
            operator.close()
    delays = sorted(_delays(cluster, namespace))
    spent = {key: count - before.get(key, 0) for key, count in after.items()}
    return {
        "apply_seconds": applied,
        "all_reconciled_seconds": total,
        "job_to_pods_median_seconds": statistics.median(delays),
        "job_to_pods_worst_seconds": delays[-1],
        "requests_per_job": sum(spent.values()) / jobs,
        "writes_per_job": sum(n for (verb, _), n in spent.items() if verb not in ("get", "list")) / jobs,
    }


def _ready(operator: OperatorProcess) -> bool:
    try:
        return operator.get("/readyz") == "ok"
    except OSError:
        return False


def _reconciled(cluster: GivenCluster, namespace: str) -> int:
    items = cluster.get("-n", namespace, "tj")["items"]
    return sum(bool((item.get("status") or {}).get("conditions")) for item in items)


def _delays(cluster: GivenCluster, namespace: str) -> list[float]:
    """Seconds (the API server's clock, whole seconds) from each job's creation to its last pod's."""
    made: dict[str, float] = {}
    for item in cluster.get("-n", namespace, "pods", "-l", "elastic-ps.dev/job")["items"]:
        name = item["metadata"]["labels"]["elastic-ps.dev/job"]
        made[name] = max(made.get(name, 0.0), _seconds(item))
    jobs = cluster.get("-n", namespace, "tj")["items"]
    return [made[item["metadata"]["name"]] - _seconds(item) for item in jobs]


def _seconds(item: dict[str, Any]) -> float:
    return datetime.fromisoformat(item["metadata"]["creationTimestamp"]).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--image", default="localhost/none:1", help="never pulled: nothing is scheduled")
    given = parser.parse_args()
    if "KUBECONFIG" not in os.environ:
        parser.error("needs a cluster, whose kubeconfig the variable KUBECONFIG names")
    cluster = GivenCluster(Path(os.environ["KUBECONFIG"]))
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    for name in (namespace, f"{namespace}-floor"):
        cluster.kubectl("create", "namespace", name)
    try:
        figures = measure(cluster, namespace, given.jobs, given.image)
        figures["floor_seconds"] = floor(cluster, f"{namespace}-floor", given.jobs, given.image)
        figures["ratio_to_floor"] = figures["all_reconciled_seconds"] / figures["floor_seconds"]
    finally:
        cluster.kubectl("delete", "namespace", namespace, f"{namespace}-floor", "--wait=false")
    print(json.dumps({"jobs": given.jobs, **{key: round(value, 2) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
