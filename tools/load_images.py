"""Builds the operator's and the training image and gives them to the cluster that `make cluster` started."""

from __future__ import annotations

from pathlib import Path

from elastic_ps import __version__
from tests.e2e.cluster import Cluster, build_image

ROOT = Path(__file__).parents[1]
IMAGES = {
    "operator/Dockerfile": f"localhost/elastic-ps-operator:{__version__}",
    "Dockerfile": f"localhost/elastic-ps:{__version__}",
}


def load_images(cluster: Cluster) -> None:
    """Blocks: for minutes, where nothing is built yet."""
    for dockerfile, tag in IMAGES.items():
        build_image(ROOT / dockerfile, ROOT, tag)
        cluster.load_image(tag)


if __name__ == "__main__":
    load_images(Cluster.up())
