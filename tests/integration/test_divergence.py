"""A job that learns nothing says so, and stops if it is to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery import ROOT
from elastic_ps.errors import Refused
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT
from tests.testing.tiers import per_change
from tests.testing.trained import sgd


@pytest.mark.parametrize("spoilt", [0, -1])
@pytest.mark.parametrize(
    "fields",
    [
        {"parameterServer": {"replicas": 2, "bucketBytes": 1024}},
        {"consistency": {"mode": "async"}},
        {"consistency": {"mode": "local", "steps": 2}},
        {"compression": {"codec": "topk"}},
        {"strategy": "all-reduce"},
    ],
    ids=["two shards", "async", "local", "topk", "all-reduce"],
)
def test_a_gradient_that_is_not_finite_is_known_at_once(
    tmp_path: Path, fields: dict[str, Any], spoilt: int
) -> None:
    """Whichever shard has refused it, and though the script reports no loss."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        for step, (x, y) in enumerate(session.loader(Numbers(50), 5)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if step == 2:
                grad = list(model.parameters())[spoilt].grad
                assert grad is not None
                grad.fill_(math.nan)
            optimizer.step()

    with running_job(tmp_path, **fields) as job:
        job.start(0, script)
        with pytest.raises(Refused, match="values are NaN or Inf"):
            job.join()
        found = job.status().progress.diverged
    assert found is not None
    assert found.reason == "LossNotFinite"


def run_digits(tmp_path: Path, policy: dict[str, Any], *, lr: float) -> tuple[int, str, dict[str, Any]]:
    """Train the digits with `elastic-ps run`: its exit status, what it prints, and `run.json`."""
    spec = {
        "entrypoint": "examples.digits.train:main",
        "arguments": {"epochs": 4, "batch_size": 16, "lr": lr},
        "runPolicy": policy,
    }
    job = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "digits"}}
    (tmp_path / "job.json").write_text(json.dumps({**job, "spec": spec}))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "elastic_ps.cli",
            "run",
            str(tmp_path / "job.json"),
            "--report",
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    report: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    return done.returncode, done.stdout + done.stderr, report


@pytest.mark.nightly
def test_a_job_with_an_absurd_learning_rate_warns_and_goes_on(tmp_path: Path) -> None:
    """Here the network dies, and its loss is that of ten classes of which it knows nothing."""
    status, said, report = run_digits(tmp_path, {}, lr=2.0)
    assert (status, report["phase"]) == (0, "Succeeded"), said
    assert report["diverged"]["reason"] == "LossNoBetter"
    assert said.count("the training has diverged: the loss is") == 2, "as an event and in the summary"
    assert "lower the learning rate" in said
    warnings = [event["text"] for event in report["events"] if event["kind"] == "warning"]
    assert len(warnings) == 1, warnings


NOT_FINITE = (1000.0, "LossNotFinite")


@pytest.mark.parametrize(("lr", "reason"), per_change([(2.0, "LossNoBetter"), NOT_FINITE], keep=[NOT_FINITE]))
def test_it_fails_if_it_is_to_stop_then_and_starts_no_worker_again(
    tmp_path: Path, lr: float, reason: str
) -> None:
    status, said, report = run_digits(tmp_path, {"onDivergence": "stop", "backoffLimit": 0}, lr=lr)
    assert (status, report["phase"], report["reason"]) == (1, "Failed", "Diverged"), said
    assert report["diverged"]["reason"] == reason
    assert "error: job 'digits' failed: " in said
    assert "lower the learning rate" in said
    assert "is started again" not in said
