"""What the operator does when the parameter server says that a job learns nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.api.status import Divergence, Progress, ServerStatus
from tests.testing.simulation import Simulation, running

STOP = {"onDivergence": "stop", "backoffLimit": 0}


def tell(simulation: Simulation, reason: str = "", *, loss: float = 2.0, term: int = 1) -> None:
    """The parameter server says that the loss is so, and why the job learns nothing."""
    found = Divergence(reason=reason, message=f"the loss is {loss}") if reason else None
    progress = Progress(version=9, records_expected=100, records_applied=9, loss=loss, diverged=found)
    simulation.server = ServerStatus(
        job="digits", shard=0, shards=1, term=term, ready=True, progress=progress
    )


def test_a_job_that_is_well_has_no_such_condition() -> None:
    simulation = running()
    tell(simulation)
    simulation.settle()
    assert simulation.condition("Diverged") == {}


def test_a_warning_is_a_condition_and_one_event_and_the_job_goes_on() -> None:
    simulation = running()
    for loss in (2.0, 2.1, 2.2):
        tell(simulation, "LossNoBetter", loss=loss)
        notes = simulation.step().notes
        assert [note.reason for note in notes] == (["DivergedLossNoBetter"] if loss == 2.0 else [])
        assert all(note.kind == "Warning" for note in notes)
        assert (
            simulation.condition("Diverged").items()
            >= {"status": "True", "message": f"the loss is {loss}"}.items()
        )
    assert simulation.status["phase"] == "Running"
    assert simulation.status["summary"]["reason"] == "LossNoBetter"
    tell(simulation, "LossNotFinite")
    assert [note.reason for note in simulation.step().notes] == ["DivergedLossNotFinite"], "that is worse"
    tell(simulation)
    assert simulation.step().notes == ()
    assert simulation.condition("Diverged")["status"] == "False"
    assert "reason" not in simulation.status["summary"]


def test_the_condition_stays_while_the_parameter_server_is_silent_and_when_the_job_is_over() -> None:
    simulation = running()
    tell(simulation, "LossNoBetter")
    simulation.step()
    simulation.server = None
    simulation.settle()
    assert simulation.condition("Diverged")["status"] == "True"
    tell(simulation, "LossNoBetter")
    assert simulation.server is not None
    over = simulation.server.progress.model_copy(update={"finished": True})
    simulation.server = simulation.server.model_copy(update={"progress": over})
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.condition("Diverged")["status"] == "True", "so the model is of no use"


@pytest.mark.parametrize("worker", [None, 1, 0])
def test_a_job_that_is_to_stop_fails_whatever_has_become_of_its_workers(worker: int | None) -> None:
    """And no worker is counted or made again that has ended because of it."""
    simulation = running(runPolicy=STOP)
    made = simulation.made
    tell(simulation, "LossNotFinite")
    if worker is not None:
        simulation.end("digits-worker-0", worker)
    plan = simulation.step()
    assert [note.reason for note in plan.notes if note.key.startswith("Failed")] == ["FailedDiverged"]
    assert simulation.condition("Failed").items() >= {"status": "True", "reason": "Diverged"}.items()
    assert "the loss is 2.0" in simulation.condition("Failed")["message"]
    simulation.settle()
    assert simulation.made == made
    assert simulation.status["phase"] == "Failed"


def test_what_was_found_before_a_restart_does_not_stop_the_job_again() -> None:
    simulation = running(runPolicy=STOP)
    tell(simulation, "LossNoBetter")
    simulation.step()
    assert simulation.status["phase"] == "Failed"
    simulation.now += timedelta(seconds=5)
    simulation.restart(simulation.now)
    simulation.step()
    assert simulation.status["phase"] != "Failed", "the old parameter server still answers"
    simulation.server = None
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    tell(simulation, term=2)
    simulation.settle()
    assert simulation.condition("Diverged")["status"] == "False"
    tell(simulation, "LossNoBetter", term=2)
    simulation.step()
    assert simulation.condition("Failed")["reason"] == "Diverged"
