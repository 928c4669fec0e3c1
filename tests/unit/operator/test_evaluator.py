"""The operator's decisions about a job's evaluator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from elastic_operator import builders
from elastic_operator.plan import DeletePod, stamp
from elastic_operator.pods import read
from elastic_operator.status import turned
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.rules import NEVER, fields
from elastic_ps.api.status import EvaluationStatus, Progress, TrainingJobStatus
from elastic_ps.contract import env
from elastic_ps.local.record import evaluation_changes
from tests.testing.simulation import Simulation, finish, job_document, running, tell

EVALUATOR = {"entrypoint": "examples.digits.evaluate:main", "every": 10}
NAME = "digits-evaluator-0"


def training(**fields: Any) -> Simulation:
    """A job with an evaluator that has a model."""
    simulation = running(evaluator=EVALUATOR | fields)
    assert NAME not in simulation.pods, "there is nothing to evaluate yet"
    tell(simulation)
    simulation.settle()
    return simulation


def finished(**fields: Any) -> Simulation:
    """Its worker has ended, and every record is in the model."""
    simulation = training(**fields)
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.step()
    return simulation


def test_the_evaluator_is_a_pod_that_is_told_who_it_is() -> None:
    simulation = training(template={"spec": {"nodeSelector": {"accelerator": "gpu"}}})
    pod = simulation.pods[NAME]
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    assert pod["spec"]["nodeSelector"] == {"accelerator": "gpu"}
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "elastic_ps.evaluation"]
    assert not [volume for volume in pod["spec"]["volumes"] if volume["name"] == "checkpoints"]
    told = env.read({item["name"]: item.get("value", "") for item in container["env"]})
    assert (told.role, told.addresses, told.checkpoints) == (
        "evaluator",
        ("digits-ps-0.digits-servers:2222",),
        None,
    )
    assert told.spec.evaluator is not None
    assert told.spec.evaluator.entrypoint == EVALUATOR["entrypoint"]


@pytest.mark.parametrize(("role", "knows"), [("ps", True), ("worker", False)])
def test_who_is_told_of_the_evaluator(role: env.Role, knows: bool) -> None:
    job = job_document(evaluator=EVALUATOR)
    pod = builders.pod(job, TrainingJobSpec.model_validate(job["spec"]), role, 0)
    variables = {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}
    assert (env.read(variables).spec.evaluator is not None) == knows


def test_a_job_without_one_has_no_pod_for_it() -> None:
    simulation = running()
    tell(simulation)
    simulation.settle()
    assert NAME not in simulation.pods


def test_a_pod_that_is_evicted_or_fails_is_made_again_and_counts_for_nothing() -> None:
    simulation = training()
    for status in (1, 78, 137):
        assert simulation.end(NAME, status)
        simulation.settle()
        assert simulation.pods[NAME]["status"]["phase"] == "Running"
    assert simulation.status["phase"] == "Running"
    assert (simulation.status["worker"]["failures"], simulation.status["worker"]["restarts"]) == (0, 0)


@pytest.mark.parametrize(
    "state", [{"terminated": {"exitCode": 78}}, {"waiting": {"reason": "CrashLoopBackOff"}}]
)
def test_a_container_that_the_kubelet_starts_again_is_left_to_it_until_the_spec_is_another(
    state: dict[str, Any],
) -> None:
    simulation = training()
    uid = simulation.pods[NAME]["metadata"]["uid"]
    last = {"terminated": {"exitCode": 78}}
    simulation.pods[NAME]["status"]["containerStatuses"] = [
        {"name": "evaluator", "state": state, "lastState": last}
    ]
    for _ in range(3):
        assert simulation.step().actions == ()
        simulation.now += timedelta(seconds=10)
    simulation.edit(image="corrected:2")
    simulation.settle()
    assert simulation.pods[NAME]["metadata"]["uid"] != uid


def test_a_pod_that_its_node_refuses_is_not_made_again_without_a_pause() -> None:
    simulation = training()
    pod = simulation.pods[NAME]
    pod["metadata"]["creationTimestamp"] = stamp(simulation.now)
    pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no such device"}
    plan = simulation.step()
    assert plan.actions == ()
    assert plan.requeue is not None
    assert plan.requeue <= simulation.options.short_life_delay
    simulation.now += simulation.options.short_life_delay
    assert [action.name for action in simulation.step().actions if isinstance(action, DeletePod)] == [NAME]


def test_what_keeps_it_from_working_is_told() -> None:
    simulation = training()
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    last = {"terminated": {"exitCode": 1, "message": "no such file"}}
    simulation.pods[NAME]["status"]["containerStatuses"] = [
        {"name": "evaluator", "state": state, "lastState": last}
    ]
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["reason"] == "CrashLoop"
    assert "no such file" in simulation.condition("Degraded")["message"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "it exceeds the total limit"}, "Evicted"),
        (
            {"containerStatuses": [{"name": "evaluator", "state": {"terminated": {"exitCode": 78}}}]},
            "InvalidJob",
        ),
    ],
)
def test_its_end_is_told_though_it_is_not_counted(status: dict[str, Any], reason: str) -> None:
    simulation = training()
    simulation.pods[NAME]["status"] |= status
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == reason
    assert f"Degraded{reason}" in simulation.notes.values()
    assert simulation.status["worker"]["failures"] == 0


def test_the_job_ends_when_the_evaluator_has_ended() -> None:
    simulation = finished()
    assert simulation.status["phase"] == "Running"
    simulation.end(NAME, 0)
    simulation.step()
    assert simulation.condition("Succeeded")["reason"] == "Finished"
    assert "evaluator" not in simulation.condition("Succeeded")["message"]


def with_sidecar(simulation: Simulation) -> None:
    """The evaluator's pod also has a container that runs on."""
    status = simulation.pods[NAME]["status"]
    status["phase"] = "Running"
    status["containerStatuses"].insert(0, {"name": "sidecar", "state": {"running": {}}})


def test_a_side_car_that_runs_on_keeps_no_evaluator_from_being_done() -> None:
    simulation = finished()
    simulation.end(NAME, 0)
    with_sidecar(simulation)
    simulation.step()
    assert simulation.condition("Succeeded")["reason"] == "Finished"
    assert "evaluator" not in simulation.condition("Succeeded")["message"]
    simulation.settle()
    assert NAME not in simulation.pods, "its side-car would run for ever"


def test_an_evaluator_that_fails_beside_a_side_car_is_left_to_the_kubelet() -> None:
    simulation = finished()
    simulation.end(NAME, 1)
    with_sidecar(simulation)
    assert simulation.step().actions == ()
    assert simulation.status["phase"] == "Running"


def test_the_job_ends_without_an_evaluator_that_takes_too_long() -> None:
    simulation = finished(finishTimeout="90s")
    simulation.now += timedelta(seconds=89)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    simulation.now += timedelta(seconds=1)
    simulation.step()
    assert simulation.condition("Succeeded")["reason"] == "Finished"
    assert "The evaluator was not done 90 s later" in simulation.condition("Succeeded")["message"]
    simulation.settle()
    assert NAME not in simulation.pods


def test_one_that_cannot_work_does_not_keep_the_job_from_ending() -> None:
    simulation = finished()
    simulation.pods[NAME]["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 78}}
    pod = read(simulation.pods[NAME])
    assert pod is not None
    assert pod.ending == "invalid"
    simulation.step()
    assert simulation.condition("Succeeded")["reason"] == "Finished"


def test_a_finished_job_that_is_started_again_lets_a_worker_decide_first() -> None:
    simulation = running(evaluator=EVALUATOR)
    finish(simulation)
    simulation.settle()
    assert NAME not in simulation.pods
    simulation.end("digits-worker-0", 0)
    simulation.step()
    assert NAME in simulation.pods


def test_a_suspended_job_has_none() -> None:
    simulation = training()
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.pods == {}
    assert simulation.status["phase"] == "Suspended"


def test_what_it_finds_is_in_the_status_and_in_events() -> None:
    simulation = training()
    assert simulation.server is not None
    found = EvaluationStatus(version=10, metrics={"loss": 0.5}, evaluated=1, missed=2)
    progress = Progress(version=12, evaluation=found)
    simulation.server = simulation.server.model_copy(update={"progress": progress})
    simulation.step()
    assert simulation.status["progress"]["evaluation"]["metrics"] == {"loss": 0.5}
    assert [reason for reason in simulation.notes.values() if "Evaluat" in reason] == [
        "Evaluated",
        "EvaluationMissed",
    ]


def test_the_backlog_that_cannot_change_is_for_the_next_job() -> None:
    [backlog] = [field for field in fields(TrainingJobSpec) if field.path == "evaluator.backlog"]
    assert backlog.change is NEVER
    missed = EvaluationStatus(version=10, missed=2)
    [note] = turned(TrainingJobStatus(), TrainingJobStatus(progress=Progress(evaluation=missed)))
    assert "set a larger evaluator.backlog in the next job" in note.message
    [(kind, _, text)] = evaluation_changes(None, missed)
    assert kind == "warning"
    assert "2 checkpoints will not be evaluated" in text
    assert "set a larger evaluator.backlog in the next run" in text


def test_its_template_changes_while_the_job_runs() -> None:
    simulation = training()
    simulation.edit(evaluator=EVALUATOR | {"template": {"metadata": {"labels": {"team": "a"}}}})
    simulation.settle()
    assert simulation.pods[NAME]["metadata"]["labels"]["team"] == "a"
    assert simulation.condition("Degraded")["status"] == "False"
