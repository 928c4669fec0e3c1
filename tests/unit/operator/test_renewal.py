"""An edit mends a job: what is made again at once, one at a time, or when a person asks for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from elastic_operator import names
from elastic_operator.plan import DeletePod, stamp
from elastic_operator.pods import parse_time
from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from tests.testing.simulation import Simulation, job_document

CLAIM: dict[str, Any] = {"checkpoint": {"volumeClaim": {"storage": "1Gi"}}}
STANDBY: dict[str, Any] = {**CLAIM, "durability": "standby"}


def take_part(simulation: Simulation, *absent: str, **progress: Any) -> None:
    """The parameter server says that all workers are members, except these."""
    members = [
        MemberStatus(
            worker=int(name[-1]), incarnation=1, pid=7, host=name, state="training", joined_version=0
        )
        for name in simulation.workers()
        if name not in absent
    ]
    told = Progress(**{"version": 9, "records_expected": 100, "records_applied": 9, **progress})
    simulation.server = ServerStatus(
        job="digits", shard=0, shards=1, term=1, ready=True, progress=told, members=members
    )


def running(**spec: Any) -> Simulation:
    simulation = Simulation(job_document(**{"worker": {"replicas": 3}, **spec}))
    simulation.settle()
    take_part(simulation)
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    return simulation


def deleted(simulation: Simulation) -> list[str]:
    """What one pass deletes."""
    return [action.name for action in simulation.step().actions if isinstance(action, DeletePod)]


def image(simulation: Simulation, pod: str) -> str:
    return str(simulation.pods[pod]["spec"]["containers"][0]["image"])


def waiting(reason: str) -> dict[str, Any]:
    """The status of a pod whose container does not come up."""
    container = {"name": "main", "state": {"waiting": {"reason": reason}}}
    return {"phase": "Pending", "held": True, "containerStatuses": [container]}


def test_a_corrected_image_mends_a_job_that_could_not_pull_it() -> None:
    simulation = Simulation(job_document(image="wrong", worker={"replicas": 2}))
    simulation.step()
    for pod in simulation.pods.values():
        pod["status"] = waiting("ImagePullBackOff")
        pod["status"]["containerStatuses"][0]["name"] = pod["spec"]["containers"][0]["name"]
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == "ImagePullFailed"
    simulation.edit(image="right")
    assert set(deleted(simulation)) == {"digits-ps-0", "digits-worker-0", "digits-worker-1"}
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert {image(simulation, name) for name in simulation.pods} == {"right"}
    assert simulation.condition("Degraded")["status"] == "False"
    assert simulation.status["worker"]["failures"] == 0


def test_a_server_that_keeps_dying_gets_more_memory_by_an_edit() -> None:
    simulation = running(parameterServer=CLAIM)
    end = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    backing_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "parameter-server", "state": backing_off, "lastState": end}
    simulation.pods["digits-ps-0"]["status"] = {"phase": "Running", "containerStatuses": [container]}
    simulation.server = None
    assert deleted(simulation) == []
    more = {"containers": [{"name": "parameter-server", "resources": {"limits": {"memory": "9Gi"}}}]}
    simulation.edit(parameterServer={**CLAIM, "template": {"spec": more}})
    assert deleted(simulation) == ["digits-ps-0"]
    simulation.settle()
    server = simulation.pods["digits-ps-0"]["spec"]["containers"][0]
    assert server["resources"] == {"limits": {"memory": "9Gi"}}


def test_an_edit_deletes_no_server_that_keeps_dying_with_the_only_checkpoints() -> None:
    """The kubelet starts it again on them. A restart that somebody asks for replaces it all the same."""
    simulation = running()
    take_part(simulation, durable_version=5)
    simulation.step()
    backing_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {
        "name": "parameter-server",
        "state": backing_off,
        "lastState": {"terminated": {"exitCode": 1}},
    }
    simulation.pods["digits-ps-0"]["status"] = {"phase": "Running", "containerStatuses": [container]}
    simulation.server = None
    simulation.edit(image="newer")
    assert "digits-ps-0" not in deleted(simulation)
    simulation.now += timedelta(seconds=5)
    simulation.restart(simulation.now)
    assert "digits-ps-0" in deleted(simulation)


def test_workers_that_run_are_replaced_one_by_one_and_the_server_stays() -> None:
    simulation = running(parameterServer=CLAIM)
    server = simulation.pods["digits-ps-0"]["metadata"]["uid"]
    simulation.edit(image="newer")
    simulation.step()
    assert simulation.status["worker"]["outdated"] == 3
    assert simulation.status["parameterServer"]["outdated"] == 1
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]
    for nth, name in enumerate(("digits-worker-2", "digits-worker-1", "digits-worker-0")):
        simulation.step()
        assert deleted(simulation) == [], f"{name} does not run yet"
        simulation.start_pods()
        take_part(simulation, name)
        assert deleted(simulation) == [], f"{name} has not joined yet"
        assert image(simulation, name) == "newer"
        take_part(simulation)
        assert len(deleted(simulation)) == (0 if nth == 2 else 1)
    assert simulation.pods["digits-ps-0"]["metadata"]["uid"] == server
    assert "outdated" not in simulation.status["worker"]
    assert simulation.status["parameterServer"]["outdated"] == 1
    assert simulation.status["worker"].items() >= {"failures": 0, "restarts": 0}.items()


def test_workers_that_have_not_joined_keep_no_edit_from_reaching_the_others() -> None:
    simulation = running(worker={"replicas": 3})
    simulation.scale(4)
    simulation.settle()
    take_part(simulation, "digits-worker-3")
    status = simulation.pods["digits-worker-3"]["status"]
    for each in status["containerStatuses"]:
        each["ready"] = False
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    simulation.edit(image="newer")
    assert deleted(simulation) == ["digits-worker-3"]
    simulation.settle()
    take_part(simulation)
    assert image(simulation, "digits-worker-3") == "newer"
    assert deleted(simulation) == ["digits-worker-2"]


def unplaced(simulation: Simulation, name: str) -> None:
    """The pod fits on no node."""
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    simulation.pods[name]["status"] = {"phase": "Pending", "held": True, "conditions": [reason]}


def crowded(**worker: Any) -> Simulation:
    """A job of four workers; one of them fits on no node, before and after its template has changed."""
    simulation = running(worker={"replicas": 4, **worker})
    unplaced(simulation, "digits-worker-3")
    take_part(simulation, "digits-worker-3")
    simulation.edit(image="newer")
    assert deleted(simulation) == ["digits-worker-3"]
    simulation.step()
    unplaced(simulation, "digits-worker-3")
    assert deleted(simulation) == [], "its node may be on its way"
    simulation.now += simulation.options.place_limit
    return simulation


def test_a_worker_that_fits_on_no_node_keeps_no_edit_from_the_others() -> None:
    simulation = crowded()
    for name in ("digits-worker-2", "digits-worker-1", "digits-worker-0"):
        assert deleted(simulation) == [name]
        simulation.step()
        assert deleted(simulation) == [], f"{name} does not run yet"
        simulation.start_pods()
        take_part(simulation, "digits-worker-3")
        assert image(simulation, name) == "newer"
    assert deleted(simulation) == []


def test_workers_that_fit_on_no_node_after_an_edit_take_no_more_than_one_from_the_job() -> None:
    simulation = crowded()
    assert deleted(simulation) == ["digits-worker-2"]
    simulation.step()
    unplaced(simulation, "digits-worker-2")
    for _ in range(3):
        simulation.now += timedelta(minutes=1)
        assert deleted(simulation) == []


def test_a_worker_that_fits_on_no_node_is_waited_for_if_too_few_would_be_left() -> None:
    assert deleted(crowded(minReplicas=3)) == []


def test_workers_whose_indexes_have_holes_are_replaced_too() -> None:
    simulation = running(worker={"replicas": 3})
    simulation.pods["digits-worker-0"]["status"] = {"phase": "Pending", "held": True}
    simulation.scale(2)
    simulation.settle()
    take_part(simulation)
    simulation.edit(image="localhost/elastic-ps:next")
    assert deleted(simulation) == ["digits-worker-2"]


def test_nobody_is_replaced_at_the_end_or_while_it_is_not_known_who_takes_part() -> None:
    simulation = running()
    simulation.edit(image="newer")
    take_part(simulation, finished=True)
    assert deleted(simulation) == []
    simulation = running()
    simulation.edit(image="newer")
    simulation.server = None
    assert deleted(simulation) == []


@pytest.mark.parametrize(
    "change",
    [
        {"worker": {"replicas": 3, "leaseDuration": "7s"}},
        {"runPolicy": {"backoffLimit": 9}},
        {"parameterServer": {**CLAIM, "checkpoint": {**CLAIM["checkpoint"], "keep": 9}}},
    ],
)
def test_other_edits_replace_nobody(change: dict[str, Any]) -> None:
    simulation = running(parameterServer=CLAIM)
    simulation.edit(**change)
    assert deleted(simulation) == []
    assert "outdated" not in simulation.status["worker"]


def test_pods_of_an_earlier_version_of_the_operator_are_not_outdated() -> None:
    simulation = running()
    for pod in simulation.pods.values():
        del pod["metadata"]["annotations"][names.TEMPLATE_ANNOTATION]
    simulation.edit(image="newer")
    assert deleted(simulation) == []


def test_servers_are_made_again_when_a_person_asks_and_standbys_after_them() -> None:
    simulation = running(parameterServer=STANDBY)
    simulation.now += timedelta(seconds=10)
    asked = simulation.now + timedelta(seconds=20)
    simulation.restart(asked)
    assert deleted(simulation) == [], "it is to happen later"
    simulation.now = asked
    assert deleted(simulation) == ["digits-ps-0", "digits-worker-2"]
    assert deleted(simulation) == [], "the new ones are on their way"
    simulation.start_pods()
    take_part(simulation, "digits-worker-2")
    assert deleted(simulation) == ["digits-standby-0"]
    for _ in range(8):
        simulation.step()
        simulation.start_pods()
        take_part(simulation)
    assert all(pod["metadata"]["creationTimestamp"] >= stamp(asked) for pod in simulation.pods.values())
    assert deleted(simulation) == []


@pytest.mark.parametrize("text", ["soon", "2026-01-01T00:00:00", ""])
def test_a_restart_at_no_time_is_told(text: str) -> None:
    simulation = running()
    assert simulation.job is not None
    simulation.job["metadata"]["annotations"] = {names.RESTART_ANNOTATION: text}
    assert deleted(simulation) == []
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "SpecNotFollowed")
    assert "expected a time with its zone" in degraded["message"]


def failed(code: int = 1) -> Simulation:
    """A job that has failed, with the pods that ended kept for their logs."""
    simulation = running(parameterServer=CLAIM, runPolicy={"backoffLimit": 0})
    simulation.end("digits-worker-0", 0)
    simulation.end("digits-worker-1", code)
    simulation.settle()
    assert simulation.status["phase"] == "Failed"
    return simulation


def test_a_job_that_has_failed_stays_so_when_it_is_to_restart_at_no_time() -> None:
    simulation = failed()
    assert simulation.job is not None
    simulation.job["metadata"]["annotations"] = {names.RESTART_ANNOTATION: "now"}
    simulation.settle()
    assert simulation.status["phase"] == "Failed"


@pytest.mark.parametrize("code", [1, 78])
def test_a_job_that_has_failed_is_resumed_by_one_edit(code: int) -> None:
    simulation = failed(code)
    simulation.restart(simulation.now - timedelta(hours=2))
    simulation.settle()
    assert simulation.status["phase"] == "Failed", "that was before it failed"
    simulation.now += timedelta(minutes=1)
    simulation.restart(simulation.now)
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Failed")["status"] == "False"
    assert "completionTime" not in simulation.status
    assert simulation.status["progress"]["version"] == 9
    assert simulation.status["worker"].items() >= {"failures": 0, "ready": 3}.items()
    assert simulation.claims == {"digits-ps-0"}


def test_a_restart_in_the_second_of_the_failure_counts() -> None:
    """As after `kubectl wait --for=condition=Failed`: both times are whole seconds."""
    simulation = failed()
    completed = parse_time(simulation.status["completionTime"])
    assert completed is not None
    simulation.restart(completed)
    simulation.settle()
    assert simulation.status["phase"] == "Running"


@pytest.mark.parametrize("writes", range(12))
def test_an_operator_that_dies_while_it_resumes_a_job_comes_to_the_same_rest(writes: int) -> None:
    simulation = failed()
    simulation.now += timedelta(minutes=1)
    simulation.restart(simulation.now)
    for _ in range(3):
        simulation.step(writes)
        simulation.start_pods()
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.status["worker"].items() >= {"failures": 0, "ready": 3}.items()


def test_a_job_that_has_succeeded_is_not_started_again() -> None:
    simulation = running()
    take_part(simulation, finished=True)
    for name in simulation.workers():
        simulation.end(name, 0)
    simulation.settle()
    simulation.now += timedelta(minutes=1)
    simulation.restart(simulation.now)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
