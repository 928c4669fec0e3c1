"""What the API server itself refuses and explains, without any operator: the definition and its rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_operator.crd import crd
from elastic_operator.merging import merge
from tests.e2e.cluster import GivenCluster
from tests.e2e.conftest import knows_rules
from tests.testing.operator_process import sleeper

pytestmark = pytest.mark.usefixtures("definition")

CLAIM = {"storage": "1Gi"}
LOCAL: dict[str, Any] = {"mode": "local", "steps": 3}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("worker.replicas is below worker.minReplicas", {"worker": {"replicas": 1, "minReplicas": 2}}),
    ("worker.replicas is above worker.maxReplicas", {"worker": {"replicas": 3, "maxReplicas": 2}}),
    (
        "consistency.backupWorkers and deterministic cannot be combined",
        {"consistency": {"deterministic": True, "backupWorkers": 1}},
    ),
    (
        "consistency.backupWorkers and globalBatchSize cannot be combined",
        {"consistency": {"globalBatchSize": 8, "backupWorkers": 1}},
    ),
    (
        "consistency.globalBatchSize works only with mode sync",
        {"consistency": {"mode": "async", "globalBatchSize": 8}},
    ),
    (
        "consistency.balance works only with globalBatchSize or with mode local",
        {"consistency": {"balance": "speed"}},
    ),
    (
        "consistency.balance works only with outer diloco or average",
        {"consistency": LOCAL | {"outer": "easgd", "balance": "speed"}},
    ),
    (
        "consistency.balance speed and deterministic cannot be combined",
        {"consistency": {"globalBatchSize": 8, "deterministic": True, "balance": "speed"}},
    ),
    (
        "worker.replicas is above consistency.globalBatchSize",
        {"worker": {"replicas": 3}, "consistency": {"globalBatchSize": 2}},
    ),
    (
        "consistency.maxStaleness must be set with mode bounded, and only then",
        {"consistency": {"mode": "bounded"}},
    ),
    (
        "consistency.maxStaleness must be set with mode bounded, and only then",
        {"consistency": {"maxStaleness": 3}},
    ),
    (
        "consistency.backupWorkers and deterministic work only with mode sync",
        {"consistency": {"mode": "async", "deterministic": True}},
    ),
    ("consistency.reads works only with mode async", {"consistency": {"reads": "inconsistent"}}),
    (
        "consistency.stalenessScale works only with mode async or bounded",
        {"consistency": {"stalenessScale": "inverse"}},
    ),
    (
        "consistency.maxStalenessP99 works only with mode async or bounded or sync",
        {"consistency": LOCAL | {"maxStalenessP99": 2}},
    ),
    (
        "consistency.maxStalenessP99 and deterministic, backupWorkers or globalBatchSize cannot be combined",
        {"consistency": {"deterministic": True, "maxStalenessP99": 2}},
    ),
    ("consistency.gradients must be set with mode accumulate", {"consistency": {"gradients": 2}}),
    ("consistency.gradients must be set with mode accumulate", {"consistency": {"mode": "accumulate"}}),
    ("consistency.steps must be set with mode local, and only then", {"consistency": {"mode": "local"}}),
    ("consistency.steps must be set with mode local, and only then", {"consistency": {"steps": 3}}),
    ("consistency.fragments works only with mode local", {"consistency": {"fragments": 2}}),
    ("consistency.fragments is above consistency.steps", {"consistency": LOCAL | {"fragments": 1000}}),
    ("consistency.overlap works only with mode local", {"consistency": {"overlap": 1}}),
    (
        "consistency.overlap has to be below the steps between two exchanges",
        {"consistency": LOCAL | {"overlap": 1000}},
    ),
    (
        "consistency.overlap does not work with outer easgd",
        {"consistency": LOCAL | {"steps": 9, "overlap": 1, "outer": "easgd"}},
    ),
    ("consistency.quorum works only with mode local", {"consistency": {"quorum": 1}}),
    (
        "consistency.quorum works only with outer diloco or average",
        {"consistency": LOCAL | {"quorum": 1, "outer": "easgd"}},
    ),
    ("consistency.quorum is above worker.minReplicas", {"consistency": LOCAL | {"quorum": 2}}),
    ("consistency.grace works only with mode local", {"consistency": {"grace": "1s"}}),
    ("consistency.grace works only with quorum", {"consistency": LOCAL | {"grace": "1s"}}),
    ("consistency.outer works only with mode local", {"consistency": {"outer": "diloco"}}),
    ("consistency.outerLearningRate works only with mode local", {"consistency": {"outerLearningRate": 0.5}}),
    ("consistency.outerMomentum works only with mode local", {"consistency": {"outerMomentum": 0.5}}),
    (
        "consistency.outerLearningRate works only with outer diloco or delayed or easgd or downpour",
        {"consistency": LOCAL | {"outer": "average", "outerLearningRate": 0.5}},
    ),
    (
        "consistency.outerMomentum works only with outer diloco or delayed",
        {"consistency": LOCAL | {"outer": "downpour", "outerMomentum": 0.5}},
    ),
    (
        "consistency.outerLearningRate is at most 1 with outer easgd",
        {"consistency": LOCAL | {"outer": "easgd", "outerLearningRate": 1.5}},
    ),
    ("parameterServer.bucketBytes is 0, or at least 1024", {"parameterServer": {"bucketBytes": 512}}),
    ("a job with several shards or with standbys needs checkpoint", {"parameterServer": {"replicas": 2}}),
    (
        "a job with several shards or with standbys needs checkpoint",
        {"parameterServer": {"durability": "standby"}},
    ),
    ("unencryptedAllReduce works only with strategy all-reduce", {"unencryptedAllReduce": True}),
]
"""Words of the refusal, and the spec that is refused."""

FIXED: list[tuple[str, dict[str, Any]]] = [
    ("entrypoint", {"entrypoint": "another:main"}),
    ("arguments", {"arguments": {"epochs": 3}}),
    ("consistency.deterministic and globalBatchSize", {"consistency": {"deterministic": True}}),
    ("consistency.deterministic and globalBatchSize", {"consistency": {"globalBatchSize": 2}}),
    ("to or from mode local, consistency", {"consistency": {"mode": "local", "steps": 3}}),
    ("evaluator", {"evaluator": None}),
    ("evaluator", {"evaluator": {"entrypoint": "another:main"}}),
    ("evaluator", {"evaluator": {"arguments": {"epochs": 3}}}),
    ("evaluator", {"evaluator": {"every": 7}}),
    ("evaluator", {"evaluator": {"backlog": 7}}),
    ("evaluator", {"evaluator": {"best": {"metric": "prec@1", "mode": "max"}}}),
    ("strategy", {"strategy": "all-reduce"}),
    ("unencryptedAllReduce", {"unencryptedAllReduce": True}),
    ("data", {"data": {"seed": 7}}),
    ("parameterServer.bucketBytes", {"parameterServer": {"bucketBytes": 65536}}),
    ("parameterServer.replicas", {"parameterServer": {"replicas": 2}}),
    ("parameterServer.durability", {"parameterServer": {"durability": "standby"}}),
    ("checkpoint.volumeClaim", {"parameterServer": {"checkpoint": {"volumeClaim": {"storage": "2Gi"}}}}),
    ("checkpoint.volumeClaim", {"parameterServer": {"checkpoint": {"volumeClaim": None}}}),
    ("checkpoint.existingClaim", {"parameterServer": {"checkpoint": {"existingClaim": "mine"}}}),
    ("checkpoint.resumeFrom", {"parameterServer": {"checkpoint": {"resumeFrom": {"job": "earlier"}}}}),
]
"""A field that cannot change, and a change of it."""

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


def test_each_rule_of_the_definition_is_tried() -> None:
    def messages(schema: dict[str, Any]) -> Iterator[str]:
        yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", []))
        for inner in schema.get("properties", {}).values():
            yield from messages(inner)

    tried = [words for words, _ in REFUSED] + [f"{field} cannot change" for field, _ in FIXED]
    tried += ["metadata.name must have", "worker.replicas cannot change"]
    tried += ["in mode local, consistency besides steps cannot change"]
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    untried = [message for message in messages(schema) if not any(words in message for words in tried)]
    assert untried == []


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
        assert "in mode local, consistency besides steps cannot change" in answer.stderr, answer.stderr
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
