"""What the other end-to-end tests take for granted of their cluster: that it is a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import (
    Cluster,
    ClusterError,
    ClusterUnavailable,
    GivenCluster,
    apt,
    base_image,
    host,
    processes,
    wait_for,
)
from tests.e2e.cluster.processes import marked
from tests.e2e.conftest import install_definition, unavailable
from tests.testing.operator_process import Jobs, OperatorProcess

LIMIT = timedelta(minutes=5)


def pod(name: str, image: str, program: str, **changes: Any) -> dict[str, Any]:
    """A pod that runs a Python program once."""
    container = {"name": "main", "image": image, "command": ["python3", "-u", "-c", program]}
    container |= changes.pop("container", {})
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        **changes,
    }
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def phase(cluster: GivenCluster, namespace: str, name: str) -> str:
    return str(cluster.get("pod", "-n", namespace, name)["status"]["phase"])


def wait_for_pod(cluster: GivenCluster, namespace: str, name: str, wanted: str) -> None:
    def explain() -> str:
        return (
            cluster.kubectl("describe", "pod", "-n", namespace, name, check=False).stdout[-2000:]
            + (cluster.kubectl("logs", "-n", namespace, name, check=False).stdout[-1000:])
        )

    reached = {wanted, "Succeeded", "Failed"}
    wait_for(
        lambda: phase(cluster, namespace, name) in reached,
        what=f"{name} {wanted}",
        timeout=LIMIT,
        explain=explain,
    )
    found = phase(cluster, namespace, name)
    assert found == wanted, explain()


SERVE = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"hello from the service")
    def log_message(self, *arguments): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
FETCH = """
import time, urllib.request
for attempt in range(60):
    try:
        print(urllib.request.urlopen("http://{host}:8080/", timeout=2).read().decode()); break
    except OSError as error:
        print(error); time.sleep(0.5)
else:
    raise SystemExit("never reached")
"""
ASK = """
import json, ssl, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount"
token, namespace = open(account + "/token").read(), open(account + "/namespace").read()
context = ssl.create_default_context(cafile=account + "/ca.crt")
for kind in ("pods", "secrets"):
    url = f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/{kind}"
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    try:
        answer = json.load(urllib.request.urlopen(request, context=context, timeout=10))
        print(kind, len(answer["items"]))
    except urllib.error.HTTPError as error:
        print(kind, error.code)
"""


@pytest.fixture
def no_cluster() -> None:
    """Skip the test where a cluster is up already: it is not the test's to take down."""
    if os.environ.get("E2E_KUBECONFIG"):
        pytest.skip("E2E_KUBECONFIG is set, so no cluster is brought up here")
    if marked():
        pytest.skip("a cluster is up on this machine already, and it is not this test's to take down")


@pytest.mark.nightly
@pytest.mark.usefixtures("no_cluster")
def test_remains_of_a_killed_cluster_do_not_count_as_the_machine() -> None:
    killed = Cluster.up()
    processes.end(processes.marked(killed.layout.state_dir), force=True)
    cluster = Cluster.up()
    cluster.down()
    assert cluster.before == killed.before
    assert host.left_behind(host_before(cluster)) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("no_cluster")
def test_down_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a component was killed, and a pod with a volume, a limit and a network is still running.

    This cluster is always the one built from Debian's source, whatever the other tests run on, and a job's
    life is tried on it: it starts, is scaled and deleted.
    """
    for variable in ("ELASTIC_PS_KUBERNETES_BIN", "KUBEBUILDER_ASSETS"):
        monkeypatch.delenv(variable, raising=False)
    try:
        apt.require_debian()
        base_image()
        cluster = Cluster.up()
    except ClusterUnavailable as error:
        unavailable(error)
        raise
    try:
        cluster.load_image(base_image().tag)
        volume = {"name": "scratch", "emptyDir": {"medium": "Memory"}}
        mount = {
            "resources": {"limits": {"memory": "64Mi"}},
            "volumeMounts": [{"name": "scratch", "mountPath": "/x"}],
        }
        sleeper = "import time; time.sleep(3600)"
        cluster.apply(pod("stays", base_image().tag, sleeper, container=mount, volumes=[volume]))
        wait_for_pod(cluster, "default", "stays", "Running")
        sleeping = cluster.pod_pid("stays")
        assert Path(f"/proc/{sleeping}").exists()
        assert Cluster.up().reused, "a second `up` uses the cluster that is up"
        _live_and_die(cluster, tmp_path / "operator.log")
        cluster.stop("kubelet", kill=True)
    finally:
        cluster.down()
    assert not marked()
    assert not Path(f"/proc/{sleeping}").exists()
    assert host.left_behind(host_before(cluster)) == []
    cluster.down()  # nothing to do, and no error


def host_before(cluster: Cluster) -> host.Inventory:
    assert cluster.before is not None, "it was up already"
    return cluster.before


def _live_and_die(cluster: Cluster, log: Path) -> None:
    """A job of containers that sleep is started, scaled and deleted, by an operator beside the cluster."""
    install_definition(cluster)
    # What collects what a deleted job leaves looks for new definitions every half minute; a new one at once.
    cluster.stop("kube-controller-manager")
    cluster.start("kube-controller-manager")
    operator = OperatorProcess(cluster.kubeconfig, "default", log)
    operator.start()
    try:
        jobs = Jobs(cluster, "default", base_image().tag)
        jobs.apply("digits", worker={"replicas": 1})
        jobs.wait_status("digits", phase="Running", workers="1/1")
        jobs.kubectl("scale", "tj/digits", "--replicas=2")
        jobs.wait_status("digits", workers="2/2")
        jobs.kubectl("delete", "tj", "digits")
        jobs.wait_gone("digits")
    finally:
        operator.close()


def test_pods_reach_each_other_by_a_service_name(
    cluster: GivenCluster, namespace: str, python_image: str
) -> None:
    ports = [{"port": 8080}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    headless = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web-headless"}}
    cluster.apply(
        {**service, "spec": {"selector": {"app": "web"}, "ports": ports}},
        {**headless, "spec": {"selector": {"app": "web"}, "ports": ports, "clusterIP": "None"}},
        pod("web", python_image, SERVE),
        namespace=namespace,
    )
    wait_for_pod(cluster, namespace, "web", "Running")
    away = f"web-headless.{namespace}.svc.cluster.local"
    clients = {"client": "web", "client-headless": away}
    cluster.apply(
        *(pod(name, python_image, FETCH.format(host=host)) for name, host in clients.items()),
        namespace=namespace,
    )
    for name in clients:
        wait_for_pod(cluster, namespace, name, "Succeeded")
        assert "hello from the service" in cluster.kubectl("logs", "-n", namespace, name).stdout


@pytest.mark.nightly
def test_a_pod_may_ask_the_api_server_what_its_role_allows(
    cluster: GivenCluster, namespace: str, python_image: str
) -> None:
    cluster.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    cluster.kubectl("create", "role", "reader", "--verb=list", "--resource=pods", "-n", namespace)
    cluster.kubectl(
        "create",
        "rolebinding",
        "reader",
        "--role=reader",
        f"--serviceaccount={namespace}:reader",
        "-n",
        namespace,
    )
    cluster.apply(pod("asks", python_image, ASK, serviceAccountName="reader"), namespace=namespace)
    wait_for_pod(cluster, namespace, "asks", "Succeeded")
    assert cluster.kubectl("logs", "-n", namespace, "asks").stdout.split("\n")[:2] == [
        "pods 1",
        "secrets 403",
    ]


@pytest.mark.nightly
def test_kubectl_scales_a_custom_resource(cluster: GivenCluster, namespace: str) -> None:
    count = {"type": "integer"}
    counts = {"type": "object", "properties": {"replicas": count}}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": counts, "status": counts}}},
        "subresources": {
            "status": {},
            "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
        },
    }
    group = f"{namespace}.elastic-ps.test"
    names = {"plural": "gadgets", "singular": "gadget", "kind": "Gadget", "listKind": "GadgetList"}
    cluster.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"gadgets.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
        }
    )
    try:
        cluster.established(f"gadgets.{group}")
        gadget = {
            "apiVersion": f"{group}/v1",
            "kind": "Gadget",
            "metadata": {"name": "one"},
            "spec": {"replicas": 2},
        }
        cluster.apply(gadget, namespace=namespace)
        cluster.kubectl("scale", f"gadgets.{group}/one", "--replicas=5", "-n", namespace)
        assert cluster.get(f"gadgets.{group}", "one", "-n", namespace)["spec"] == {"replicas": 5}
    finally:
        cluster.kubectl("delete", "crd", f"gadgets.{group}")


@pytest.mark.nightly
def test_memory_limits_are_real(cluster: GivenCluster, namespace: str, python_image: str) -> None:
    hungry = "data = []\nwhile True: data.append(bytearray(10_000_000))"
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    cluster.apply(pod("hungry", python_image, hungry, container=limits), namespace=namespace)
    wait_for_pod(cluster, namespace, "hungry", "Failed")
    state = cluster.get("pod", "-n", namespace, "hungry")["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["reason"] == "OOMKilled"
    assert state["terminated"]["exitCode"] == 137


@pytest.mark.nightly
def test_a_claim_gets_a_volume_that_any_user_may_write_to(
    cluster: GivenCluster, namespace: str, python_image: str
) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    used = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "container": {"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
    }
    cluster.apply(
        claim, pod("writes", python_image, "open('/data/x', 'w').write('kept')", **used), namespace=namespace
    )
    wait_for_pod(cluster, namespace, "writes", "Succeeded")
    cluster.apply(pod("reads", python_image, "print(open('/data/x').read())", **used), namespace=namespace)
    wait_for_pod(cluster, namespace, "reads", "Succeeded")
    assert cluster.kubectl("logs", "-n", namespace, "reads").stdout == "kept\n"


CONNECTION = """
import socket, time
with socket.create_connection(("{address}", 8080), timeout=3) as link: print("reached")
"""


@pytest.mark.nightly
def test_a_pod_can_be_cut_off_and_healed(local_cluster: Cluster, namespace: str, python_image: str) -> None:
    local_cluster.apply(pod("web", python_image, SERVE), namespace=namespace)
    wait_for_pod(local_cluster, namespace, "web", "Running")
    address = local_cluster.get("pod", "-n", namespace, "web")["status"]["podIP"]
    connect = CONNECTION.format(address=address)

    def try_connect(name: str, wanted: str) -> None:
        local_cluster.apply(pod(name, python_image, connect), namespace=namespace)
        wait_for_pod(local_cluster, namespace, name, wanted)

    local_cluster.cut("web", namespace=namespace)
    try_connect("while-cut", "Failed")
    local_cluster.heal("web", namespace=namespace)
    try_connect("after-healing", "Succeeded")


def test_a_given_cluster_says_that_it_is_not_ours(tmp_path: Path) -> None:
    given = GivenCluster(tmp_path / "kubeconfig")
    actions: list[Callable[[], object]] = [
        lambda: given.stop("kube-apiserver"),
        lambda: given.cut("web"),
        lambda: given.load_image("localhost/x:1"),
    ]
    for action in actions:
        with pytest.raises(ClusterError, match="not ours"):
            action()
    given.down()


def test_json_of_a_given_kubectl_is_an_error_with_its_words(cluster: GivenCluster) -> None:
    with pytest.raises(ClusterError, match="NotFound"):
        cluster.get("pod", "nobody")
    assert json.loads(cluster.kubectl("version", "-o", "json").stdout)["serverVersion"]
