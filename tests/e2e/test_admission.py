"""The chart's admission policy on a real API server: it refuses what the operator refuses, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import yaml

from elastic_operator.names import SECRET_TYPE
from tests.e2e.cluster import GivenCluster, wait_for
from tests.e2e.conftest import minor_version
from tests.testing.operator_process import sleeper
from tests.testing.templates import FORBIDDEN, PERMITTED, volume
from tools.render_install import render

pytestmark = pytest.mark.usefixtures("definition")

APPARMOR = "container.apparmor.security.beta.kubernetes.io/worker"
Try = Callable[..., dict[str, str]]


def worker(spec: dict[str, Any] | None, **template: Any) -> dict[str, Any]:
    """A job whose workers have this template, and nothing else in it."""
    document = sleeper("job", "localhost/none:1")
    document["spec"]["worker"]["template"] = {"spec": spec, **template}
    return document


@pytest.fixture
def creating(cluster: GivenCluster, namespace: str) -> Try:
    """Tries to create jobs, and says of those that are refused what was said; nothing is stored."""

    def create(jobs: list[dict[str, Any]], where: str = namespace) -> dict[str, str]:
        items = [{**job, "metadata": {"name": f"job-{index}"}} for index, job in enumerate(jobs)]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        command = ("create", "-n", where, "--dry-run=server", "-f", "-")
        told = cluster.kubectl(*command, stdin=text, check=False)
        accepted = told.stdout.count("created (server dry run)")
        refused = {
            name: line
            for line in told.stderr.splitlines()
            for name in [item["metadata"]["name"] for item in items]
            if f'"{name}"' in line
        }
        assert accepted + len(refused) == len(items), told.stdout + told.stderr
        return refused

    return create


@pytest.fixture
def policy(cluster: GivenCluster, namespace: str, creating: Try) -> Iterator[str]:
    """The policy, with all that the cases need permitted in a second namespace, which is returned."""
    if minor_version(cluster) < 30:
        pytest.skip("the API server knows no ValidatingAdmissionPolicy")
    opened = f"{namespace}-opened"
    permitted: dict[str, Any] = {}
    for _, _, needs in FORBIDDEN:
        for field, value in needs.items():
            permitted[field] = [*permitted.get(field, []), *value] if isinstance(value, list) else value
    values = {
        "fullnameOverride": namespace,
        "namespaces": [namespace, opened],
        "admissionPolicy": {"enabled": True},
        "templatePermissions": {
            opened: permitted,
            "*": {"hostPaths": ["/shared/"], "secrets": ["team-[!ab]?"]},
        },
    }
    cluster.kubectl("create", "namespace", opened)
    old = worker({"hostNetwork": True})
    cluster.apply({**old, "metadata": {"name": "before"}}, namespace=namespace)
    documents = list(yaml.safe_load_all(render(values)["admission-policy.yaml"]))
    try:
        cluster.apply(*documents)
        # The API server needs a moment until a policy is in force.
        wait_for(
            lambda: bool(creating([worker({"hostPID": True})])),
            what="the policy is in force",
            timeout=timedelta(seconds=60),
        )
        yield opened
    finally:
        for document in documents:
            kind, name = document["kind"], document["metadata"]["name"]
            cluster.kubectl("delete", kind, name, "--ignore-not-found")
        cluster.kubectl("delete", "namespace", opened, "--wait=false")


def test_it_refuses_what_the_operator_refuses(
    cluster: GivenCluster, namespace: str, policy: str, creating: Try
) -> None:
    jobs = [worker(template) for template, _, _ in FORBIDDEN]
    refused = creating(jobs)
    for index, (template, _, needs) in enumerate(FORBIDDEN):
        told = refused.get(f"job-{index}", "it was accepted")
        assert f"templatePermissions: {{{namespace}: {{{next(iter(needs))}: " in told, (template, told)
    assert creating(jobs, policy) == {}, "where it is permitted"
    assert creating([worker(template) for template in PERMITTED]) == {}

    server = worker({})
    server["spec"]["parameterServer"]["template"] = {"spec": {"hostNetwork": True}}
    annotated = worker({}, metadata={"annotations": {APPARMOR: "unconfined"}})
    evaluator = worker({})
    evaluator["spec"]["evaluator"] = {"entrypoint": "a:b", "template": {"spec": {"nodeName": "n"}}}
    beside = [volume(hostPath={"path": path}) for path in ("/shared/../etc", "/sharedly", "/")]
    beside += [volume(secret={"secretName": name}) for name in ("team-ax", "team-xyz", "a-team-xy")]
    wrong = [server, annotated, evaluator, *map(worker, beside)]
    assert len(creating(wrong)) == len(wrong)

    empty = {"containers": [{"name": "worker", "livenessProbe": None, "securityContext": None}]}
    within = [volume(hostPath={"path": "/shared//a"}), volume(secret={"secretName": "team-xy"})]
    within += [{"volumes": None, "hostNetwork": None, "securityContext": None}, empty]
    profile = {"metadata": {"annotations": {APPARMOR: "runtime/default"}}}
    assert creating([*map(worker, within), worker(None), worker({}, **profile)]) == {}

    # A job that was there before is no prisoner of the policy.
    cluster.kubectl("-n", namespace, "annotate", "tj", "before", "a=b")
    cluster.kubectl("-n", namespace, "scale", "tj/before", "--replicas=3")
    image = json.dumps({"spec": {"image": "another"}})
    edit = ("-n", namespace, "patch", "tj", "before", "--type=merge", "-p", image)
    assert "hostNamespaces: true" in cluster.kubectl(*edit, check=False).stderr
    cluster.kubectl("-n", namespace, "delete", "tj", "before")


def test_the_operator_is_held_to_the_secrets_of_jobs(cluster: GivenCluster, namespace: str) -> None:
    """Though RBAC lets it create and update any Secret of the namespace."""
    if minor_version(cluster) < 30:
        pytest.skip("the API server knows no ValidatingAdmissionPolicy")
    values = {"fullnameOverride": namespace, "admissionPolicy": {"enabled": True}}
    documents = list(yaml.safe_load_all(render(values)["admission-secrets.yaml"]))
    account = f"system:serviceaccount:elastic-ps-system:{namespace}"
    granted = ("--verb=create,update", "--resource=secrets")
    cluster.kubectl("-n", namespace, "create", "role", "writer", *granted)
    cluster.kubectl("-n", namespace, "create", "rolebinding", "writer", "--role=writer", f"--user={account}")

    def refused(verb: str, name: str, kind: str) -> str:
        metadata = {"name": name, "annotations": {"kubernetes.io/service-account.name": "default"}}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata}
        command = ("-n", namespace, f"--as={account}", verb, "--dry-run=server", "-f", "-")
        done = cluster.kubectl(*command, stdin=json.dumps(secret), check=False)
        return "" if done.returncode == 0 else done.stderr

    cluster.kubectl("-n", namespace, "create", "secret", "generic", "foreign")
    assert refused("create", "any", "Opaque") == "", "without the policy"
    try:
        cluster.apply(*documents)
        wait_for(
            lambda: "its own one" in refused("create", "any", "Opaque"),
            what="the policy is in force",
            timeout=timedelta(seconds=60),
        )
        assert "its own one" in refused("replace", "foreign", "Opaque")
        assert "its own one" in refused("create", "token", "kubernetes.io/service-account-token")
        assert refused("create", "digits-tls-ps-0", SECRET_TYPE) == ""
        cluster.kubectl("-n", namespace, "create", "secret", "generic", "of-a-person")
    finally:
        for document in documents:
            cluster.kubectl("delete", document["kind"], document["metadata"]["name"], "--ignore-not-found")
