"""What `elastic-ps run` does at the end of a job, and while it waits for the start of one."""

from __future__ import annotations

import signal
import subprocess
import sys
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


WAITS = """
import os, pathlib, signal, sys
from elastic_ps.cli.run import SIGNALS, _wait_until_it_runs
from elastic_ps.local.state import JobDirectory
class Directory(JobDirectory):
    def read_status(self):
        print("waits", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
pid = os.fork()
if not pid:
    print(signal.Signals(signal.sigwait(SIGNALS)).name, flush=True)
    os._exit(0)
for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
_wait_until_it_runs(pid, Directory("j", root=pathlib.Path(sys.argv[1])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_job_that_starts_in_the_background_gets_the_signal_that_was_sent(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Of two that differ, the second must not end the job at once."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        said = process.stdout.read().split()
    assert (process.returncode, said[-1]) == (128 + number, number.name)
