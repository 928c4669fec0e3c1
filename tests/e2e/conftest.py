"""One cluster for the whole session of end-to-end tests, brought up at its first use.

Where none can run, the tests are skipped with the reason; `ELASTIC_PS_E2E_REQUIRED=1` makes that a failure,
so that a CI that should have run them cannot pass without.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_operator.crd import crd
from tests.e2e.cluster import (
    Cluster,
    ClusterUnavailable,
    GivenCluster,
    apt,
    base_image,
    build_image,
    given_cluster,
    host,
    wait_for,
)
from tests.e2e.operator_process import OperatorProcess
from tools.load_images import IMAGES, ROOT


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_cluster: brings its own cluster up, so it runs first")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A machine carries one cluster, and the session's lives from its first use to the session's end.
    items.sort(key=lambda item: item.get_closest_marker("own_cluster") is None)


def unavailable(error: ClusterUnavailable) -> None:
    """Skip with the reason, or fail where skipping is not allowed."""
    if os.environ.get("ELASTIC_PS_E2E_REQUIRED") == "1":
        pytest.fail(f"ELASTIC_PS_E2E_REQUIRED=1, but {error}", pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster() -> Iterator[GivenCluster]:
    """The cluster of E2E_KUBECONFIG, one that is up already, or a new one for this session.

    A new one is taken down at the end, and what it left on the machine is an error.
    """
    given = given_cluster()
    if given is not None:
        yield given
        return
    try:
        apt.require_debian()
        before = host.inventory()
        ours = Cluster.up()
    except ClusterUnavailable as error:
        unavailable(error)
        raise  # not reached: the line above raises
    with ours:
        yield ours
    if not ours.reused:
        assert host.left_behind(before) == []


@pytest.fixture(scope="session")
def local_cluster(cluster: GivenCluster) -> Cluster:
    """The same cluster for tests that need what only ours can do; skips on a given one."""
    if not isinstance(cluster, Cluster):
        pytest.skip("this test breaks the cluster, and E2E_KUBECONFIG's is not ours to break")
    return cluster


@pytest.fixture(scope="session")
def python_image(cluster: GivenCluster) -> str:
    """An image with Python that the cluster's nodes have or can pull."""
    if not isinstance(cluster, Cluster):
        return os.environ.get("E2E_PYTHON_IMAGE", "python:3.11-slim-bookworm")
    image = base_image()
    cluster.load_image(image.tag)
    return image.tag


@pytest.fixture(scope="module")
def training_images(cluster: GivenCluster) -> None:
    """The operator's and the training image, built from the Dockerfiles and known to the node."""
    if not isinstance(cluster, Cluster):
        return  # whoever gave the cluster has loaded them
    for dockerfile, tag in IMAGES.items():
        build_image(ROOT / dockerfile, ROOT, tag)
        cluster.load_image(tag)


def minor_version(cluster: GivenCluster) -> int:
    """37, of a 1.37.1."""
    version = json.loads(cluster.kubectl("version", "-o", "json").stdout)["serverVersion"]
    return int(version["minor"].rstrip("+"))


def install_definition(cluster: GivenCluster) -> None:
    """Make the TrainingJob's definition, without Helm."""
    cluster.apply(crd(rules=minor_version(cluster) >= 29))
    cluster.established("trainingjobs.elastic-ps.dev")


@pytest.fixture(scope="module")
def definition(cluster: GivenCluster) -> None:
    """The TrainingJob's definition, as made without Helm."""
    install_definition(cluster)


@pytest.fixture
def restricted(cluster: GivenCluster, namespace: str) -> str:
    """The test's namespace, restricted."""
    restrict(cluster, namespace)
    return namespace


def restrict(cluster: GivenCluster, namespace: str) -> None:
    """Let the namespace take only pods of Pod Security "restricted", where the server knows that."""
    label = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", namespace, label, "--overwrite")


@pytest.fixture
def idle(cluster: GivenCluster, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator for the namespace that has not been started."""
    process = OperatorProcess(cluster.kubeconfig, namespace, tmp_path / "operator.log")
    yield process
    process.close()
    print(process.log.read_text()[-6000:] if process.log.exists() else "")


@pytest.fixture
def operator(idle: OperatorProcess) -> OperatorProcess:
    idle.start()
    return idle


@pytest.fixture
def namespace(cluster: GivenCluster) -> Iterator[str]:
    """A namespace for one test, deleted at its end."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    account = ("-n", name, "get", "serviceaccount", "default")  # without it no pod can be made
    wait_for(
        lambda: cluster.kubectl(*account, check=False).returncode == 0,
        what="the namespace gets its service account",
        timeout=timedelta(seconds=60),
    )
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
