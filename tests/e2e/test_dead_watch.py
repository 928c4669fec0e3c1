"""A watch that is dead while the process lives: the liveness probe fails, so that the pod is restarted."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster import GivenCluster, wait_for
from tests.testing.operator_process import LIMIT, Jobs, OperatorProcess
from tools.render_install import render

pytestmark = pytest.mark.usefixtures("definition")


def role(namespace: str, *, without: tuple[str, str] | None) -> dict[str, Any]:
    """The chart's role for a namespace; `without` is a (verb, resource) to leave out."""
    documents = yaml.safe_load_all(render({"namespaces": [namespace]})["rbac.yaml"])
    found: dict[str, Any] = next(document for document in documents if document["kind"] == "Role")
    for rule in found["rules"]:
        if without is not None and without[1] in rule["resources"]:
            rule["verbs"].remove(without[0])
    return found


def kubeconfig(cluster: GivenCluster, namespace: str, account: str) -> dict[str, Any]:
    """A kubeconfig for the service account."""
    token = cluster.kubectl("-n", namespace, "create", "token", account).stdout.strip()
    config: dict[str, Any] = json.loads(
        cluster.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json").stdout
    )
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    return config


@pytest.fixture
def limited(cluster: GivenCluster, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator with the rights of a role of its own, `operator`; not started."""
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "elastic-ps"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "operator"},
            "roleRef": role_ref,
            "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
        },
        namespace=namespace,
    )
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(kubeconfig(cluster, namespace, "operator")))
    process = OperatorProcess(path, namespace, tmp_path / "operator.log")
    yield process
    process.close()
    print(process.log.read_text()[-6000:] if process.log.exists() else "")


def liveness(operator: OperatorProcess) -> str:
    """What the probe is answered."""
    try:
        return operator.get("/healthz")
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"
    except OSError as error:
        return f"no answer: {error}"


@pytest.mark.nightly
def test_dead_watch_fails_the_liveness_probe(
    cluster: GivenCluster, namespace: str, python_image: str, limited: OperatorProcess
) -> None:
    """A watch that the API server refuses ends for good, while listings and all other work go on."""
    jobs = Jobs(cluster, namespace, python_image)
    cluster.apply(role(namespace, without=("watch", "pods")), namespace=namespace)
    limited.start("--resync=1s", "--watch-limit=5s")
    jobs.apply("digits", worker={"replicas": 1})
    wait_for(
        lambda: liveness(limited).startswith("503: the watch of pods has missed a change"),
        what="the liveness probe fails",
        timeout=LIMIT,
        explain=lambda: f"it says {liveness(limited)!r}",
    )
    assert limited.alive
    assert limited.close() == 0, "what the kubelet does next: SIGTERM, and a new start"

    cluster.apply(role(namespace, without=None), namespace=namespace)
    limited.start("--resync=1s", "--watch-limit=5s")
    jobs.wait_status("digits", phase="Running")
    jobs.kubectl("scale", "tj/digits", "--replicas=2")
    jobs.wait_status("digits", workers="2/2")
    assert liveness(limited) == "ok"
