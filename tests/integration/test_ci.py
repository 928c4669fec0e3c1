"""What `.ci/run` runs for a change."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = '#!/bin/sh\necho "made $2"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with `.ci/run` and a `make` that only says what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def commit(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def run(folder: Path, *, base: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "ELASTIC_PS_CI_BASE": base, "ELASTIC_PS_KUBERNETES_BIN": "/"}
    return subprocess.run([folder / ".ci" / "run"], env=environment, capture_output=True, text=True)


def made(folder: Path) -> set[str]:
    result = run(folder, base="HEAD~1")
    assert result.returncode == 0, result.stderr
    return {line.removeprefix("made ") for line in result.stdout.splitlines() if line.startswith("made ")}


def test_a_change_of_documentation_alone_runs_the_checks_and_what_reads_it(checkout: Path) -> None:
    commit(checkout, "docs/a.md", "docs/picture.svg", "README.md")
    assert made(checkout) == {"check", "test-docs"}


def test_a_change_of_a_thousand_files_runs_the_tests(checkout: Path) -> None:
    """Their names do not fit into a pipe."""
    commit(checkout, *(f"{'directory' * 10}/{number:04}.py" for number in range(1000)), "docs/a.md")
    tests = {"test-unit", "test-integration", "test-cluster"}
    assert made(checkout) == {".venv/ready", "check"} | tests


def test_a_base_that_is_not_there_is_an_error(checkout: Path) -> None:
    result = run(checkout, base="no-such-commit")
    assert result.returncode != 0
    assert "no-such-commit" in result.stderr
