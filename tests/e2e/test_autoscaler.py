"""A real HorizontalPodAutoscaler drives a job through its scale subresource.

The cluster has no metrics server, so a pod answers in its place: every worker is always busy.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.job import API_VERSION, KIND
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.operator_process import Jobs, OperatorProcess

pytestmark = pytest.mark.usefixtures("definition")

API = "v1beta1.metrics.k8s.io"
SERVE = """
import http.server, json, ssl, time, urllib.parse
GROUP = "metrics.k8s.io/v1beta1"
RESOURCES = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [
    {"name": "pods", "singularName": "", "namespaced": True, "kind": "PodMetrics", "verbs": ["get", "list"]}]}
def busy(namespace, index):
    return {"metadata": {"name": f"auto-worker-{index}", "namespace": namespace},
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
    version, _, group = API.partition(".")
    service = {"name": "metrics", "namespace": namespace, "port": 443}
    local_cluster.apply(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API},
            "spec": {
                "group": group,
                "version": version,
                "service": service,
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
    )
    try:
        local_cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{API}", "--timeout=60s")
        yield
    finally:
        local_cluster.kubectl("delete", "apiservice", API)


def test_autoscaler_adds_workers_until_the_job_has_its_most(
    metrics: None, local_cluster: Cluster, namespace: str, python_image: str, operator: OperatorProcess
) -> None:
    jobs = Jobs(local_cluster, namespace, python_image)
    request = {"name": "worker", "resources": {"requests": {"cpu": "10m"}}}
    jobs.apply(
        "auto", worker={"replicas": 1, "maxReplicas": 3, "template": {"spec": {"containers": [request]}}}
    )
    jobs.wait_status("auto", phase="Running", workers="1/1")
    before = jobs.identities("auto")
    autoscaler = {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "auto"},
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": "auto"},
            "minReplicas": 1,
            "maxReplicas": 3,
            "targetCPUUtilizationPercentage": 50,
        },
    }
    local_cluster.apply(autoscaler, namespace=namespace)
    wait_for(
        lambda: jobs.job("auto")["spec"]["worker"]["replicas"] == 3,
        what="the autoscaler asks for three workers",
        timeout=timedelta(minutes=3),
        explain=lambda: jobs.kubectl("describe", "hpa", "auto", check=False).stdout,
    )
    jobs.wait_status("auto", phase="Running", workers="3/3")
    assert before.items() <= jobs.identities("auto").items()
