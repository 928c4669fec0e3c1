"""The report of a run, as a file and as a picture."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.local import Record
from elastic_ps.local.options import Outcome
from elastic_ps.local.plan import Verdict
from elastic_ps.local.report import write_report
from elastic_ps.local.state import LocalStatus


@pytest.mark.filterwarnings(
    "ignore:.* deprecated - use:DeprecationWarning"
)  # matplotlib 3.7's use of pyparsing
def test_a_job_that_never_trained_has_a_report(tmp_path: Path) -> None:
    status = LocalStatus(job="early", launcher_pid=1, started=0, updated=0, workers=2)
    verdict = Verdict("Failed", "BackoffLimitExceeded", "it failed too often")
    numbers, picture = write_report(Outcome(verdict, Record(), timedelta(seconds=1), status), tmp_path)
    assert json.loads(numbers.read_text())["reason"] == "BackoffLimitExceeded"
    assert picture.read_bytes().startswith(b"\x89PNG")
