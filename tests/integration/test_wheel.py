"""The wheel that `pip wheel .` builds has all that an installation needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from elastic_ps import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ("elastic_ps", "operator/elastic_operator")


@pytest.mark.nightly
def test_the_wheel_is_pure_and_complete(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "__init__.py").touch()
    left = tree / "build" / "lib" / "elastic_ps" / "left.py"
    left.parent.mkdir(parents=True)
    left.touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", f"--wheel-dir={tmp_path}", str(tree)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(tmp_path / f"elastic_ps-{__version__}-py3-none-any.whl") as wheel:
        info = f"elastic_ps-{__version__}.dist-info"
        packed = {name for name in wheel.namelist() if not name.startswith(f"{info}/")}
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    expected = {
        path.relative_to((tree / name).parent).as_posix()
        for name in SOURCES
        for path in (tree / name).rglob("*")
        if path.is_file()
    }
    assert packed == expected
    assert packed > {"elastic_ps/py.typed", "elastic_operator/py.typed", "elastic_ps/transport/frame.proto"}
    assert metadata["Version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(metadata.get_all("Provides-Extra", [])) == {*project["optional-dependencies"]}
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
    assert versions <= set(metadata.get_all("Classifier", []))
    assert metadata.get_all("Project-URL") is None, "there is no host that it could name"
    assert "elastic-ps = elastic_ps.cli:main" in entry_points
