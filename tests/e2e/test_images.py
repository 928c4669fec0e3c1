"""What is in the images besides programs: labels, what they are made of, and compiled code."""

from __future__ import annotations

import json
import tarfile
from typing import Any

import pytest

from elastic_ps import __version__
from tests.e2e.cluster import ClusterUnavailable, build_image
from tests.e2e.conftest import unavailable
from tools.load_images import IMAGES, ROOT


@pytest.mark.builds_images
@pytest.mark.parametrize(
    ("dockerfile", "title", "package", "source"),
    [
        ("Dockerfile", "elastic-ps", "torch", "app/elastic_ps/worker/runtime/runtime.py"),
        ("operator/Dockerfile", "elastic-ps-operator", "kopf", "opt/operator/app/elastic_operator/plan.py"),
    ],
)
def test_an_image_says_what_it_is_and_what_it_is_made_of(
    dockerfile: str, title: str, package: str, source: str
) -> None:
    try:
        image = build_image(ROOT / dockerfile, ROOT, IMAGES[dockerfile])
    except ClusterUnavailable as error:
        unavailable(error)
        raise
    document: dict[str, Any] = {}
    names: set[str] = set()
    with tarfile.open(image.archive) as archive:

        def read(name: str) -> Any:
            stream = archive.extractfile(name)
            assert stream is not None
            return json.load(stream)

        (manifest,) = read("manifest.json")
        labels = read(manifest["Config"])["config"]["Labels"]
        # The first layer is the base.
        for layer in manifest["Layers"][1:]:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                for entry in files:
                    names.add(entry.name)
                    if entry.name == f"usr/share/sbom/{title}.cdx.json":
                        stream = files.extractfile(entry)
                        assert stream is not None
                        document = json.load(stream)
    told = {key.removeprefix("org.opencontainers.image."): value for key, value in labels.items()}
    assert (told["title"], told["version"], told["licenses"]) == (title, __version__, "Apache-2.0")
    assert told["base.name"]
    urls = {item["purl"] for item in document["components"]}
    assert {url.split("@")[0] for url in urls} >= {f"pkg:pypi/{package}", "pkg:deb/debian/libc6"}
    folder, _, name = source.rpartition("/")
    assert source in names
    assert f"{folder}/__pycache__/{name.removesuffix('.py')}.cpython-311.pyc" in names
    assert any(f"site-packages/{package}/__pycache__/__init__.cpython-311.pyc" in name for name in names)
