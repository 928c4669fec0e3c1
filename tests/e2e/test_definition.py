"""What the API server itself refuses and explains, without any operator: the definition and its rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_operator.crd import crd
from elastic_operator.merging import merge
from tests.e2e.cluster import GivenCluster
from tests.e2e.conftest import knows_rules
from tests.testing.operator_process import sleeper
from tests.testing.refusals import CLAIM, FIXED, LOCAL, REFUSED

pytestmark = pytest.mark.usefixtures("definition")

FIXED_LOCALLY: list[dict[str, Any]] = [
    {"consistency": {"outer": "average"}},
    {"consistency": {"outerMomentum": 0.5}},
    {"consistency": {"fragments": 2}},
]
"""What cannot change in mode local."""

FREE: list[dict[str, Any]] = [
    {"consistency": {"backupWorkers": 1}},
    {"consistency": {"backupWorkers": 0, "mode": "bounded", "maxStaleness": 8}},
    {"consistency": {"maxStaleness": 2}},
    {"consistency": {"maxStaleness": None, "mode": "async"}},
    {"compression": {"codec": "int8", "options": {"block": 128}, "values": "bf16"}},
    {"evaluator": {"finishTimeout": "1h", "template": {"metadata": {"labels": {"team": "a"}}}}},
]
"""One after the other, what may become of a job."""


@pytest.fixture
def rules(cluster: GivenCluster) -> None:
    if not knows_rules(cluster):
        pytest.skip("the API server knows no CEL rules")


def job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return sleeper(name, "localhost/none:1", **spec)


@pytest.mark.usefixtures("rules")
def test_the_api_server_refuses_what_cannot_be_run(cluster: GivenCluster, namespace: str) -> None:
    items = [job(f"refused-{index}", spec) for index, (_, spec) in enumerate(REFUSED)]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    answer = cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=text, check=False)
    for index, (words, spec) in enumerate(REFUSED):
        of_this = [line for line in answer.stderr.splitlines() if f"refused-{index}" in line]
        assert any(words in line for line in of_this), f"{spec}: {answer.stderr}"
    for name in ("9-begins-with-a-digit", "has.a.dot", "x" * 53):
        text = json.dumps(job(name, {}))
        answer = cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=text, check=False)
        assert "metadata.name must have at most 52 characters" in answer.stderr, name
    assert cluster.get("-n", namespace, "tj")["items"] == []


@pytest.mark.usefixtures("rules")
def test_the_api_server_refuses_to_change_what_is_fixed(cluster: GivenCluster, namespace: str) -> None:
    evaluator = {"entrypoint": "evaluates:main"}
    server = {"checkpoint": {"volumeClaim": CLAIM}}
    given = job("fixed", {"parameterServer": server, "evaluator": evaluator})
    cluster.apply(given, namespace=namespace)
    for field, change in FIXED:
        patch = json.dumps({"spec": change})
        answer = cluster.kubectl(
            *("-n", namespace, "patch", "tj", "fixed", "--type=merge", "-p", patch), check=False
        )
        assert f"{field} cannot change" in answer.stderr, f"{change}: {answer.stdout}{answer.stderr}"
    for change in FREE:
        cluster.kubectl(
            *("-n", namespace, "patch", "tj", "fixed", "--type=merge", "-p", json.dumps({"spec": change}))
        )
    local = merge(given["spec"], {"consistency": LOCAL})
    cluster.apply({**given, "metadata": {"name": "local"}, "spec": local}, namespace=namespace)
    for change in FIXED_LOCALLY:
        patch = json.dumps({"spec": change})
        answer = cluster.kubectl(
            *("-n", namespace, "patch", "tj", "local", "--type=merge", "-p", patch), check=False
        )
        assert "in mode local, only consistency.steps can change" in answer.stderr, answer.stderr
    steps = json.dumps({"spec": {"consistency": {"steps": 9}}})
    cluster.kubectl("-n", namespace, "patch", "tj", "local", "--type=merge", "-p", steps)
    fixed = merge(given["spec"], {"consistency": {"deterministic": True}})
    cluster.apply({**given, "metadata": {"name": "lanes"}, "spec": fixed}, namespace=namespace)
    answer = cluster.kubectl("-n", namespace, "scale", "tj/lanes", "--replicas=4", check=False)
    assert "worker.replicas cannot change with consistency.deterministic" in answer.stderr
    constant = merge(given["spec"], {"consistency": {"deterministic": True, "globalBatchSize": 4}})
    cluster.apply({**given, "metadata": {"name": "constant"}, "spec": constant}, namespace=namespace)
    for replicas in (4, 5):
        answer = cluster.kubectl(
            "-n", namespace, "scale", "tj/constant", f"--replicas={replicas}", check=False
        )
        assert ("is above consistency.globalBatchSize" in answer.stderr) == (replicas == 5), answer.stderr


def test_explain_describes_each_field_of_a_spec(cluster: GivenCluster) -> None:
    text = cluster.kubectl("explain", "tj.spec", "--recursive").stdout
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for field in schema["properties"]["spec"]["properties"]:
        assert f"\n  {field}\t" in text.replace("   ", "  "), field
    told = cluster.kubectl("explain", "tj.spec.worker.replicas").stdout
    assert schema["properties"]["spec"]["properties"]["worker"]["properties"]["replicas"]["description"][
        :20
    ] in " ".join(told.split())
