"""One cluster for the whole session of end-to-end tests, brought up at its first use.

Where none can run, the tests are skipped with the reason; `ELASTIC_PS_E2E_REQUIRED=1` makes that a failure,
so that a CI that should have run them cannot pass without.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    given_cluster,
    host,
    wait_for,
)
from tests.testing.operator_process import OperatorProcess
from tools.load_images import load_images

IMAGES_LOADED = pytest.StashKey[Future[None]]()
"""Ends when the cluster has the images of this session."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "builds_images: builds the images itself, so it runs late")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First what does without the session's cluster, which lives from its first use to the session's end: one
    # of these tests brings up a cluster of its own, and a machine carries one. What needs the images comes
    # last: they are built meanwhile.
    items.sort(key=lambda item: (needs_images(item), "cluster" in getattr(item, "fixturenames", ())))


def needs_images(item: pytest.Item) -> bool:
    built = item.get_closest_marker("builds_images") is not None
    return built or "training_images" in getattr(item, "fixturenames", ())


def unavailable(error: ClusterUnavailable) -> None:
    """Skip with the reason, or fail where skipping is not allowed."""
    if os.environ.get("ELASTIC_PS_E2E_REQUIRED") == "1":
        pytest.fail(f"ELASTIC_PS_E2E_REQUIRED=1, but {error}", pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[GivenCluster]:
    """The cluster of E2E_KUBECONFIG, one that is up already, or a new one for this session.

    A new one is taken down at the end, and what it left on the machine is an error. Where a test needs the
    images, they are built and loaded from now on, beside the tests that need none.
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
    with ours, ThreadPoolExecutor(1, thread_name_prefix="images") as beside:
        if any(needs_images(item) for item in request.session.items):
            request.config.stash[IMAGES_LOADED] = beside.submit(load_images, ours)
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


@pytest.fixture(scope="session")
def training_images(cluster: GivenCluster, pytestconfig: pytest.Config) -> None:
    """The operator's and the training image, built from the Dockerfiles and known to the node."""
    if isinstance(cluster, Cluster):  # whoever gave a cluster has loaded them
        pytestconfig.stash[IMAGES_LOADED].result()


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
