"""The examples of docs/coming-from run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from elastic_ps.worker.session import Session
from tests.testing.datafiles import write_mnist
from tests.testing.harness import Numbers, running_job
from tests.testing.oracle import assert_each_record_once

ROOT = Path(__file__).parents[2]
RUNS = "<!-- runs in tests/integration/test_coming_from.py -->"


def examples(language: str) -> dict[str, str]:
    """Page -> its example in this language that says that it runs here."""
    pages = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
    block = re.compile(rf"{RUNS}\n```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return {page.stem: found[1] for page in pages if (found := block.search(page.read_text()))}


EXAMPLES, DIFFS = examples("python"), examples("diff")
LIMIT = 300
"""Seconds that a program may take; it only ends a test that has failed."""
DATA = """
from pathlib import Path
from elastic_ps.contrib.datasets import mnist
training, test = mnist(Path(__file__).parent)
"""
REPORTED = {"pytorch_ps_mpi": None, "torchmpi": "test_error", "elasticdl": "test_accuracy"}
"""What the chief reports at the end."""


def test_every_system_whose_scripts_change_has_an_example() -> None:
    assert EXAMPLES.keys() == REPORTED.keys()
    assert DIFFS.keys() == {"ddp", "lightning", "huggingface", "ray", "horovod"}


class Net(torch.nn.Linear):
    """Stands for a model of one's own, also for one of Lightning's and of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__(6, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(x)
        return output if labels is None else SimpleNamespace(loss=mse_loss(output, labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        assert index >= 0
        return mse_loss(self(batch[0]), batch[1])


def collated(items: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    x, y = torch.utils.data.default_collate(items)
    return {"x": x, "labels": y}


@pytest.mark.parametrize("system", DIFFS)
def test_the_lines_that_are_left_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """A diff without the lines that it removes is a script of a job."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(line[1:] for line in DIFFS[system].splitlines() if not line.startswith("-"))

    def script(session: Session) -> None:
        names: dict[str, Any] = {"torch": torch, "Net": Net, "LitNet": Net, "model": Net()}
        names |= {"dataset": Numbers(48), "collate": collated, "loss_fn": mse_loss}
        names["elastic_ps"] = SimpleNamespace(connect=lambda: session)
        exec(code, names)
        if system == "ray":
            names["train_func"](lr=0.05)

    with running_job(tmp_path / "job") as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=48, epochs=1 if system == "horovod" else 3)
    assert Path("model.pt").exists() == (system == "ddp")


@pytest.mark.nightly
@pytest.mark.parametrize("system", REPORTED)
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
    if system != "torchmpi":
        assert report["loss"], "it is reported with each step, so it has a curve"
        assert "loss" not in report["metrics"]
    if system == "torchmpi":
        assert report["metrics"]["test_error"] <= 50, "per cent; one that has learnt nothing has 90"
