"""The document that says what an image is made of."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools.sbom import document

DEBIAN = "libc6 2.36-9+deb12u10 amd64\nbase-files 12.4 all\n"


@pytest.fixture(scope="module")
def made() -> str:
    return document("an-image", "1.2", distributions(), DEBIAN)


def components(made: str) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in json.loads(made)["components"]}


def test_it_names_each_package_with_its_version_and_licence(made: str) -> None:
    found = components(made)
    assert found["torch"]["purl"] == f"pkg:pypi/torch@{found['torch']['version']}".replace("+", "%2B")
    assert found["grpcio"]["licenses"]
    assert found["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64"
    assert json.loads(made)["metadata"]["component"]["name"] == "an-image"


def test_it_says_what_needs_what(made: str) -> None:
    needs = {item["ref"]: item.get("dependsOn", []) for item in json.loads(made)["dependencies"]}
    found = components(made)
    assert found["pydantic_core"]["bom-ref"] in needs[found["pydantic"]["bom-ref"]]
    assert needs["an-image"] == sorted(item["bom-ref"] for item in found.values())


def test_it_is_valid(made: str) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(made) is None


def test_packages_that_are_not_there_are_not_needed(tmp_path: Path) -> None:
    package = tmp_path / "a_b-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: a_b\nVersion: 1\nRequires-Dist: gone>=1\n"
    )
    made = document("an-image", "1", distributions(path=[str(tmp_path)]), "")
    (found,) = json.loads(made)["components"]
    assert (found["name"], found["purl"]) == ("a_b", "pkg:pypi/a-b@1")
