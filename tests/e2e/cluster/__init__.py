"""A real Kubernetes on this machine, for the end-to-end tests and for a person who wants to play.

    from tests.e2e.cluster import open_cluster
    with open_cluster() as cluster:            # E2E_KUBECONFIG's, the one that is up, or a new one
        cluster.kubectl("get", "nodes")

docs/design/test-cluster.md tells how it works. Nothing happens at import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .base import GivenCluster, given_cluster
from .cluster import Cluster, down, status
from .errors import ClusterError, ClusterUnavailable, CommandError, NotSupported
from .images import BASE_IMAGE, Image, base_image, build_image
from .shell import wait_for

__all__ = [
    "BASE_IMAGE",
    "Cluster",
    "ClusterError",
    "ClusterUnavailable",
    "CommandError",
    "GivenCluster",
    "Image",
    "NotSupported",
    "base_image",
    "build_image",
    "down",
    "given_cluster",
    "open_cluster",
    "status",
    "wait_for",
]


@contextmanager
def open_cluster() -> Iterator[GivenCluster]:
    """The cluster of E2E_KUBECONFIG, the one that is up, or a new one that is taken down at the end."""
    given = given_cluster()
    if given is not None:
        yield given
        return
    with Cluster.up() as cluster:
        yield cluster
