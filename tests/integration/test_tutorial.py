"""What docs/tutorial.md has the reader do on one machine, with the script and the job as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from elastic_ps.api.job import TrainingJob
from tests.testing.tutorial import blocks

RECORDS = 1437


@pytest.mark.nightly
def test_the_script_trains_as_a_job_and_leaves_a_model(tmp_path: Path) -> None:
    (script,), (job, _) = blocks("python"), blocks("yaml")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "mine.yaml").write_text(job.replace("epochs: 1500", "epochs: 2"))

    def elastic_ps(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "elastic_ps.cli", *arguments],
            cwd=tmp_path,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"{2 * RECORDS:,} of {2 * RECORDS:,} in the model" in elastic_ps("run", "mine.yaml")
    checkpoints = json.loads(elastic_ps("status", "mine", "--json"))["checkpoints"]
    elastic_ps("export", checkpoints, "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (128, 64)


def test_the_job_for_a_cluster_is_valid() -> None:
    _, job = blocks("yaml")
    assert TrainingJob.model_validate(yaml.safe_load(job)).spec.image == "localhost/mine:1"
