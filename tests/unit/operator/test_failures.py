"""How the operator takes it that a pod ends: what counts as a failure, and when it is replaced."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from elastic_operator.plan import DeletePod, stamp
from elastic_ps.api.status import MemberStatus, Progress, ServerStatus
from elastic_ps.contract import exits
from tests.testing.simulation import Simulation, finish, job_document, named, running, tell


@pytest.mark.parametrize(
    ("code", "reason", "failures", "condition"),
    [
        (1, "Error", 1, "WorkerFailed"),
        (127, "Error", 1, "WorkerFailed"),
        (137, "Error", 1, "WorkerKilled"),
        (143, "Error", 1, "WorkerKilled"),
        (139, "Error", 1, "WorkerCrashed"),
        (255, "Unknown", 0, "Lost"),
        (251, "Error", 1, "WorkerLeft"),
        (124, "Error", 1, "WorkerHung"),
        (exits.SILENT, "Error", 0, "ServerSilent"),
        (137, "OOMKilled", 1, "OutOfMemory"),
        (128, "StartError", 1, "CannotStart"),
    ],
)
def test_how_a_worker_ends(code: int, reason: str, failures: int, condition: str) -> None:
    simulation = running(worker={"replicas": 2})
    old = simulation.pods["digits-worker-1"]["metadata"]["uid"]
    simulation.end("digits-worker-1", code, reason=reason, message="boom")
    first = simulation.step()
    assert not any(isinstance(action, DeletePod) for action in first.actions), "it is counted first"
    assert simulation.condition("Degraded")["status"] == "True"
    assert simulation.condition("Degraded")["reason"] == condition
    assert condition in simulation.notes.values()
    assert f"Degraded{condition}" not in simulation.notes.values(), "one end, one Event"
    simulation.settle()
    assert simulation.pods["digits-worker-1"]["metadata"]["uid"] != old
    assert simulation.status["worker"]["failures"] == failures
    assert simulation.status["worker"]["restarts"] == 1
    assert simulation.status["worker"]["countedPods"] == []
    assert simulation.condition("Degraded")["status"] == "False"


def test_workers_that_a_node_drain_took_away_are_not_done() -> None:
    """Their pods are being deleted, and have left in order, so that nothing fails and nothing is over."""
    simulation = running(worker={"replicas": 2})
    progress = Progress(records_expected=10, records_applied=4)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    for name in simulation.workers():
        simulation.end(name, 251)
        simulation.pods[name]["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    assert all(isinstance(action, DeletePod) and action.force for action in simulation.step().actions)
    assert simulation.status["phase"] != "Failed"
    assert simulation.status["worker"].items() >= {"completed": 0, "failures": 0, "restarts": 0}.items()
    simulation.settle()
    assert len(simulation.workers()) == 2
    assert simulation.status["phase"] == "Running"


@pytest.mark.parametrize("name", ["digits-worker-1", "digits-ps-0"])
def test_a_pod_that_its_node_refuses_is_not_replaced_without_a_pause(name: str) -> None:
    """The next one comes to the same node, say, and a device there is not well."""
    simulation = running(worker={"replicas": 2})
    for _ in range(3):
        pod = simulation.pods[name]
        pod["metadata"]["creationTimestamp"] = stamp(simulation.now)
        pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no such device"}
        plan = simulation.step()
        plan = simulation.step()
        assert plan.actions == ()
        assert plan.requeue is not None
        assert plan.requeue <= simulation.options.short_life_delay
        simulation.now += simulation.options.short_life_delay
        assert [a.name for a in simulation.step().actions if isinstance(a, DeletePod)] == [name]
        simulation.step()
        assert simulation.pods[name]["status"]["phase"] == "Pending"


@pytest.mark.parametrize("name", ["digits-worker-1", "digits-ps-0"])
def test_a_pod_that_nodes_refuse_again_and_again_is_replaced_less_and_less_often(name: str) -> None:
    simulation = running(worker={"replicas": 2})
    pauses = []
    for _ in range(12):
        pod, began = simulation.pods[name], simulation.now
        pod["metadata"]["creationTimestamp"] = stamp(began)
        pod["status"] = {"phase": "Failed", "reason": "OutOfcpu", "message": "node has not enough"}
        while not (plan := simulation.step()).actions:
            assert plan.requeue is not None
            simulation.now += plan.requeue
        pauses.append((simulation.now - began).total_seconds())
        simulation.step()
    assert pauses[:3] == [5, 5, 5]
    assert pauses == sorted(pauses)
    assert 59 <= pauses[-1] <= 60
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "False"


def test_a_parameter_server_that_has_ended_well_at_once_is_made_again_after_a_pause() -> None:
    simulation = running()
    pod = simulation.pods["digits-ps-0"]
    pod["metadata"]["creationTimestamp"] = stamp(simulation.now)
    pod["status"] = {"phase": "Succeeded"}
    plan = simulation.step()
    assert plan.actions == ()
    assert plan.requeue is not None
    assert plan.requeue <= simulation.options.short_life_delay


def test_a_worker_that_is_hung_and_does_not_end_is_deleted_and_its_successor_is_not() -> None:
    simulation = running(worker={"replicas": 2})
    name = "digits-worker-1"
    old = simulation.pods[name]["metadata"]["uid"]
    member = MemberStatus(worker=1, incarnation=3, pid=7, host=name, state="hung", joined_version=0)

    def gone_for(seconds: float) -> None:
        members = [member.model_copy(update={"gone_seconds": seconds})]
        simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, members=members)

    simulation.now += timedelta(minutes=5)
    gone_for(10)
    assert simulation.step().actions == (), "it may end by itself"
    simulation.now += timedelta(seconds=10)
    gone_for(20)
    [action] = simulation.step().actions
    assert isinstance(action, DeletePod)
    assert action.name == name
    assert "declared hung" in action.reason
    assert action.told, "one removal, one Event"
    assert "WorkerHung" in simulation.notes.values()
    assert simulation.status["worker"]["failures"] == 1, "it counts as one that has ended by itself"
    assert "digits-worker-1 is deleted: it was declared hung" in simulation.status["worker"]["lastFailure"]
    simulation.step()
    simulation.start_pods()
    simulation.now += timedelta(seconds=10)
    gone_for(30)
    assert simulation.step().actions == ()
    assert simulation.pods[name]["metadata"]["uid"] != old
    assert simulation.status["worker"]["failures"] == 1


def test_a_hung_worker_is_counted_by_the_pass_after_one_that_could_not_write_its_status() -> None:
    simulation = running(worker={"replicas": 2})
    name = "digits-worker-1"
    simulation.pods[name]["metadata"]["finalizers"] = ["slow"]
    simulation.now += timedelta(minutes=5)
    member = MemberStatus(worker=1, incarnation=3, pid=7, host=name, state="hung", joined_version=0)
    members = [member.model_copy(update={"gone_seconds": 20})]
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, members=members)
    assert simulation.step(writes=len(simulation.plan().actions)).actions
    assert simulation.status["worker"]["failures"] == 0, "the operator died in between"
    for _ in range(3):
        simulation.step()
    assert simulation.status["worker"]["failures"] == 1


def test_a_worker_that_does_not_answer_is_deleted_soon_when_the_training_is_done() -> None:
    simulation = running(worker={"replicas": 2, "progressTimeout": "0s"})
    name = "digits-worker-1"
    simulation.now += timedelta(minutes=5)
    for finished, seconds, deleted in ((False, 999, []), (True, 59, []), (True, 61, [name])):
        lost = MemberStatus(worker=1, incarnation=3, pid=7, host=name, state="lost", joined_version=0)
        progress = Progress(finished=finished, records_expected=10, records_applied=10 if finished else 5)
        simulation.server = ServerStatus(
            job="digits",
            shard=0,
            shards=1,
            term=1,
            ready=True,
            members=[lost.model_copy(update={"gone_seconds": seconds})],
            progress=progress,
        )
        actions = simulation.step().actions
        assert [action.name for action in actions if isinstance(action, DeletePod)] == deleted


def test_a_lost_worker_that_still_calls_may_evaluate_and_save_when_the_training_is_done() -> None:
    lost = lost_member(5).model_copy(update={"gone_seconds": 300.0, "overdue_seconds": -8.0})
    limit = timedelta(seconds=60)
    assert lost.to_be_killed(limit, finished=True) == ""
    assert "has not come back for 300 s" in lost.to_be_killed(limit, finished=False)
    silent = lost.model_copy(update={"overdue_seconds": 61.0})
    assert "has not answered for 61 s" in silent.to_be_killed(limit, finished=True)


def test_a_chief_that_fails_while_it_saves_is_replaced() -> None:
    """The job waits for it, also if its container starts late and the server is silent for a while."""
    simulation = running(worker={"replicas": 2})
    finish(simulation, chief=1)
    simulation.end("digits-worker-0", 0)
    old = simulation.pods["digits-worker-1"]["metadata"]["uid"]
    simulation.end("digits-worker-1", 1)
    for seconds in range(20):
        server, simulation.server = simulation.server, None if seconds % 3 else simulation.server
        simulation.step()
        simulation.server = server
        simulation.now += timedelta(seconds=5)
    assert simulation.status["phase"] == "Running"
    assert simulation.pods["digits-worker-1"]["metadata"]["uid"] != old
    finish(simulation)
    simulation.end("digits-worker-1", 0)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"


@pytest.mark.parametrize("chief", [None, 0, 2])
def test_a_worker_that_has_nothing_to_save_is_not_replaced_after_the_training(chief: int | None) -> None:
    """2: it was the chief, but the job was scaled down."""
    simulation = running(worker={"replicas": 2})
    finish(simulation, chief=chief)
    simulation.end("digits-worker-0", 0)
    simulation.end("digits-worker-1", 1)
    simulation.settle()
    assert simulation.status["phase"] == "Succeeded"
    assert list(simulation.workers()) == ["digits-worker-0"]


@pytest.mark.parametrize(
    ("checkpoint", "begins"),
    [
        (
            {},
            "starts from scratch, since its checkpoints were on the disk of the pod; "
            "parameterServer.checkpoint.volumeClaim keeps those of the next job",
        ),
        ({"volumeClaim": {}}, "continues from its last checkpoint, if it has written one"),
    ],
)
def test_too_many_failures_end_the_job_with_the_cause_what_was_tried_and_what_to_do(
    checkpoint: dict[str, Any], begins: str
) -> None:
    simulation = running(runPolicy={"backoffLimit": 1}, parameterServer={"checkpoint": checkpoint})
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    output = "Traceback (most recent call last):\n  File x\nKeyError: 'x'\nWARNING the connection was closed"
    simulation.end("digits-worker-0", 1, message=output)
    simulation.settle()
    assert simulation.status["phase"] == "Failed"
    failed = simulation.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert failed["message"] == (
        "KeyError: 'x' (digits-worker-0 exited with 1). Processes have failed 2 times, more than "
        "backoffLimit 1 allows. Correct the cause, and restart the job: `kubectl annotate "
        f"tj/digits --overwrite elastic-ps.dev/restartedAt=$(date -u +%FT%TZ)`. It then {begins}. "
        f"Last output: {output}"
    )
    assert list(simulation.pods) == ["digits-worker-0"], "the failed pod stays for its log"


def lost_member(steps: int, *, index: int = 1, **fields: Any) -> MemberStatus:
    """A member that was lost this very moment."""
    given = {"pid": 7, "host": f"digits-worker-{index}", "state": "lost", "gone_seconds": 0.0}
    return MemberStatus(worker=index, joined_version=0, steps=steps, **{"incarnation": 1, **given, **fields})


def end_again_and_again(simulation: Simulation, times: int, code: int, **fields: Any) -> int:
    """Worker 1 ends so each time it is started; how many failures there are then."""
    for _ in range(times):
        assert simulation.end("digits-worker-1", code, **fields)
        simulation.settle()
    failures: int = simulation.status["worker"]["failures"]
    return failures


@pytest.mark.parametrize(
    ("code", "reason"),
    [(139, "Error"), (130, "Error"), (255, "Error"), (137, "OOMKilled"), (137, "Error"), (251, "Error")],
)
def test_each_death_that_is_no_disruption_counts(code: int, reason: str) -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 3})
    tell(simulation, lost_member(5, index=0), lost_member(5))
    assert end_again_and_again(simulation, 3, code, reason=reason) == 3
    assert simulation.status["phase"] == "Running"
    assert end_again_and_again(simulation, 1, code, reason=reason) == 4
    assert simulation.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_a_worker_whose_init_container_fails_is_not_replaced_for_ever() -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 3})
    init = {"name": "fetch", "state": {"terminated": {"exitCode": 1}}}
    own = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    for _ in range(4):
        status = {"phase": "Failed", "initContainerStatuses": [init], "containerStatuses": [own]}
        simulation.pods["digits-worker-1"]["status"] = status
        simulation.settle()
    failed = simulation.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "the init container fetch of digits-worker-1 exited with 1" in failed["message"]


def disruption(status: str) -> dict[str, Any]:
    kind = {
        "type": "DisruptionTarget",
        "status": status,
        "reason": "PreemptionByScheduler",
        "message": "busy",
    }
    return {"conditions": [kind]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reason": "Evicted"}, "Evicted"),
        ({"reason": "NodeLost"}, "NodeLost"),
        ({"containerStatuses": []}, "Lost"),
        (disruption("True"), "PreemptionByScheduler"),
    ],
)
def test_disruptions_are_free_whatever_the_exit_status(fields: dict[str, Any], reason: str) -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 0})
    for _ in range(4):
        simulation.end("digits-worker-1", 139)
        simulation.pods["digits-worker-1"]["status"].update(fields)
        simulation.settle()
    assert simulation.status["worker"].items() >= {"failures": 0, "restarts": 4}.items()
    assert reason in simulation.notes.values()


def test_a_disruption_that_did_not_come_is_no_excuse() -> None:
    simulation = running(runPolicy={"backoffLimit": 0})
    simulation.end("digits-worker-0", 139)
    simulation.pods["digits-worker-0"]["status"].update(disruption("False"))
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "BackoffLimitExceeded"


def rule(action: str, **fits: Any) -> dict[str, Any]:
    """A runPolicy that has this rule first, then one that is for everything."""
    every = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [255]}}
    return {"backoffLimit": 1, "podFailurePolicy": {"rules": [{"action": action, **fits}, every]}}


@pytest.mark.parametrize(
    ("policy", "code", "failures", "ended"),
    [
        (rule("Ignore", onExitCodes={"values": [3, 139]}), 139, 0, None),
        (rule("Ignore", onExitCodes={"values": [3]}), 139, 0, "PodFailurePolicy"),
        (rule("Count", onExitCodes={"operator": "NotIn", "values": [3]}), 139, 2, "BackoffLimitExceeded"),
        (rule("FailJob", onExitCodes={"operator": "In", "values": [139]}), 139, 0, "PodFailurePolicy"),
        (rule("Count", onExitCodes={"operator": "In", "values": [3]}), 255, 2, "BackoffLimitExceeded"),
        (rule("Ignore", onExitCodes={"values": [78]}), 78, 0, None),
        (rule("Count", onExitCodes={"values": [253]}), exits.SILENT, 2, "BackoffLimitExceeded"),
    ],
)
def test_rules_decide_what_follows_from_an_exit_status(
    policy: dict[str, Any], code: int, failures: int, ended: str | None
) -> None:
    simulation = running(worker={"replicas": 2}, runPolicy=policy)
    for _ in range(2):
        simulation.end("digits-worker-1", code)
        simulation.settle()
    assert simulation.condition("Failed").get("reason") == ended
    if ended != "PodFailurePolicy":
        assert simulation.status["worker"]["failures"] == failures


def test_rules_may_be_for_conditions_of_the_pod() -> None:
    policy = rule("Count", onPodConditions=[{"type": "DisruptionTarget"}])
    simulation = running(worker={"replicas": 2}, runPolicy=policy)
    simulation.end("digits-worker-1", 139)
    simulation.pods["digits-worker-1"]["status"].update(disruption("True"))
    simulation.settle()
    assert simulation.status["worker"]["failures"] == 1
    assert simulation.status["phase"] == "Running"


@pytest.mark.parametrize(
    ("action", "failures", "reason"),
    [("Count", 1, None), ("Ignore", 0, None), ("FailJob", 0, "PodFailurePolicy")],
)
@pytest.mark.parametrize("runs", [True, False])
def test_rules_for_disruptions_are_for_pods_that_are_drained(
    action: str, failures: int, reason: str | None, runs: bool
) -> None:
    """Kubernetes deletes them, so nobody may see them as ended."""
    policy = rule(action, onPodConditions=[{"type": "DisruptionTarget"}])
    simulation = running(worker={"replicas": 2}, runPolicy=policy)
    pod = simulation.pods["digits-worker-1"]
    if not runs:
        simulation.end("digits-worker-1", 251)
    pod["status"].update(disruption("True"))
    pod["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    for _ in range(3):
        simulation.step()
    assert simulation.status["worker"]["failures"] == failures
    assert simulation.condition("Failed").get("reason") == reason
    assert "PreemptionByScheduler" in simulation.notes.values()


FAIL_JOB = rule("FailJob", onPodConditions=[{"type": "DisruptionTarget"}])


def test_what_was_drained_in_an_earlier_run_does_not_end_the_next_one() -> None:
    """A node that is lost does not confirm that its pod has ended."""
    simulation = running(worker={"replicas": 2}, runPolicy=FAIL_JOB)
    pod = simulation.pods["digits-worker-1"]
    pod["status"].update(disruption("True"))
    pod["metadata"] |= {"deletionTimestamp": stamp(simulation.now), "deletionGracePeriodSeconds": 30}
    for _ in range(3):
        simulation.step()
    assert simulation.condition("Failed")["status"] == "True"
    simulation.now += timedelta(minutes=20)
    simulation.restart(simulation.now)
    simulation.now += timedelta(seconds=5)
    for _ in range(4):
        simulation.step()
    assert simulation.condition("Failed")["status"] == "False"


def test_a_drain_of_a_worker_that_scaling_removes_is_no_disruption_of_the_job() -> None:
    simulation = running(worker={"replicas": 2}, runPolicy=FAIL_JOB)
    pod = simulation.pods["digits-worker-1"]
    pod["metadata"]["finalizers"] = ["slow"]
    simulation.scale(1)
    simulation.step()
    assert pod["metadata"]["deletionTimestamp"]
    pod["status"].update(disruption("True"))
    for _ in range(3):
        simulation.step()
    assert simulation.condition("Failed").get("status") != "True"


def test_a_drained_worker_counts_for_no_rule_of_exit_statuses() -> None:
    simulation = running(worker={"replicas": 2}, runPolicy=rule("Count", onExitCodes={"values": [3]}))
    simulation.end("digits-worker-1", 251)
    pod = simulation.pods["digits-worker-1"]
    pod["status"].update(disruption("True"))
    pod["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    simulation.settle()
    assert simulation.status["worker"]["failures"] == 0
    assert simulation.status["phase"] == "Running"


@pytest.mark.parametrize("more", [{}, {"onExitCodes": {"values": [1]}, "onPodConditions": [{"type": "X"}]}])
def test_a_rule_is_for_exit_statuses_or_for_conditions(more: dict[str, Any]) -> None:
    simulation = Simulation(job_document(runPolicy=rule("Ignore", **more)))
    simulation.settle()
    assert "onExitCodes or onPodConditions" in simulation.condition("Failed")["message"]


@pytest.mark.parametrize(("failures", "seconds"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (40, 60)])
def test_a_worker_that_failed_is_replaced_after_twice_the_time_of_the_last(
    failures: int, seconds: int
) -> None:
    simulation = running(runPolicy={"backoffLimit": 100})
    simulation.status["worker"]["failures"] = failures
    simulation.end("digits-worker-0", 1)
    simulation.step()
    assert simulation.status["worker"]["failures"] == failures + 1
    for later, replaced in ((seconds - 0.5, False), (0.5, True)):
        simulation.now += timedelta(seconds=later)
        deleted = [action.name for action in simulation.plan().actions if isinstance(action, DeletePod)]
        assert deleted == (["digits-worker-0"] if replaced else [])


def test_a_node_whose_clock_is_ahead_delays_no_replacement() -> None:
    simulation = running()
    simulation.end("digits-worker-0", 1)
    end = simulation.pods["digits-worker-0"]["status"]["containerStatuses"][0]["state"]["terminated"]
    end["finishedAt"] = stamp(simulation.now + timedelta(minutes=10))
    simulation.step()
    simulation.now += timedelta(seconds=1)
    assert named(simulation.plan()) == ["digits-worker-0"]


def test_a_worker_of_which_it_is_not_known_when_it_failed_is_replaced_at_once() -> None:
    simulation = running()
    simulation.end("digits-worker-0", 1)
    status = simulation.pods["digits-worker-0"]["status"]["containerStatuses"][0]
    del status["state"]["terminated"]["finishedAt"]
    simulation.step()
    assert named(simulation.plan()) == ["digits-worker-0"]


@pytest.mark.parametrize(("lived", "seconds"), [(59, 5), (60, 0)])
def test_a_worker_that_was_lost_soon_is_replaced_after_a_while(lived: int, seconds: int) -> None:
    simulation = running()
    simulation.end("digits-worker-0", 255, reason="Unknown")
    end = simulation.pods["digits-worker-0"]["status"]["containerStatuses"][0]["state"]["terminated"]
    end["startedAt"] = stamp(simulation.now - timedelta(seconds=lived))
    simulation.step()
    simulation.now += timedelta(seconds=max(0, seconds - 1))
    assert named(simulation.plan()) == ([] if seconds else ["digits-worker-0"])
    simulation.now += timedelta(seconds=1)
    assert named(simulation.plan()) == ["digits-worker-0"]


def test_workers_that_are_gone_come_back_unless_one_has_come_to_the_end() -> None:
    """All records being in the model, the others would only find that there is nothing to do."""
    simulation = running(worker={"replicas": 2})
    finish(simulation)
    del simulation.pods["digits-worker-1"]
    assert named(simulation.plan()) == ["digits-worker-1"], "nobody has evaluated the model yet"
    simulation.end("digits-worker-0", 0)
    assert named(simulation.plan()) == []
    unfinished = Progress(records_expected=10, records_applied=9)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=unfinished)
    assert named(simulation.plan()) == ["digits-worker-1"]


def say_invalid(simulation: Simulation, name: str, node: str, message: str = "error: no GPU") -> None:
    """A process on that node ends with exit status 78."""
    simulation.pods[name]["spec"]["nodeName"] = node
    assert simulation.end(name, 78, message=f"10:00:0{len(node)} starting\n{message}")


def trained(**spec: Any) -> Simulation:
    """A job that has made steps already."""
    simulation = running(worker={"replicas": 2}, **spec)
    progress = Progress(version=5, records_expected=10, records_applied=4)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.settle()
    return simulation


def test_one_bad_node_ends_no_job_and_is_avoided() -> None:
    simulation = trained()
    say_invalid(simulation, "digits-worker-1", "bad")
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.status["worker"]["failures"] == 1
    assert simulation.status["worker"]["invalidOn"] == {"bad": "error: no GPU"}
    affinity = simulation.pods["digits-worker-1"]["spec"]["affinity"]["nodeAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}
    ]
    say_invalid(simulation, "digits-worker-0", "other", "error: no room on /data")
    simulation.settle()
    assert simulation.status["phase"] == "Running", "it is something else"


def test_the_same_on_two_nodes_ends_the_job() -> None:
    simulation = trained()
    say_invalid(simulation, "digits-worker-1", "bad")
    simulation.settle()
    say_invalid(simulation, "digits-worker-1", "b")
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "InvalidJob"


def test_the_only_node_says_it_until_the_limit() -> None:
    simulation = trained(runPolicy={"backoffLimit": 2})
    for failures in (1, 2, 3):
        say_invalid(simulation, "digits-worker-1", "only")
        simulation.settle()
        assert simulation.status["worker"]["failures"] == failures
    assert simulation.condition("Failed")["reason"] == "BackoffLimitExceeded"


@pytest.mark.parametrize("claim", [{}, None])
def test_a_server_that_says_so_moves_if_its_checkpoints_do(claim: dict[str, Any] | None) -> None:
    simulation = trained(parameterServer={"checkpoint": {"volumeClaim": claim}})
    end = {"terminated": {"exitCode": 78, "message": "error: the directory is not readable"}}
    server = simulation.pods["digits-ps-0"]
    server["spec"]["nodeName"] = "bad"
    container = {"name": "parameter-server", "state": {"waiting": {}}, "lastState": end}
    server["status"]["containerStatuses"] = [container]
    simulation.settle()
    if claim is None:
        assert simulation.condition("Failed")["reason"] == "InvalidJob"
        return
    assert simulation.pods["digits-ps-0"]["metadata"]["uid"] != server["metadata"]["uid"]
    assert "nodeAffinity" in simulation.pods["digits-ps-0"]["spec"]["affinity"]
    assert simulation.status["worker"].items() >= {"failures": 1, "restarts": 0}.items()
    assert simulation.status["phase"] == "Running"


def test_a_model_that_is_lost_with_its_server_ends_no_job_and_the_job_says_so() -> None:
    """Two earlier workers say it, on two nodes, as they do when nothing is left of the model."""
    simulation = trained(runPolicy={"backoffLimit": 0})
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True)
    for index in (0, 1):
        name = f"digits-worker-{index}"
        simulation.pods[name]["spec"]["nodeName"] = f"node-{index}"
        assert simulation.end(name, exits.LOST, message="has lost the model and has no checkpoint")
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.status["worker"].items() >= {"failures": 0, "restarts": 2}.items()
    assert list(simulation.notes.values()).count("ModelLost") == 1, "for all workers together"
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True)
    simulation.pods["digits-ps-0"]["metadata"]["uid"] = "next"
    assert simulation.end("digits-worker-0", exits.LOST)
    simulation.settle()
    assert list(simulation.notes.values()).count("ModelLost") == 2, "it has been lost again"


def test_a_loss_is_told_once_while_a_worker_that_has_ended_over_it_is_on_its_way_out() -> None:
    """Its node does not answer, say, so its pod stays for minutes. It was deleted before it ended."""
    simulation = trained()
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True)
    assert simulation.end("digits-worker-0", exits.LOST)
    simulation.pods["digits-worker-0"]["metadata"]["deletionTimestamp"] = stamp(simulation.now)
    simulation.pods["digits-worker-0"]["metadata"]["finalizers"] = ["example.com/held"]
    told = [note for _ in range(3) for note in simulation.step().notes if note.reason == "ModelLost"]
    assert len(told) == 1


def test_a_parameter_server_that_is_evicted_for_its_own_limit_is_not_made_again_for_ever() -> None:
    simulation = trained(runPolicy={"backoffLimit": 2})
    message = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    for failures in (1, 2, 3):
        evicted = simulation.pods["digits-ps-0"]
        evicted["status"] = {"phase": "Failed", "reason": "Evicted", "message": message}
        simulation.settle()
        assert simulation.status["worker"].items() >= {"failures": failures, "restarts": 0}.items()
        if failures < 3:
            assert simulation.pods["digits-ps-0"]["metadata"]["uid"] != evicted["metadata"]["uid"]
    assert simulation.condition("Failed")["reason"] == "BackoffLimitExceeded"
