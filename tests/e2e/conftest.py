"""One cluster for the whole session of end-to-end tests, brought up at its first use.

The processes of a session (`pytest --numprocesses`) share it: the first to use it brings it up, the last
takes it down. A module marked `alone` breaks or changes what all tests use; no other process's tests run on
the cluster meanwhile.

Where none can run, the tests are skipped with the reason; `ELASTIC_PS_E2E_REQUIRED=1` makes that a failure,
so that a CI that should have run them cannot pass without.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

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
from tests.e2e.cluster.shell import lock, locked, take_long
from tests.testing.operator_process import OperatorProcess
from tools.load_images import load_images

IMAGES_LOADED = pytest.StashKey[Future[None]]()
"""Ends when the cluster has the images of this session."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "builds_images: builds the images itself, so it runs late")
    config.addinivalue_line("markers", "alone: (of a module) no other tests use the cluster meanwhile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First what does without the session's cluster, which lives from its first use to the session's end: one
    # of these tests brings up a cluster of its own, and a machine carries one. What needs the images comes
    # later: they are built meanwhile. Last what has to be alone, and keeps other processes waiting.
    items.sort(
        key=lambda item: (
            item.get_closest_marker("alone") is not None,
            needs_images(item),
            "cluster" in getattr(item, "fixturenames", ()),
        )
    )


def needs_images(item: pytest.Item) -> bool:
    built = item.get_closest_marker("builds_images") is not None
    return built or "training_images" in getattr(item, "fixturenames", ())


def unavailable(error: ClusterUnavailable) -> None:
    """Skip with the reason, or fail where skipping is not allowed."""
    if os.environ.get("ELASTIC_PS_E2E_REQUIRED") == "1":
        pytest.fail(f"ELASTIC_PS_E2E_REQUIRED=1, but {error}", pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def session_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of this session have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module", autouse=True)
def company(request: pytest.FixtureRequest, session_directory: Path) -> Iterator[None]:
    """Modules marked `alone` have the cluster to themselves."""
    alone = request.node.get_closest_marker("alone") is not None
    with (session_directory / "gate").open("w") as gate, (session_directory / "tests").open("w") as tests:
        lock(gate, fcntl.LOCK_EX)  # who waits to be alone keeps others from beginning
        lock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, session_directory: Path) -> Iterator[GivenCluster]:
    """The cluster of E2E_KUBECONFIG, one that is up already, or a new one for this session.

    A new one is taken down at the end, and what it left on the machine is an error. Where a test needs the
    images, they are built and loaded from now on, beside the tests that need none.
    """
    given = given_cluster()
    if given is not None:
        yield given
        return
    with (
        shared_cluster(session_directory) as ours,
        ThreadPoolExecutor(1, thread_name_prefix="images") as beside,
    ):
        if any(needs_images(item) for item in request.session.items):
            request.config.stash[IMAGES_LOADED] = beside.submit(load_images, ours)
        yield ours


@contextmanager
def shared_cluster(directory: Path) -> Iterator[Cluster]:
    """Our own cluster: the first process that uses it brings it up, the last one takes it down."""
    record = directory / "cluster.json"
    with (directory / "users").open("w") as users:
        with locked(directory / "lock", "bringing the cluster up or down"):
            try:
                if no_others(users):
                    apt.require_debian()
                    ours = Cluster.up()
                    record.write_text(json.dumps(ours.before))
                else:
                    ours = Cluster.up()
            except ClusterUnavailable as error:
                unavailable(error)
                raise  # not reached: the line above raises
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield ours
        finally:
            with locked(directory / "lock", "bringing the cluster up or down"):
                before = json.loads(record.read_text())
                if no_others(users) and before is not None:
                    ours.down()
                    assert host.left_behind(before) == []


def no_others(users: TextIO) -> bool:
    """Whether no other process of this session uses the cluster."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
        take_long()
        pytestconfig.stash[IMAGES_LOADED].result()


def minor_version(cluster: GivenCluster) -> int:
    """37, of a 1.37.1."""
    version = json.loads(cluster.kubectl("version", "-o", "json").stdout)["serverVersion"]
    return int(version["minor"].rstrip("+"))


def install_definition(cluster: GivenCluster) -> None:
    """Make the TrainingJob's definition, without Helm.

    The cluster that is built from Debian's source does not know the rules, so they are left out there.
    """
    definition = crd()
    if not knows_rules(cluster):
        without_rules(definition)
    cluster.apply(definition)
    cluster.established("trainingjobs.elastic-ps.dev")


def knows_rules(cluster: GivenCluster) -> bool:
    """Whether the API server is as new as we ask for, and knows rules in CEL."""
    return minor_version(cluster) >= 29


def without_rules(schema: dict[str, Any]) -> None:
    """Take the rules out of a definition."""
    schema.pop("x-kubernetes-validations", None)
    for value in schema.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                without_rules(each)


@pytest.fixture(scope="module")
def definition(cluster: GivenCluster, session_directory: Path) -> None:
    """The TrainingJob's definition, as made without Helm."""
    with locked(session_directory / "definition", "making the definition"):
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
    with new_namespace(cluster) as name:
        yield name


@contextmanager
def new_namespace(cluster: GivenCluster) -> Iterator[str]:
    """A namespace that is deleted at the end."""
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
