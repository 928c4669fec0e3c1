"""What is said of a command line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ps.cli.parser import build_parser


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (
            ["run", "job.yaml", "--workers", "0"],
            "--workers: '0' is not a number of workers: expected 1 or more",
        ),
        (["scale", "digits"], "the following arguments are required: --workers"),
    ],
)
def test_the_cause_comes_first(given: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(given)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"error: {cause}", f"`elastic-ps {given[0]} --help` explains the arguments"]


def test_a_path_may_begin_with_the_home_directory() -> None:
    """A shell does not expand it after an equals sign."""
    assert build_parser().parse_args(["run", "job.yaml", "--report=~/out"]).report == Path.home() / "out"
