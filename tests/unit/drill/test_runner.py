"""How a drill judges a job that has ended, and how long it waits for a recovery."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.api.status import Progress
from elastic_ps.core.ledger import Range
from elastic_ps.drill.history import Committed, Histories, Sent, StepId
from elastic_ps.drill.runner import LIMIT, judge, limit_of
from elastic_ps.drill.target import Result
from tests.testing.launching import make_job


@pytest.mark.parametrize("reason", ["", "the loss was low enough"])
def test_only_a_script_that_stops_the_training_may_leave_records_out(reason: str) -> None:
    histories = Histories()
    for version in range(1, 6):
        step = StepId(0, 1, version)
        ranges = (Range(0, 4 * version - 4, 4 * version),)
        histories.committed.append(Committed(version, 1, version, {step: ranges}, version))
        histories.sent.append(Sent(version, step, 0, version - 1))
    progress = Progress(version=5, records_applied=20, records_expected=40, epochs=2, stopped=reason)
    result = Result("j", "Succeeded", "", "", timedelta(seconds=1), 0, progress)
    drill = judge(make_job(), result, [], histories)
    assert drill.passed == bool(reason)
    assert drill.records == 20


def test_a_recovery_may_repeat_what_was_done_since_the_last_checkpoint() -> None:
    for interval, seconds in (("30s", 60), ("5m", 600)):
        job = make_job(spec={"parameterServer": {"checkpoint": {"interval": interval}}})
        assert limit_of(job) == LIMIT + timedelta(seconds=seconds)
