"""Writes what an image is made of as a CycloneDX document, while the image is built.

    python tools/sbom.py NAME VERSION SITE_PACKAGES... > sbom.cdx.json

It has the Python packages in these folders, with their licences and what they need of each other, and the
packages of the Debian that it runs on. It imports nothing of the project.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_LONG = 200
"""Characters; some packages have the whole text where the licence's name should be."""


def document(name: str, version: str, found: Iterable[Distribution], debian: str) -> str:
    """The document as JSON.

    Args:
        name: the image.
        version: its version.
        found: the Python packages in it.
        debian: lines of "name version architecture" of its Debian packages.
    """
    image = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=name)
    bom = Bom()
    bom.metadata.component = image
    packages = {_normal(item.name): (item, _python(item)) for item in found}
    system = [_debian(*line.split()) for line in debian.splitlines()]
    for component in (*(component for _, component in packages.values()), *system):
        bom.components.add(component)
    bom.register_dependency(image, bom.components)
    for item, component in packages.values():
        needed = {_normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in item.requires or []}
        bom.register_dependency(component, [packages[other][1] for other in needed & packages.keys()])
    return str(JsonV1Dot6(bom).output_as_string(indent=1))


def _python(item: Distribution) -> Component:
    said: dict[str, Any] = item.metadata.json
    licence = str(said.get("license_expression") or said.get("license") or "")
    named = [LicenseFactory().make_from_string(licence)] if 0 < len(licence) < _LONG else []
    url = PackageURL(type="pypi", name=_normal(item.name), version=item.version)
    return Component(
        name=item.name,
        version=item.version,
        description=said.get("summary"),
        licenses=named,
        purl=url,
        bom_ref=str(url),
    )


def _debian(name: str, version: str, architecture: str) -> Component:
    url = PackageURL("deb", "debian", name, version, {"arch": architecture})
    return Component(name=name, version=version, purl=url, bom_ref=str(url))


def _normal(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("folders", nargs="+", metavar="SITE_PACKAGES")
    given = parser.parse_args(arguments)
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\\n"]
    debian = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    sys.stdout.write(document(given.name, given.version, distributions(path=given.folders), debian))


if __name__ == "__main__":
    main()
