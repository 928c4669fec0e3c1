"""What one tenant may try against others, on a real API server: to get more than is permitted, to stall."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from helm_python import Chart

from tests.e2e.cluster import GivenCluster, wait_for
from tests.e2e.conftest import knows_rules
from tests.testing.operator_process import ROOT, Jobs, OperatorProcess, sleeper
from tests.testing.templates import FORBIDDEN

pytestmark = pytest.mark.usefixtures("definition")

SERVER = """
import socket, time, threading
listener = socket.create_server(("", 8080), backlog=100)
def answer(link):
    link.recv(4096)
    {answer}
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""
OK = 'link.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n{")'
ANSWERS = {
    "silent": "time.sleep(9999)",
    "drips": f'{OK}\n    while True: link.sendall(b" "); time.sleep(0.1)',
    "endless": f'{OK}\n    while True: link.sendall(b" " * 65536)',
    "elsewhere": 'link.sendall(b"HTTP/1.0 302 Found\\r\\nLocation: http://169.254.169.254/\\r\\n\\r\\n")',
}
"""What a parameter server of the tenant's own making says when the operator asks how it does."""


@pytest.fixture
def jobs(cluster: GivenCluster, namespace: str, python_image: str) -> Jobs:
    return Jobs(cluster, namespace, python_image)


def test_no_template_gets_more_than_is_permitted(jobs: Jobs, operator: OperatorProcess) -> None:
    tried: list[dict[str, Any]] = []
    for index, (template, _, _) in enumerate(FORBIDDEN):
        job = sleeper(f"tries-{index}", jobs.image)
        job["spec"]["worker"]["template"] = {"spec": template}
        tried.append(job)
    jobs.cluster.apply(*tried, namespace=jobs.namespace)

    def refused() -> dict[str, str]:
        return {
            item["metadata"]["name"]: condition["message"]
            for item in jobs.cluster.get("-n", jobs.namespace, "tj")["items"]
            for condition in (item.get("status") or {}).get("conditions") or []
            if (condition["type"], condition["reason"]) == ("Failed", "InvalidSpec")
        }

    wait_for(lambda: len(refused()) == len(tried), what="all are refused", timeout=timedelta(minutes=2))
    said = refused()
    for index, (_, path, needs) in enumerate(FORBIDDEN):
        message = said[f"tries-{index}"]
        assert f"{path} is not permitted" in message, message
        assert next(iter(needs)) in message
    assert jobs.cluster.get("-n", jobs.namespace, "pods")["items"] == []


@pytest.mark.nightly
def test_a_server_that_stalls_delays_no_other_job(jobs: Jobs, operator: OperatorProcess) -> None:
    for name, answer in ANSWERS.items():
        container = {"name": "parameter-server", "command": ["python3", "-c", SERVER.format(answer=answer)]}
        jobs.apply(
            name,
            worker={"replicas": 1},
            parameterServer={"template": {"spec": {"containers": [container]}}},
        )
    for name in ANSWERS:
        jobs.wait_status(name, phase="Running")
    jobs.apply("good", worker={"replicas": 1})
    jobs.wait_status("good", phase="Running", workers="1/1")
    for name in ("good", *ANSWERS):
        jobs.kubectl("scale", f"tj/{name}", "--replicas=2")
    for name in ("good", *ANSWERS):
        jobs.wait_status(name, workers="2/2")
        assert not jobs.progress(name).get("version")
    assert operator.get("/healthz") == "ok"


def test_an_admin_of_a_namespace_may_install_the_chart_there(jobs: Jobs) -> None:
    """The rights come to Kubernetes' own role by `manifests/installers.yaml`."""
    cluster, namespace, chart = jobs.cluster, jobs.namespace, ROOT / "charts" / "elastic-ps"
    if not knows_rules(cluster):
        pytest.skip("the chart needs Kubernetes 1.29")
    values = {"namespaces": [namespace], "crd": {"install": False}}
    with Chart.load(chart) as loaded:
        rendered = loaded.render(values, name="own", namespace=namespace)
    text = "---\n".join(
        text for name, text in rendered.items() if "tests/" not in name and name.endswith(".yaml")
    )
    cluster.kubectl("-n", namespace, "create", "rolebinding", "ada", "--clusterrole=admin", "--user=ada")

    def refused() -> str:
        asks = ("--as=ada", "-n", namespace, "apply", "-f", "-")
        return cluster.kubectl(*asks, stdin=text, check=False).stderr

    try:
        cluster.kubectl("apply", "-f", ROOT / "manifests" / "installers.yaml")
        limit = timedelta(seconds=30)
        wait_for(lambda: not refused(), what="the admin may install it", timeout=limit, explain=refused)
    finally:
        cluster.kubectl("delete", "-f", ROOT / "manifests" / "installers.yaml")
