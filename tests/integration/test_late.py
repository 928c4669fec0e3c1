"""A worker that comes after the training has no batch, and its script may fail for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ps.local import Launcher, Options
from tests.testing.launching import forks, make_job, wait_for_end


@pytest.mark.parametrize(
    ("chief_fails", "how", "told"),
    [
        (False, "error", "UnboundLocalError"),
        (False, "report", "has to be one number"),
        (False, "exit", "no failure"),
        (True, "error", ""),
    ],
)
def test_a_script_that_fails_without_a_batch_fails_no_trained_job(
    tmp_path: Path, chief_fails: bool, how: str, told: str
) -> None:
    spec = {"entrypoint": "tests.testing.scripts.late:main", "runPolicy": {"backoffLimit": 0}}
    job = make_job(spec=spec, trained=str(tmp_path / "trained"), chief_fails=chief_fails, how=how)
    with Launcher(job, Options(forks=forks(), root=tmp_path)) as launcher:
        launcher.start()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    said = "".join(log.read_text() for log in tmp_path.rglob("logs/worker-1.log"))
    if chief_fails:
        assert (outcome.verdict.phase, outcome.verdict.reason) == ("Failed", "BackoffLimitExceeded")
    else:
        assert outcome.verdict.phase == "Succeeded", outcome.verdict
        assert "before this worker made a step: that is no failure" in said
        assert told in said
