"""What `elastic-ps run` does at the end of a job."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.api.status import Progress, ServerStatus
from elastic_ps.cli.run import _write_report
from elastic_ps.local import LocalStatus, Outcome, Record
from elastic_ps.local.plan import Verdict


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of matplotlib, where pyparsing is newer
def test_a_picture_that_cannot_be_drawn_does_not_make_the_job_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record()
    progress = Progress(metrics={r"$\no_such_symbol$": 1.0})
    record.add(ServerStatus(job="j", shard=0, shards=1, term=1, ready=True, progress=progress), elapsed=1.0)
    status = LocalStatus(job="j", launcher_pid=1, started=0, updated=0, workers=2)
    outcome = Outcome(Verdict("Succeeded", "Finished", "done"), record, timedelta(seconds=1), status)
    assert _write_report(outcome, tmp_path) == []
    assert f"warning: the report in {tmp_path} is not complete: ValueError" in capsys.readouterr().err
    assert (tmp_path / "run.json").is_file()
