"""A real HorizontalPodAutoscaler drives a job through its scale subresource. They are those of examples/hpa.

A metrics server measures what the workers use. Where there is none, a pod answers in its place: every worker
is always busy.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import Cluster, wait_for
from tests.testing.operator_process import ROOT, Jobs, OperatorProcess

pytestmark = [pytest.mark.usefixtures("definition"), pytest.mark.nightly]

BUSY = """
import signal, time
busy = True
def calm(*arguments):
    global busy
    busy = False
signal.signal(signal.SIGUSR1, calm)
signal.signal(signal.SIGTERM, lambda *arguments: exit(0))
while True:
    until = time.monotonic() + 0.03
    while busy and time.monotonic() < until:
        pass
    time.sleep(0.1)
"""
"""A worker that is busy until it is sent SIGUSR1."""

SERVE = """
import http.server, json, ssl, time, urllib.parse
GROUP = "metrics.k8s.io/v1beta1"
RESOURCES = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [
    {"name": "pods", "singularName": "", "namespaced": True, "kind": "PodMetrics", "verbs": ["get", "list"]}]}
def busy(namespace, index):
    return {"metadata": {"name": f"autoscaled-worker-{index}", "namespace": namespace},
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "window": "1s",
        "containers": [{"name": "worker", "usage": {"cpu": "400m", "memory": "1Mi"}}]}
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        parts = urllib.parse.urlsplit(self.path).path.strip("/").split("/")
        body = RESOURCES
        if parts[-1] == "pods":
            items = [busy(parts[-2], index) for index in range(9)]
            body = {"kind": "PodMetricsList", "apiVersion": GROUP, "metadata": {}, "items": items}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/certificate/tls.crt", "/certificate/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def answers(address: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(f"https://{address}/", timeout=2) as answer:
            return bool(json.load(answer)["groupVersion"] == "metrics.k8s.io/v1beta1")
    except (OSError, ValueError):
        return False


@pytest.fixture
def metrics(local_cluster: Cluster, namespace: str, python_image: str, tmp_path: Path) -> Iterator[None]:
    """An API for metrics.k8s.io, served by a pod with a certificate of its own making."""
    if local_cluster.has_metrics_server:
        pytest.skip("there is a metrics server, which the test before has used")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=metrics"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    secret = ("create", "secret", "tls", "metrics", f"--cert={certificate}", f"--key={key}")
    local_cluster.kubectl("-n", namespace, *secret)
    container: dict[str, Any] = {
        "name": "main",
        "image": python_image,
        "command": ["python3", "-u", "-c", SERVE],
        "volumeMounts": [{"name": "certificate", "mountPath": "/certificate"}],
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
    }
    volume = {"name": "certificate", "secret": {"secretName": "metrics"}}
    local_cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "metrics", "labels": {"app": "metrics"}},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "metrics"},
            "spec": {"selector": {"app": "metrics"}, "ports": [{"port": 443, "targetPort": 8443}]},
        },
        namespace=namespace,
    )
    local_cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/metrics", "--timeout=60s")
    address = local_cluster.get("-n", namespace, "service", "metrics")["spec"]["clusterIP"]
    # An API server that asks too early keeps its connection to whatever answered.
    wait_for(lambda: answers(address), what="the Service leads to the pod", timeout=timedelta(minutes=1))
    with local_cluster.api_service("metrics", namespace):
        yield


def example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "hpa" / name).read_text())
    return document


def start(jobs: Jobs) -> dict[str, tuple[str, int]]:
    """Start the job, whose one worker may become three and needs little; its pods."""
    spec = example("job.yaml")["spec"]
    del spec["image"]  # `apply` gives another
    spec["worker"]["maxReplicas"] = 3
    spec["worker"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "10m"
    jobs.apply("autoscaled", command=["python3", "-c", BUSY], **spec)
    jobs.wait_status("autoscaled", phase="Running", workers="1/1")
    return jobs.identities("autoscaled")


def wait_asked(jobs: Jobs, replicas: int) -> None:
    wait_for(
        lambda: jobs.job("autoscaled")["spec"]["worker"]["replicas"] == replicas,
        what=f"the autoscaler asks for {replicas} workers",
        timeout=timedelta(minutes=3),
        explain=lambda: jobs.kubectl("describe", "hpa", "autoscaled", check=False).stdout,
    )
    jobs.wait_status("autoscaled", phase="Running", workers=f"{replicas}/{replicas}")


def test_workers_come_while_all_are_busy_and_go_when_they_are_not(
    local_cluster: Cluster, namespace: str, python_image: str, operator: OperatorProcess
) -> None:
    if not local_cluster.has_metrics_server:
        pytest.skip("there is no metrics server; the next test is for that")
    jobs = Jobs(local_cluster, namespace, python_image)
    asks = example("autoscaler.yaml")
    asks["spec"] |= {"maxReplicas": 3, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
    with local_cluster.metrics_server():
        before = start(jobs)
        local_cluster.apply(asks, namespace=namespace)
        wait_asked(jobs, 3)
        grown = jobs.identities("autoscaled")
        assert before.items() <= grown.items()
        for name in grown.keys() - {"autoscaled-ps-0"}:
            os.kill(local_cluster.pod_pid(name, namespace=namespace), signal.SIGUSR1)
        wait_asked(jobs, 1)
    assert jobs.identities("autoscaled") == before, "who trains is not restarted"


def test_autoscaler_adds_workers_until_the_job_has_its_most(
    metrics: None, local_cluster: Cluster, namespace: str, python_image: str, operator: OperatorProcess
) -> None:
    jobs = Jobs(local_cluster, namespace, python_image)
    before = start(jobs)
    asks = example("autoscaler.yaml") | {"apiVersion": "autoscaling/v1"}  # Debian's Kubernetes has no v2
    del asks["spec"]["metrics"]
    asks["spec"] |= {"maxReplicas": 3, "targetCPUUtilizationPercentage": 50}
    local_cluster.apply(asks, namespace=namespace)
    wait_asked(jobs, 3)
    assert before.items() <= jobs.identities("autoscaled").items()
