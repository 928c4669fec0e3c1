"""The operator's decisions: what is done, what is reported, and that it comes to rest."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator import names
from elastic_operator.documents import read_server_status, read_status
from elastic_operator.permissions import Permissions, Policy
from elastic_operator.plan import Create, DeletePod, Observed, Options, Outcome, Plan, stamp
from elastic_operator.pods import Problem
from elastic_operator.reconcile import reconcile
from elastic_operator.status import dump_status
from elastic_ps.api.fields import MOST_SECONDS, parse_duration
from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from tests.testing.simulation import START, Simulation, finish, job_document, named, running, tell


def test_job_becomes_services_claims_and_pods() -> None:
    simulation = running(
        parameterServer={"replicas": 2, "checkpoint": {"volumeClaim": {"storage": "1Gi"}}},
        worker={"replicas": 3},
    )
    assert set(simulation.services) == {"digits-servers"}, "one for all of them"
    assert simulation.claims == {"digits-ps-0"}, "which all servers mount"
    assert simulation.workers() == [f"digits-worker-{index}" for index in range(3)]
    assert set(simulation.pods) - set(simulation.workers()) == {"digits-ps-0", "digits-ps-1"}
    assert simulation.status["worker"].items() >= {"replicas": 3, "ready": 3, "failures": 0}.items()
    assert simulation.status["summary"]["workers"] == "3/3"
    assert simulation.condition("Running")["status"] == "True"


def test_second_pass_does_nothing() -> None:
    simulation = running(worker={"replicas": 2})
    before = simulation.writes
    simulation.now += timedelta(seconds=30)
    assert simulation.step().actions == ()
    assert simulation.writes == before


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    simulation = running()
    assert simulation.job is not None
    simulation.job["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    simulation.pods.clear()
    assert simulation.plan() == Plan()


def test_scaling_removes_the_highest_indexes_and_keeps_the_others() -> None:
    simulation = running(worker={"replicas": 4})
    uids = {name: pod["metadata"]["uid"] for name, pod in simulation.pods.items()}
    simulation.scale(2)
    plan = simulation.plan()
    assert [a.name for a in plan.actions if isinstance(a, DeletePod)] == [
        "digits-worker-3",
        "digits-worker-2",
    ]
    simulation.settle()
    simulation.scale(5)
    simulation.settle()
    assert len(simulation.workers()) == 5
    for name in ("digits-worker-0", "digits-worker-1", "digits-ps-0"):
        assert simulation.pods[name]["metadata"]["uid"] == uids[name]
    assert simulation.status["worker"]["failures"] == 0


NOT_PLACED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
PULLS = {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}


@pytest.mark.parametrize("first", [NOT_PLACED, {"phase": "Failed", "reason": "Evicted"}])
def test_scaling_down_removes_first_what_has_not_begun(first: dict[str, Any]) -> None:
    simulation = running(worker={"replicas": 4})
    uids = {name: simulation.pods[name]["metadata"]["uid"] for name in simulation.workers()}
    hold(simulation, "digits-worker-1", **first)
    hold(simulation, "digits-worker-2", **PULLS)
    simulation.pods["digits-worker-2"]["spec"]["nodeName"] = "node"
    simulation.step()
    simulation.scale(3)
    assert named(simulation.step()) == ["digits-worker-1"]
    simulation.scale(2)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-3"]
    assert simulation.status["summary"]["workers"] == "2/2"
    simulation.scale(3)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1", "digits-worker-3"]
    for name in ("digits-worker-0", "digits-worker-3"):
        assert simulation.pods[name]["metadata"]["uid"] == uids[name]


def test_scaling_down_keeps_who_has_joined_longer_than_who_starts_and_who_is_done() -> None:
    simulation = running(worker={"replicas": 4})
    simulation.end("digits-worker-0", 0)
    simulation.pods["digits-worker-1"]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    order = []
    for replicas in (3, 2, 1):
        simulation.scale(replicas)
        order += named(simulation.step())
    assert order == ["digits-worker-0", "digits-worker-1", "digits-worker-3"]


def test_a_job_with_holes_among_its_workers_is_done_when_each_of_them_is() -> None:
    simulation = running(worker={"replicas": 3})
    hold(simulation, "digits-worker-0", **NOT_PLACED)
    simulation.scale(2)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-1", "digits-worker-2"]
    tell(simulation)
    for name in simulation.workers():
        simulation.end(name, 0)
    simulation.settle()
    assert simulation.condition("Succeeded")["message"] == "every worker has ended its script"
    assert simulation.status["worker"]["completed"] == 2


def test_a_worker_that_is_done_does_not_run_again_when_its_pod_is_removed() -> None:
    simulation = running(worker={"replicas": 3})
    tell(simulation)
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    del simulation.pods["digits-worker-1"]  # its node went away
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-2"]
    assert simulation.status["summary"]["workers"] == "3/3"
    assert simulation.plan().requeue == simulation.options.poll
    simulation.scale(2)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-2"]
    simulation.scale(3)
    simulation.settle()
    assert len(simulation.workers()) == 3, "it made room, and a new worker is wanted now"
    for name in simulation.workers():
        simulation.end(name, 0)
    simulation.settle()
    assert simulation.condition("Succeeded")["message"] == "every worker has ended its script"


def test_workers_that_were_done_count_for_the_end_though_their_pods_are_gone() -> None:
    simulation = running(worker={"replicas": 2})
    tell(simulation)
    for name in simulation.workers():
        simulation.end(name, 0)
        simulation.step()
        simulation.pods.pop(name)
    simulation.settle()
    assert simulation.condition("Succeeded")["message"] == "every worker has ended its script"
    assert simulation.status["worker"]["completed"] == 2


@pytest.mark.parametrize("again", ["a restart", "a failure"])
def test_a_worker_that_was_done_runs_again_when_the_job_is_restarted(again: str) -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 0})
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    del simulation.pods["digits-worker-1"]
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0"]
    if again == "a failure":
        simulation.end("digits-worker-0", 1)
        simulation.settle()
        assert simulation.status["phase"] == "Failed"
    simulation.now += timedelta(seconds=1)
    simulation.restart(simulation.now)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]
    assert simulation.status["phase"] == "Running"


def test_invalid_exit_ends_the_job_at_once() -> None:
    simulation = running(worker={"replicas": 2})
    simulation.end("digits-worker-1", 78, message="no module named examples.digits")
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "InvalidJob"
    assert "no module named" in simulation.condition("Failed")["message"]


def test_success_is_final_and_cleans_up_what_runs() -> None:
    simulation = running(worker={"replicas": 2})
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]
    assert "digits-ps-0" not in simulation.pods
    assert simulation.status["summary"] == {"workers": "2/2", "progress": "100%", "reason": "Finished"}
    assert simulation.status["worker"]["completed"] == 2
    simulation.scale(4)
    simulation.settle()
    assert len(simulation.workers()) == 2


def hold(simulation: Simulation, name: str, **status: Any) -> None:
    """The pod is not started: it is gated, say, or fits on no node."""
    simulation.pods[name]["status"] = {"phase": "Pending", "held": True, **status}


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
        NOT_PLACED,
        PULLS,
        {"initContainerStatuses": [{"name": "fetch", "state": {"running": {"startedAt": stamp(START)}}}]},
    ],
)
def test_a_worker_that_has_not_begun_keeps_no_job_open_that_is_finished(status: dict[str, Any]) -> None:
    simulation = running(worker={"replicas": 2})
    simulation.scale(3)
    simulation.step()
    hold(simulation, "digits-worker-2", **status)
    finish(simulation)
    assert named(simulation.step()) == [], "a job that is resumed when it is finished needs its workers"
    simulation.end("digits-worker-0", 0)
    assert named(simulation.step()) == ["digits-worker-2"]
    assert simulation.status["phase"] == "Running", "worker 1 has begun, and comes to its end"
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]


def test_a_worker_that_never_joins_keeps_no_job_open_that_is_finished() -> None:
    """Its script computes something else. One that has joined may evaluate and save as long as it likes."""
    simulation = running(worker={"replicas": 3})
    for index in (1, 2):
        ready = simulation.pods[f"digits-worker-{index}"]["status"]["conditions"][0]
        ready["status"] = "False"
    finish(simulation)
    assert simulation.server is not None
    saves = MemberStatus(
        worker=1, incarnation=1, pid=1, host="digits-worker-1", state="left", joined_version=0
    )
    saves = saves.model_copy(update={"gone_seconds": 30.0})
    simulation.server = simulation.server.model_copy(update={"members": [saves]})
    simulation.end("digits-worker-0", 0)
    simulation.now += timedelta(seconds=59)
    assert named(simulation.step()) == []
    simulation.now += timedelta(seconds=2)
    server, simulation.server = simulation.server, None
    assert named(simulation.step()) == [], "nobody says whether it has joined"
    simulation.server = server
    plan = simulation.step()
    assert named(plan) == ["digits-worker-2"]
    assert "has not called elastic_ps.connect()" in plan.actions[0].reason
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"


def test_a_worker_that_has_not_begun_and_that_a_finalizer_holds_keeps_no_finished_job_open() -> None:
    simulation = running(worker={"replicas": 1})
    simulation.scale(2)
    simulation.step()
    hold(simulation, "digits-worker-1")
    simulation.pods["digits-worker-1"]["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.step()
    assert simulation.status["phase"] == "Succeeded"


def silent_end(simulation: Simulation, percent: int) -> None:
    """The last that was heard is `percent`, then the workers come to the end of their scripts."""
    progress = Progress(records_expected=100, records_applied=percent, percent=percent)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.step()
    simulation.server = None
    for name in simulation.workers():
        simulation.end(name, 0)


def test_a_job_whose_parameter_server_was_never_reached_does_not_succeed() -> None:
    simulation = running(worker={"replicas": 2})
    for name in simulation.workers():
        simulation.end(name, 0)
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"
    simulation.now += timedelta(minutes=10)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NoAnswer")
    assert "NetworkPolicy" in degraded["message"]
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=0, ready=False)
    simulation.step()
    assert simulation.status["phase"] == "Running", "it still waits for its storage"
    finish(simulation)
    simulation.settle()
    assert simulation.condition("Succeeded")["reason"] == "Finished"


def test_a_parameter_server_that_is_ready_and_does_not_answer_is_told_until_it_does() -> None:
    simulation = running(worker={"replicas": 2})
    simulation.unanswered = timedelta(seconds=10)
    again = simulation.step().requeue
    assert simulation.condition("Degraded")["status"] == "False", "it may be busy"
    assert again == simulation.options.answer_limit - simulation.unanswered
    simulation.unanswered += again
    assert simulation.step().requeue == simulation.options.look
    assert simulation.status["phase"] == "Running"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NoAnswer")
    assert "no NetworkPolicy or service mesh keeps the operator from its port 8080" in degraded["message"]
    simulation.unanswered = timedelta(seconds=2)  # of an operator that was started again
    simulation.step()
    assert simulation.condition("Degraded") == degraded
    simulation.unanswered = None
    tell(simulation)
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"


def test_what_was_known_before_the_workers_ended_fails_no_job() -> None:
    simulation = running()
    silent_end(simulation, 97)
    simulation.now += timedelta(hours=1)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    finish(simulation)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"


def last_words(simulation: Simulation, state: dict[str, Any], **progress: Any) -> None:
    """The parameter server's container has ended and left how far training was."""
    told = Progress(records_expected=100, **progress)
    words = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=told).last_words()
    end = {"terminated": {"exitCode": 0, "reason": "Completed", "message": words}}
    container = {"name": "parameter-server", "state": state or end, "lastState": end}
    simulation.pods["digits-ps-0"]["status"]["containerStatuses"] = [container]


@pytest.mark.parametrize("state", [{}, {"waiting": {"reason": "CrashLoopBackOff"}}])
def test_the_last_words_of_a_parameter_server_decide_when_it_has_ended(state: dict[str, Any]) -> None:
    """As when its node is drained just when the last worker has ended."""
    simulation = running()
    silent_end(simulation, 97)
    last_words(simulation, state, records_applied=100, finished=True)
    simulation.step()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.status["progress"]["recordsApplied"] == 100
    degraded = simulation.condition("Degraded")
    assert "{" not in degraded.get("message", "")


def test_last_words_are_out_of_date_once_a_process_runs_again() -> None:
    simulation = running()
    silent_end(simulation, 97)
    last_words(simulation, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, records_applied=50)
    simulation.now += timedelta(hours=1)
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.status["progress"]["recordsApplied"] == 97


NESTED = f'{{"job": "digits", "more": {"[" * 700}{"]" * 700}}}'


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"job": 1}', "text", '{"job":"digits"}', pytest.param(NESTED, id="nested")]
)
def test_what_are_no_last_words_are_none(text: str) -> None:
    simulation = running()
    silent_end(simulation, 97)
    last_words(simulation, {}, records_applied=100, finished=True)
    container = simulation.pods["digits-ps-0"]["status"]["containerStatuses"][0]
    container["state"]["terminated"]["message"] = text
    simulation.step()
    assert simulation.status["phase"] != "Succeeded"


def test_a_model_that_is_lost_at_the_end_is_no_success() -> None:
    simulation = running()
    silent_end(simulation, 97)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=False)
    simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "ModelLost"
    assert "97 of 100" in failed["message"]


def test_workers_that_end_with_records_left_fail_the_job() -> None:
    simulation = running()
    progress = Progress(records_expected=10, records_applied=4)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "RecordsLeft"
    assert "session.stop(reason)" in simulation.condition("Failed")["message"]


@pytest.mark.parametrize("left", [[0], [0, 1]])
def test_a_worker_that_leaves_records_of_its_fixed_share_fails_the_job(left: list[int]) -> None:
    simulation = running(worker={"replicas": 2}, consistency={"deterministic": True})
    progress = Progress(records_expected=10, records_applied=4, open_shares=left)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == ("Failed" if 1 in left else "Running")
    if 1 in left:
        failed = simulation.condition("Failed")
        assert failed["reason"] == "RecordsLeft"
        assert failed["message"].startswith("digits-worker-1 has ended its script, but only 4 of 10 records")


def test_a_job_whose_scripts_open_no_data_set_succeeds_when_they_have_ended() -> None:
    """They use `session.server` alone."""
    simulation = running()
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, tensor_bytes=4096)
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    assert not simulation.status.get("completionTime"), "one that fails is started again"
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.condition("Succeeded")["message"] == "every worker has ended its script"


def test_a_job_that_a_script_has_stopped_succeeds_with_the_reason() -> None:
    simulation = running()
    progress = Progress(
        version=3, records_expected=10, records_applied=4, finished=True, stopped="no improvement"
    )
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    succeeded = simulation.condition("Succeeded")
    assert succeeded["reason"] == "StoppedEarly"
    assert succeeded["message"] == (
        "a script stopped the training at version 3, with 4 of 10 records in the model: no improvement"
    )


@pytest.mark.parametrize(("problem", "minutes"), [("No space left on device", 1), ("", 11)])
def test_a_job_whose_last_version_is_not_on_disk_fails(problem: str, minutes: int) -> None:
    """Its workers have waited for that; if it counted as done, its volume would hold an older model."""
    simulation = running()

    def durable(version: int) -> ServerStatus:
        told = Progress(
            version=9, records_expected=10, records_applied=10, finished=True, durable_version=version
        )
        return ServerStatus(
            job="digits", shard=0, shards=1, term=1, ready=True, progress=told, problem=problem
        )

    simulation.server = durable(4)
    simulation.end("digits-worker-0", 0)
    simulation.step()
    assert not simulation.status.get("completionTime"), "it may be written yet"
    written = copy.deepcopy(simulation)
    written.server = durable(9)
    written.settle()
    assert written.status["phase"] == "Succeeded"
    simulation.now += timedelta(minutes=minutes)
    simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "NotOnDisk"
    assert (problem or "not written in time") in failed["message"]
    assert "version 4" in failed["message"]
    assert "It then starts from scratch" in failed["message"], "the job has no volume claim"


@pytest.mark.parametrize(("policy", "left"), [("Running", 1), ("None", 2), ("All", 0)])
def test_clean_pod_policy(policy: str, left: int) -> None:
    simulation = running(runPolicy={"cleanPodPolicy": policy})
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert len(simulation.pods) == left


def test_ttl_deletes_the_finished_job() -> None:
    simulation = running(runPolicy={"ttlSecondsAfterFinished": 300})
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.settle(limit=30)
    assert simulation.job is None


def test_deadline_fails_the_job() -> None:
    simulation = running(runPolicy={"activeDeadlineSeconds": 3600})
    simulation.now += timedelta(hours=1)
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "DeadlineExceeded"


def test_suspend_stops_workers_before_servers_and_goes_on() -> None:
    simulation = running(worker={"replicas": 2})
    simulation.edit(runPolicy={"suspend": True})
    assert named(simulation.step()) == ["digits-worker-0", "digits-worker-1"]
    stopping = simulation.condition("Suspended")
    assert (stopping["status"], stopping["reason"]) == ("False", "Stopping")
    assert stopping["message"].startswith("waiting for 3 pods to end")
    assert simulation.condition("Running")["status"] == "False"
    assert simulation.condition("Degraded")["status"] == "False", "its pods are meant to be gone"
    assert named(simulation.step()) == ["digits-ps-0"]
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods == {}
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Suspended")["status"] == "False"


def test_a_suspended_job_is_degraded_no_more_and_one_that_never_ran_is_not_said_to_be() -> None:
    simulation = running()
    simulation.edit(data={"shardRecords": 0})
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "True"
    simulation.edit(data={}, runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"
    never = Simulation(job_document(runPolicy={"suspend": True}))
    never.settle()
    assert never.status["phase"] == "Suspended"
    assert never.condition("Degraded") == {}


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"entrypoint": "nonsense"}, "entrypoint"),
        ({"image": None}, "spec.image"),
        ({"worker": {"replicas": 9, "maxReplicas": 2}}, "maxReplicas"),
        ({"worker": {"replicas": 2_000_000_000}}, "replicas"),
        ({"worker": {"template": {"spec": {"containers": 5}}}}, "spec.worker.template"),
        (
            {"worker": {"template": {"spec": {"containers": [{"name": "wroker"}]}}}},
            "'wroker' without an image",
        ),
        ({"unknown": 1}, "unknown"),
        ({"worker": {"template": {"sepc": {}}}}, "unknown field spec.worker.template.sepc"),
    ],
)
def test_invalid_spec_fails_once_and_is_looked_at_again_when_edited(spec: dict[str, Any], word: str) -> None:
    simulation = Simulation(job_document(**spec))
    simulation.settle()
    assert simulation.pods == {}
    assert simulation.condition("Failed")["reason"] == "InvalidSpec"
    assert word in simulation.condition("Failed")["message"]
    assert simulation.condition("Failed")["message"].endswith(". Correct the spec, and the job starts")
    assert simulation.job is not None
    simulation.job["spec"] = job_document()["spec"]
    simulation.job["metadata"]["generation"] += 1
    simulation.settle()
    assert simulation.status["phase"] == "Running"


def test_invalid_edit_does_not_end_a_training() -> None:
    simulation = running()
    simulation.edit(data={"shardRecords": 0})
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "True"


def test_an_edit_of_what_may_change_that_is_invalid_is_told_and_the_job_goes_on_as_it_was() -> None:
    simulation = running()
    simulation.edit(runPolicy={"backoffLimit": -1})
    plan = simulation.step()
    assert plan.actions == ()
    assert simulation.status["phase"] == "Running"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "keeps its last valid spec until you correct this: " in degraded["message"]
    assert "backoffLimit" in degraded["message"]
    assert "DegradedInvalidSpec" in simulation.notes.values()


@pytest.mark.parametrize(
    ("replicas", "remedy"),
    [
        (0, "To stop all workers of a job on a cluster until later, set runPolicy.suspend: true"),
        (1, "replicas 1 is below minReplicas 2; set replicas to 2 or more, or a smaller minReplicas"),
        (5, "replicas 5 is above maxReplicas 4; set replicas to 4 or less, or a larger maxReplicas"),
    ],
)
def test_a_number_of_workers_that_cannot_be_is_told_with_what_to_do(replicas: int, remedy: str) -> None:
    limits = {"minReplicas": 2, "maxReplicas": 4}
    simulation = running(worker={"replicas": 3, **limits})
    simulation.scale(replicas)
    simulation.settle()
    assert remedy in simulation.condition("Degraded")["message"]
    assert len(simulation.workers()) == 3
    simulation.scale(4)
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"
    assert len(simulation.workers()) == 4
    fails = Simulation(job_document(worker={"replicas": replicas, **limits}))
    fails.settle()
    assert remedy in fails.condition("Failed")["message"]


def forbid(simulation: Simulation) -> None:
    """An edit that cannot be followed, of a part that decides how all workers are made."""
    simulation.edit(worker={"replicas": 1, "template": {"spec": {"hostNetwork": True}}})


def test_pods_that_end_while_the_spec_is_invalid_are_replaced_as_the_last_valid_one_says() -> None:
    template = {"spec": {"nodeSelector": {"gpu": "yes"}}}
    simulation = running(worker={"replicas": 1})
    simulation.edit(worker={"replicas": 2, "template": template})
    simulation.settle()
    forbid(simulation)
    assert simulation.step().actions == (), "what runs is left alone"
    simulation.end("digits-worker-1", 1)
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]
    assert simulation.pods["digits-worker-1"]["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert "digits-ps-0" in simulation.pods
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "keeps its last valid spec until you correct this: " in degraded["message"]
    assert "hostNetwork" in degraded["message"]
    simulation.edit(worker={"replicas": 1, "template": template})
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0"]
    assert simulation.condition("Degraded")["status"] == "False"


def narrowed(part: str = "worker", **run_policy: Any) -> Simulation:
    """A job that runs, with a template that the administrator has ceased to permit, for this part of it."""
    spec: dict[str, Any] = {"worker": {"replicas": 2}, "parameterServer": {}, "runPolicy": dict(run_policy)}
    spec[part]["template"] = {"spec": {"hostNetwork": True}}
    simulation = Simulation(job_document(**spec))
    simulation.options = Options(policy=Policy({"*": Permissions(host_namespaces=True)}))
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    simulation.options = Options()
    return simulation


def test_a_job_that_runs_gets_no_new_pods_from_a_template_that_is_not_permitted_any_more() -> None:
    simulation = narrowed()
    assert simulation.step().actions == (), "what runs is left alone"
    simulation.end("digits-worker-1", 1)
    del simulation.pods["digits-ps-0"]
    simulation.settle()
    assert set(simulation.pods) == {"digits-ps-0", "digits-worker-0"}
    assert simulation.status["worker"]["failures"] == 1
    requeue = simulation.step().requeue
    assert requeue is not None
    assert requeue > timedelta(0), "there is nothing to do"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert degraded["message"].startswith(
        "the job keeps its last valid spec, without new pods from templates that are not permitted any more, "
        "until you correct this: spec.worker.template.spec.hostNetwork is not permitted"
    )
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.condition("Succeeded")["reason"] == "Finished"


def test_a_job_whose_templates_are_not_permitted_any_more_is_suspended_and_ends_in_time() -> None:
    simulation = narrowed()
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods == {}
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert set(simulation.pods) == {"digits-ps-0"}
    late = narrowed(activeDeadlineSeconds=3600)
    late.now += timedelta(hours=1)
    late.settle()
    assert late.condition("Failed")["reason"] == "DeadlineExceeded"


def test_without_a_server_that_is_not_permitted_any_more_no_worker_is_made() -> None:
    simulation = narrowed("parameterServer")
    simulation.end("digits-worker-1", 1)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"], "its server is there"
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert simulation.pods == {}
    assert simulation.condition("Degraded")["reason"] == "InvalidSpec"


def test_a_failed_job_whose_templates_are_not_permitted_any_more_does_not_begin_again() -> None:
    simulation = narrowed(activeDeadlineSeconds=3600)
    simulation.now += timedelta(hours=1)
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "DeadlineExceeded"
    simulation.now += timedelta(minutes=1)
    simulation.restart(simulation.now)
    simulation.now += timedelta(minutes=1)
    simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert "spec.worker.template.spec.hostNetwork is not permitted" in failed["message"]


def test_no_pod_is_deleted_for_a_new_one_that_is_not_permitted() -> None:
    simulation = narrowed()
    fields: dict[str, Any] = {"incarnation": 1, "pid": 7, "joined_version": 0, "state": "training"}
    tell(simulation, *(MemberStatus(worker=i, host=f"digits-worker-{i}", **fields) for i in range(2)))
    simulation.pods["digits-worker-0"]["metadata"]["annotations"][names.TEMPLATE_ANNOTATION] = "older"
    hold(simulation, "digits-worker-1", **NOT_PLACED)
    simulation.pods["digits-worker-1"]["metadata"]["annotations"][names.TEMPLATE_ANNOTATION] = "older"
    simulation.restart(simulation.now)
    simulation.now += timedelta(minutes=1)
    assert simulation.step().actions == ()
    assert simulation.status["worker"]["outdated"] == 2
    simulation.options = Options(policy=Policy({"*": Permissions(host_namespaces=True)}))
    assert {"digits-ps-0", "digits-worker-1"} <= {*named(simulation.step())}


def test_a_suspended_job_whose_spec_becomes_invalid_stays_suspended_until_it_is_resumed() -> None:
    simulation = running()
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    forbid(simulation)
    simulation.settle()
    assert simulation.pods == {}
    assert simulation.status["phase"] == "Suspended"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0"], "as the last valid spec says"
    assert simulation.condition("Degraded")["reason"] == "InvalidSpec"
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.status["phase"] == "Suspended", "nobody has to correct the spec for that"


def test_a_spec_is_not_written_down_where_the_service_would_be_too_large_for_it() -> None:
    template = {"metadata": {"annotations": {"note": "x" * 20_000}}}
    simulation = Simulation(job_document(arguments={"text": "x" * 125_000}, worker={"template": template}))
    service = next(a.manifest for a in simulation.plan().actions if isinstance(a, Create))
    annotations = service["metadata"]["annotations"]
    assert sum(len(name) + len(value) for name, value in annotations.items()) <= 256 * 1024
    simulation.settle()
    assert simulation.status["phase"] == "Running"


def test_a_spec_that_is_too_long_to_be_kept_replaces_an_older_one() -> None:
    """Otherwise a later invalid edit would take the job back to the older one."""
    simulation = running(worker={"replicas": 2})
    assert simulation.valid_spec
    long = {"metadata": {"annotations": {"note": "x" * 210_000}}}
    simulation.edit(worker={"replicas": 3, "template": long})
    simulation.settle()
    assert simulation.valid_spec == ""
    simulation.edit(worker={"replicas": 3, "template": long}, consistency={"mode": "nonsense"})
    simulation.settle()
    assert len(simulation.workers()) == 3
    assert simulation.condition("Degraded")["reason"] == "InvalidSpec"


def test_what_a_person_edits_while_the_job_is_suspended_is_the_last_valid_spec_too() -> None:
    simulation = running()
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    simulation.edit(worker={"replicas": 2})
    simulation.settle()
    forbid(simulation)
    simulation.edit(runPolicy={})
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]


@pytest.mark.parametrize(
    "known", ["", "{", "[]", "5", '{"entrypoint": "nonsense"}', pytest.param("[" * 100_000, id="nested")]
)
def test_a_job_of_which_no_valid_spec_is_known_is_left_alone_until_it_has_one(known: str) -> None:
    """It is too long to be kept, or somebody has written into its Service."""
    simulation = running()
    forbid(simulation)
    simulation.valid_spec = known
    simulation.end("digits-worker-0", 1)
    simulation.now += timedelta(minutes=1)
    for _ in range(3):
        assert simulation.step().actions == ()
    degraded = simulation.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec"
    assert degraded["message"].startswith(
        "the operator knows no valid spec of the job, and leaves it alone until you correct this: spec.worker"
    )


def test_a_deterministic_job_that_names_no_number_of_workers_asks_for_one() -> None:
    simulation = running(consistency={"deterministic": True})
    template = {"spec": {"nodeSelector": {"gpu": "yes"}}}
    simulation.edit(worker={"template": template})
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False", "one it has"
    del simulation.pods["digits-worker-0"]
    simulation.settle()
    assert simulation.pods["digits-worker-0"]["spec"]["nodeSelector"] == {"gpu": "yes"}


def test_parameter_server_that_was_evicted_comes_back() -> None:
    simulation = running()
    simulation.pods["digits-ps-0"]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "disk"}
    simulation.step()
    simulation.settle()
    assert simulation.pods["digits-ps-0"]["metadata"]["uid"] != "pod-1"
    assert simulation.status["phase"] == "Running"


def test_what_cannot_start_is_told_and_enough_workers_run_on() -> None:
    simulation = running(worker={"replicas": 1})
    simulation.scale(2)
    simulation.step()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}
    simulation.pods["digits-worker-1"]["status"] = {
        "phase": "Pending",
        "held": True,
        "conditions": [condition],
    }
    again = simulation.step().requeue
    assert simulation.condition("Degraded")["status"] == "False", "its volume may be on its way"
    assert again is not None
    simulation.now += again
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["reason"] == "Unschedulable"
    assert "no cpu" in simulation.condition("Degraded")["message"]


def test_a_pod_of_which_nothing_starts_is_told() -> None:
    """It lacks a ConfigMap, say: the kubelet tells that in an event only."""
    simulation = running(worker={"replicas": 1})
    simulation.scale(2)
    simulation.step()
    pod = simulation.pods["digits-worker-1"]
    creating = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
    pod["spec"]["nodeName"] = "node"
    simulation.now += timedelta(minutes=5)  # until there was a node for it
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(simulation.now)}
    pod["status"] = {
        "phase": "Pending",
        "held": True,
        "containerStatuses": [creating],
        "conditions": [placed],
    }
    again = simulation.step().requeue
    assert simulation.condition("Degraded")["status"] == "False"
    assert again is not None
    simulation.now += again
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == "NotStarting"
    assert "kubectl describe pod digits-worker-1" in simulation.condition("Degraded")["message"]


@pytest.mark.parametrize("state", [{"running": {}}, {"terminated": {"exitCode": 0}}])
def test_a_pod_whose_init_container_takes_long_is_starting(state: dict[str, Any]) -> None:
    simulation = running(worker={"replicas": 1})
    simulation.scale(2)
    simulation.step()
    pod = simulation.pods["digits-worker-1"]
    pod["spec"]["nodeName"] = "node"
    fetches = {"name": "fetch", "state": state}
    pod["status"] = {"phase": "Pending", "held": True, "initContainerStatuses": [fetches]}
    simulation.now += timedelta(hours=1)
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"


def refusing(simulation: Simulation, *problems: Problem) -> Observed:
    """What there is, once the API server has refused actions of a pass for these reasons."""
    return simulation.observed().with_outcome(Outcome(refusals=problems))


def test_refused_creation_is_told() -> None:
    simulation = Simulation(job_document())
    assert simulation.job is not None
    quota = refusing(simulation, Problem("QuotaExceeded", "exceeded quota: pods=0"))
    plan = reconcile(simulation.job, quota, simulation.now, Options())
    assert plan.status is not None
    found = {c.type: c for c in plan.status.conditions}
    assert found["Created"].reason == found["Running"].reason == "QuotaExceeded"
    invalid = refusing(simulation, Problem("InvalidSpec", "containers[0].image: required"))
    plan = reconcile(simulation.job, invalid, simulation.now, Options())
    assert plan.status is not None
    assert plan.status.phase == "Failed"


def test_a_template_that_makes_no_pod_does_not_end_a_job_that_has_trained() -> None:
    """Its only worker is gone already, to be made from the new template."""
    simulation = running(worker={"replicas": 1})
    progress = Progress(version=3, records_expected=10, records_applied=4)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    del simulation.pods["digits-worker-0"]
    simulation.step(writes=0)
    invalid = refusing(simulation, Problem("InvalidSpec", "memory: 16GB"))
    assert simulation.job is not None
    for _ in range(2):
        plan = reconcile(simulation.job, invalid, simulation.now, Options())
        assert plan.status is not None
        simulation.job["status"] = dump_status(plan.status)
        assert plan.status.phase == "Pending"
        found = {c.type: c for c in plan.status.conditions}
    assert (found["Degraded"].status, found["Degraded"].reason) == ("True", "InvalidSpec")


def test_a_deletion_that_is_refused_is_not_tried_without_a_pause_and_not_forgotten() -> None:
    simulation = running(worker={"replicas": 2})
    forbidden = [Problem("Forbidden", "digits-worker-1: a policy forbids it")]

    def refused() -> Plan:
        assert simulation.job is not None
        observed = refusing(simulation, *forbidden)
        return reconcile(simulation.job, observed, simulation.now, simulation.options)

    simulation.end("digits-worker-1", 1)
    simulation.step()
    simulation.now += timedelta(seconds=10)
    assert named(refused()) == ["digits-worker-1"]
    assert refused().requeue == simulation.options.retry
    assert simulation.job is not None
    simulation.restart(simulation.now)
    simulation.now += timedelta(seconds=1)
    assert (named(refused()), refused().requeue) == (["digits-worker-1"], simulation.options.retry)
    simulation.edit(runPolicy={"suspend": True})
    del simulation.job["metadata"]["annotations"]
    plan = refused()
    assert plan.status is not None
    said = next(c.message for c in plan.status.conditions if c.type == "Suspended")
    assert "a policy forbids it" in said


def test_a_pod_of_a_finished_job_whose_deletion_is_refused_is_not_forgotten() -> None:
    simulation = running()
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.step()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.job is not None
    refused = refusing(simulation, Problem("Forbidden", "digits-ps-0: a policy forbids it"))
    plan = reconcile(simulation.job, refused, simulation.now, simulation.options)
    assert (named(plan), plan.requeue) == (["digits-ps-0"], simulation.options.retry)


def test_a_time_to_live_that_no_date_can_be_away_is_for_ever() -> None:
    """An older version of the definition has let it pass."""
    simulation = running()
    finish(simulation)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.job is not None
    simulation.job["spec"]["runPolicy"] = {"ttlSecondsAfterFinished": 999_999_999_999}
    plan = simulation.step()
    assert not plan.actions
    assert plan.requeue is not None
    assert plan.requeue > timedelta(days=365)


@pytest.mark.parametrize("field", ["activeDeadlineSeconds", "ttlSecondsAfterFinished"])
def test_a_time_that_no_date_can_be_away_is_refused(field: str) -> None:
    simulation = Simulation(job_document(runPolicy={field: 999_999_999_999}))
    simulation.settle()
    assert "2147483647" in simulation.condition("Failed")["message"]


@pytest.mark.parametrize(
    "spec",
    [
        {"worker": {"progressTimeout": "99999999999h"}},
        {"worker": {"leaseDuration": f"{'9' * 400}h"}},
        {"evaluator": {"entrypoint": "a:b", "finishTimeout": "99999999h"}},
        {"consistency": {"mode": "local", "steps": 2, "quorum": 1, "grace": "99999999h"}},
    ],
)
def test_a_duration_that_no_date_can_be_away_is_as_long_as_one_can_be(spec: dict[str, Any]) -> None:
    """The definition admits it, and jobs that were started with one go on."""
    simulation = Simulation(job_document(**spec))
    simulation.settle()
    assert "digits-ps-0" in simulation.pods
    assert parse_duration("99999999999h") == timedelta(seconds=MOST_SECONDS)


def test_pod_of_a_lost_node_is_removed_by_force() -> None:
    simulation = running()
    pod = simulation.pods["digits-worker-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    simulation.now += timedelta(minutes=10)
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [(a.name, a.force) for a in forced] == [("digits-worker-0", True)]


@pytest.mark.parametrize(
    ("reason", "ready", "forced"),
    [
        ("DeletionByTaintManager", {"status": "False"}, ["digits-worker-0"]),
        ("DeletionByTaintManager", {"status": "True"}, []),
        ("DeletionByTaintManager", {"status": "False", "reason": "ContainersNotReady"}, []),
        ("EvictionByEvictionAPI", {"status": "False"}, []),
    ],
)
def test_a_node_that_does_not_answer_is_not_waited_for(
    reason: str, ready: dict[str, str], forced: list[str]
) -> None:
    """Only a kubelet gives a reason: there a side-car has ended, and the process may still write."""
    simulation = running(worker={"replicas": 2})
    pod = simulation.pods["digits-worker-0"]
    pod["metadata"]["deletionTimestamp"] = stamp(simulation.now + timedelta(seconds=60))
    pod["status"]["conditions"] = [
        {"type": "Ready", **ready},
        {"type": "DisruptionTarget", "status": "True", "reason": reason},
    ]
    actions = [a for a in simulation.plan().actions if isinstance(a, DeletePod) and a.force]
    assert [action.name for action in actions] == forced


def with_sidecar(simulation: Simulation, name: str, state: dict[str, Any], phase: str = "Running") -> None:
    """The pod also has a container that is in this state."""
    status = simulation.pods[name]["status"]
    status["phase"] = phase
    status["containerStatuses"].insert(0, {"name": "sidecar", "state": state})


def test_a_side_car_that_runs_on_keeps_no_worker_from_being_done() -> None:
    simulation = running(worker={"replicas": 2})
    finish(simulation)
    for name in simulation.workers():
        simulation.end(name, 0)
        with_sidecar(simulation, name, {"running": {}})
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.status["worker"]["completed"] == 2
    assert simulation.pods == {}, "with their side-cars they would run for ever"


def test_a_side_car_ends_with_the_job_that_is_suspended() -> None:
    simulation = running(worker={"replicas": 2})
    simulation.end("digits-worker-0", 0)
    with_sidecar(simulation, "digits-worker-0", {"running": {}})
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods == {}


def test_a_side_car_that_fails_is_no_failure_of_the_worker() -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 0})
    finish(simulation)
    for name in simulation.workers():
        simulation.end(name, 0)
        with_sidecar(simulation, name, {"terminated": {"exitCode": 1}}, phase="Failed")
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert simulation.status["worker"]["failures"] == 0
    assert len(simulation.workers()) == 2


def test_a_worker_that_fails_beside_a_side_car_is_replaced() -> None:
    simulation = running(worker={"replicas": 2})
    old = simulation.pods["digits-worker-1"]["metadata"]["uid"]
    simulation.end("digits-worker-1", 3)
    with_sidecar(simulation, "digits-worker-1", {"running": {}})
    simulation.settle()
    assert simulation.status["worker"]["failures"] == 1
    assert simulation.pods["digits-worker-1"]["metadata"]["uid"] != old


def test_pod_whose_processes_have_ended_is_not_waited_for() -> None:
    """A kubelet may keep a pod for a minute after its last process has ended."""
    simulation = running(worker={"replicas": 2})
    for name in ("digits-worker-0", "digits-worker-1", "digits-ps-0"):
        simulation.pods[name]["metadata"]["deletionTimestamp"] = stamp(simulation.now + timedelta(seconds=60))
    simulation.end("digits-worker-0", 137)
    simulation.end("digits-worker-1", 137)
    sidecar = {"name": "sidecar", "state": {"running": {}}}
    simulation.pods["digits-worker-1"]["status"]["containerStatuses"].append(sidecar)
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [(a.name, a.force, a.told) for a in forced] == [("digits-worker-0", True, True)]
    drained = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    simulation.pods["digits-worker-0"]["status"]["conditions"] = [drained]
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [(a.name, a.force, a.told) for a in forced] == [("digits-worker-0", True, False)]
    lost = {"state": {"waiting": {}}, "lastState": {"terminated": {"reason": "ContainerStatusUnknown"}}}
    simulation.pods["digits-ps-0"]["status"]["containerStatuses"] = [lost]
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [a.name for a in forced] == ["digits-ps-0", "digits-worker-0"]


def test_a_node_that_does_not_answer_is_told_while_training_goes_on() -> None:
    simulation = running(worker={"replicas": 2})
    pod = simulation.pods["digits-worker-1"]
    pod["spec"]["nodeName"] = "far"
    silent = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    pod["status"]["conditions"] = silent
    simulation.step()
    assert simulation.status["phase"] == "Running"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NodeNotAnswering")
    assert "the node far of digits-worker-1" in degraded["message"]
    assert simulation.status["summary"] == {"workers": "1/2", "reason": "NodeNotAnswering"}


def test_a_worker_that_the_parameter_server_has_lost_is_told_while_its_pod_runs() -> None:
    simulation = running(worker={"replicas": 2})
    fields: dict[str, Any] = {"incarnation": 1, "pid": 7, "joined_version": 0}
    trains = MemberStatus(worker=0, host="digits-worker-0", state="training", **fields)
    gone: dict[str, Any] = {"state": "lost", "reason": "no heartbeat for 10 s", "gone_seconds": 1.0}
    lost = MemberStatus(worker=1, host="digits-worker-1", **gone, **fields)
    tell(simulation, trains, lost)
    simulation.step()
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "WorkerNotAnswering")
    assert "digits-worker-1 no longer takes part: no heartbeat for 10 s" in degraded["message"]
    back = MemberStatus(worker=1, host="digits-worker-1", state="training", **{**fields, "incarnation": 2})
    tell(simulation, trains, lost, back)
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"


def test_a_job_that_recovers_says_so_until_it_has_all_that_it_asks_for() -> None:
    simulation = running(worker={"replicas": 2})
    simulation.end("digits-worker-1", 3)
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == "WorkerFailed"
    simulation.now += timedelta(seconds=10)
    for _ in range(3):
        simulation.step()
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "Recovering")
    counts = "1 of 2 workers and 1 of 1 parameter servers are ready"
    text = f"{counts}; the others are starting. Before that: digits-worker-1 exited with 3"
    assert degraded["message"] == text
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"
    assert list(simulation.notes.values()) == ["Running", "WorkerFailed", "Recovered"]


@pytest.mark.parametrize("named", [{"storageClassName": "nope"}, {}])
def test_a_claim_that_is_not_bound_is_told_with_its_class(named: dict[str, str]) -> None:
    claim = {"storage": "1Gi", **named}
    simulation = Simulation(job_document(parameterServer={"checkpoint": {"volumeClaim": claim}}))
    simulation.step()
    text = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    hold(simulation, "digits-ps-0", conditions=[unbound])
    simulation.now += simulation.options.place_limit
    simulation.step()
    message = simulation.condition("Degraded")["message"]
    asks = "asks for the storage class 'nope'" if named else "names no storage class"
    assert f"{text} The claim is digits-ps-0, which {asks}; `kubectl describe pvc digits-ps-0`" in message


def finalize(simulation: Simulation, name: str) -> None:
    simulation.pods[name]["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]


def test_a_worker_that_a_finalizer_holds_is_deleted_by_force_once_and_replaced() -> None:
    simulation = running(worker={"replicas": 2})
    finalize(simulation, "digits-worker-0")
    simulation.end("digits-worker-0", 1)
    simulation.step()
    simulation.now += timedelta(seconds=5)
    forced = []
    for _ in range(4):
        forced += [a.force for a in simulation.step().actions if isinstance(a, DeletePod)]
        simulation.now += timedelta(seconds=15)
    assert forced == [False, True]
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1", "digits-worker-2"]
    assert simulation.status["summary"]["workers"] == "2/2"
    assert simulation.condition("Degraded")["status"] == "False"


def test_a_worker_that_has_failed_and_that_a_finalizer_holds_keeps_no_finished_job_open() -> None:
    simulation = running(worker={"replicas": 1})
    finalize(simulation, "digits-worker-0")
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"]
    finish(simulation)
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"


def test_a_worker_that_a_finalizer_holds_keeps_no_job_from_being_suspended() -> None:
    simulation = running(worker={"replicas": 1})
    finalize(simulation, "digits-worker-0")
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    simulation.edit(runPolicy={"suspend": True})
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert list(simulation.pods) == ["digits-worker-0"], "its parameter server has written a checkpoint"


def test_a_worker_with_a_fixed_share_of_the_records_waits_for_its_name_and_that_is_told() -> None:
    simulation = running(worker={"replicas": 2}, consistency={"deterministic": True})
    finalize(simulation, "digits-worker-0")
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    assert simulation.workers() == ["digits-worker-0", "digits-worker-1"], "a third one would get no records"
    assert simulation.condition("Degraded")["reason"] == "FinalizerRemains"
    del simulation.pods["digits-worker-0"]
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"


def test_a_server_that_a_finalizer_holds_is_told() -> None:
    simulation = running()
    finalize(simulation, "digits-ps-0")
    simulation.pods["digits-ps-0"]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "disk"}
    for _ in range(3):
        simulation.step()
    simulation.now += simulation.options.force_after * 2
    assert simulation.step().actions[0].reason == "its node does not confirm that it ended"
    assert simulation.step().actions == ()
    assert simulation.condition("Degraded")["reason"] != "FinalizerRemains", "it may be removed at once"
    simulation.now += simulation.options.force_after * 2
    simulation.step()
    assert simulation.condition("Degraded")["reason"] == "FinalizerRemains"
    assert "(kueue.x-k8s.io/managed)" in simulation.condition("Degraded")["message"]


def test_fields_of_other_versions_are_dropped() -> None:
    answer = {"job": "digits", "shard": 0, "shards": 1, "term": 2, "ready": True, "new": 1}
    status = read_server_status({**answer, "progress": {"version": 3, "alsoNew": {}}})
    assert (status.term, status.progress.version) == (2, 3)
    old = read_status({"status": {"phase": "Running", "gone": 1, "worker": {"failures": 2, "gone": 1}}})
    assert (old.phase, old.worker.failures) == ("Running", 2)


events = st.one_of(
    st.tuples(st.just("end"), st.integers(0, 4), st.sampled_from([1, 2, 137, 139, 143])),
    st.tuples(st.just("scale"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("suspend"), st.booleans(), st.just(0)),
    st.tuples(st.just("delete"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("pass"), st.one_of(st.none(), st.integers(0, 6)), st.just(0)),
    st.tuples(st.just("start"), st.just(0), st.just(0)),
)


@given(st.lists(events, max_size=30))
def test_from_anywhere_it_comes_to_rest_where_it_should(happened: list[tuple[str, Any, int]]) -> None:
    """An operator killed after any write neither forgets nor double counts, and reaches the same end."""
    simulation = Simulation(job_document(worker={"replicas": 2}, runPolicy={"backoffLimit": 1000}))
    tell(simulation)
    failures = 0
    for what, value, code in happened:
        if what == "end":
            failures += simulation.end(f"digits-worker-{value}", code)
        elif what == "scale":
            simulation.scale(value)
        elif what == "suspend":
            simulation.edit(runPolicy={"suspend": value, "backoffLimit": 1000})
        elif what == "delete":
            gone = simulation.pods.get(f"digits-worker-{value}")
            if gone is not None and gone["status"]["phase"] == "Running":
                del simulation.pods[f"digits-worker-{value}"]
        elif what == "start":
            simulation.start_pods()
        else:
            simulation.step(value)
            simulation.now += timedelta(seconds=5)
    assert simulation.job is not None
    wanted = simulation.job["spec"]["worker"]["replicas"]
    simulation.edit(runPolicy={"backoffLimit": 1000})
    simulation.settle(limit=120)
    assert len(simulation.workers()) == wanted
    assert simulation.status["phase"] == "Running"
    assert simulation.status["worker"]["failures"] == failures
    before = simulation.writes
    plan = simulation.step()
    assert simulation.writes == before
    assert not any(isinstance(action, Create | DeletePod) for action in plan.actions)


def test_what_the_parameter_server_says_is_wrong_makes_the_job_degraded() -> None:
    """One that waits for room on its disk tells of nothing else: what was known before stays."""
    simulation = Simulation(job_document())
    simulation.settle()
    server = ServerStatus(
        job="digits", shard=0, shards=1, term=3, ready=True, progress=Progress(version=7, loss=0.5)
    )
    simulation.server = server
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"
    waiting = ServerStatus(
        job="digits", shard=0, shards=1, term=0, ready=False, problem="No space left on device"
    )
    simulation.server = waiting
    simulation.step()
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ParameterServerProblem")
    assert degraded["message"] == "No space left on device"
    assert simulation.status["parameterServer"]["term"] == 3
    assert simulation.status["progress"]["version"] == 7
    simulation.server = server
    simulation.step()
    assert simulation.condition("Degraded")["status"] == "False"


def test_a_parameter_server_that_knows_of_no_data_set_has_no_records_left() -> None:
    simulation = running()
    simulation.end("digits-worker-0", 0)
    tell(simulation)
    simulation.step()
    succeeded = simulation.condition("Succeeded")
    assert (succeeded["reason"], succeeded["message"]) == ("Finished", "every worker has ended its script")
