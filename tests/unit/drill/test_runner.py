"""How a drill judges a job that has ended, and how long it waits for a recovery."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.api.status import Progress, ServerStatus
from elastic_ps.contract.env import Role
from elastic_ps.core.ledger import Range
from elastic_ps.drill.faults import Fault
from elastic_ps.drill.history import Committed, Histories, Sent, StepId
from elastic_ps.drill.runner import LIMIT, Drill, Injection, judge, limit_of, train
from elastic_ps.drill.target import Result, Target
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


def test_a_drill_that_has_shown_nothing_does_not_pass() -> None:
    whole = Result("j", "Succeeded", "", "", timedelta(seconds=1), 0, None)
    unavailable = Injection(fault=Fault("kill-ps", 0.1), state="unavailable", detail="")
    assert Drill(whole, commits=5).passed
    assert not Drill(whole).passed, "nothing was committed"
    assert not Drill(whole, [unavailable], commits=5).passed, "no fault was possible"


def test_a_recovery_may_repeat_what_was_done_since_the_last_checkpoint() -> None:
    for interval, seconds in (("30s", 60), ("5m", 600)):
        job = make_job(spec={"parameterServer": {"checkpoint": {"interval": interval}}})
        assert limit_of(job) == LIMIT + timedelta(seconds=seconds)


class Pending(Target):
    """A job whose pods fit on no node."""

    workers = 2
    stopped = ""

    def server(self) -> ServerStatus | None:
        return None

    def process(self, role: Role, index: int) -> str:
        raise AssertionError("it has none")

    def kill(self, role: Role, index: int) -> None:
        raise AssertionError("it has none")

    def scale(self, workers: int) -> None:
        raise AssertionError("nothing was injected")

    def over(self, wait: timedelta = timedelta(0)) -> bool:
        return bool(self.stopped)

    def stop(self, why: str) -> None:
        self.stopped = why

    def result(self) -> Result:
        return Result("j", "Suspended", "", self.stopped, timedelta(0), 0, None)


def test_a_job_that_makes_no_progress_is_stopped() -> None:
    target, lines = Pending(limit=timedelta(seconds=0.1)), list[str]()
    faults = [Fault("kill-worker", at=5), Fault("kill-ps", at=50)]
    injections = train(target, faults, lines.append, patience=timedelta(0))
    assert [each.state for each in injections] == ["not injected"] * 2
    assert target.stopped.startswith("the job has not come to kill-worker")
    assert len(lines) == 2
