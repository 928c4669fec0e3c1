"""The examples of docs/coming-from/index.md run: those of other systems, as they are written here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.datafiles import write_mnist
from tests.testing.tiers import per_change

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "index.md").read_text()
EXAMPLES = {
    section.partition("\n")[0]: code
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for code in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
}
"""System -> its example."""
LIMIT = 300
"""Seconds that a program may take; it only ends a test that has failed."""
DATA = """
from pathlib import Path
from elastic_ps.contrib.datasets import mnist
training, test = mnist(Path(__file__).parent)
"""
REPORTED = {"pytorch_ps_mpi": None, "TorchMPI": "test_error", "ElasticDL": "test_accuracy"}
"""What the chief reports at the end."""


def test_every_system_whose_scripts_change_has_an_example() -> None:
    assert EXAMPLES.keys() == REPORTED.keys()


@pytest.mark.parametrize("system", per_change(REPORTED, keep=["TorchMPI"]))
def test_a_rewritten_example_runs(tmp_path: Path, system: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "train.py").write_text(EXAMPLES[system])
    command = (sys.executable, "-m", "elastic_ps.cli", "run", "train.py", "--workers", "2", "--report", "out")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["records_applied"] == report["records_expected"]
    assert {name for name in report["metrics"] if name.startswith("test")} == {REPORTED[system]} - {None}
    if system != "TorchMPI":
        assert report["loss"], "it is reported with each step, so it has a curve"
        assert "loss" not in report["metrics"]
    if system == "TorchMPI":
        assert report["metrics"]["test_error"] <= 50, "per cent; one that has learnt nothing has 90"
