"""The files that repeat the version have the one of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_ps import __version__
from tools.version import ROOT, files


def test_every_file_has_the_version_of_the_package() -> None:
    assert [path for path, content in files(__version__).items() if path.read_text() != content] == []


def test_another_version_reaches_the_chart_the_images_and_the_samples() -> None:
    changed = {str(path.relative_to(ROOT)): text for path, text in files("9.8.7").items()}
    assert changed.keys() > {
        "Dockerfile",
        "operator/Dockerfile",
        "docs/tutorial.md",
        "manifests/samples/digits.yaml",
    }
    assert 'version: 9.8.7\nappVersion: "9.8.7"\n' in changed["charts/elastic-ps/Chart.yaml"]
    for name, text in changed.items():
        assert "9.8.7" in text
        assert not re.search(rf"elastic-ps(-operator)?:{re.escape(__version__)}", text), name


@pytest.mark.parametrize("version", ["0.2.0rc1", "0.2.0-rc.1", "0.2.0.dev3", "0.2.0b2.post1"])
def test_a_version_before_a_release_is_replaced_as_a_whole(version: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is localhost/elastic-ps:0.1.0.\n")
    for given in (version, version, "0.2.0"):
        page.write_text(files(given, tmp_path)[page])
        assert page.read_text() == f"It is localhost/elastic-ps:{given}.\n"
