"""The operator's decisions: what is done, what is reported, and that it comes to rest."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.cluster import with_refusals
from elastic_operator.plan import Create, DeleteJob, DeletePod, Options, Plan, stamp
from elastic_operator.pods import Problem
from elastic_operator.reconcile import reconcile
from elastic_operator.status import read_server_status, read_status
from elastic_ps.status import Member, Progress, ServerStatus
from tests.unit.simulation import Simulation, job_document


def running(**spec: Any) -> Simulation:
    simulation = Simulation(job_document(**spec))
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    return simulation


def _names(plan: Plan) -> list[str]:
    return [action.name for action in plan.actions if not isinstance(action, DeleteJob)]


def finish(simulation: Simulation) -> None:
    progress = Progress(finished=True, records_expected=10, records_applied=10, percent=100)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)


def test_job_becomes_services_claims_and_pods() -> None:
    simulation = running(
        parameterServer={"replicas": 2, "checkpoint": {"volumeClaim": {"storage": "1Gi"}}},
        worker={"replicas": 3},
    )
    assert set(simulation.services) == {"digits-ps-0", "digits-ps-1"}
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


@pytest.mark.parametrize(
    ("code", "reason", "failures", "condition"),
    [
        (1, "Error", 1, "WorkerFailed"),
        (127, "Error", 1, "WorkerFailed"),
        (137, "Error", 0, "WorkerKilled"),
        (143, "Error", 0, "WorkerKilled"),
        (139, "Error", 0, "WorkerCrashed"),
        (255, "Unknown", 0, "Lost"),
        (251, "Error", 0, "WorkerLeft"),
        (124, "Error", 1, "WorkerHung"),
        (137, "OOMKilled", 0, "OutOfMemory"),
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


def test_a_worker_that_is_hung_and_does_not_end_is_deleted_and_its_successor_is_not() -> None:
    simulation = running(worker={"replicas": 2})
    name = "digits-worker-1"
    old = simulation.pods[name]["metadata"]["uid"]
    member = Member(worker=1, incarnation=3, pid=7, host=name, state="hung", joined_version=0)

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
    simulation.step()
    simulation.start_pods()
    simulation.now += timedelta(seconds=10)
    gone_for(30)
    assert simulation.step().actions == ()
    assert simulation.pods[name]["metadata"]["uid"] != old


def test_too_many_failures_end_the_job_with_the_last_words() -> None:
    simulation = running(runPolicy={"backoffLimit": 1})
    simulation.end("digits-worker-0", 1)
    simulation.settle()
    simulation.end("digits-worker-0", 1, message="KeyError: 'x'")
    simulation.settle()
    assert simulation.status["phase"] == "Failed"
    failed = simulation.condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "KeyError: 'x'" in failed["message"]
    assert list(simulation.pods) == ["digits-worker-0"], "the failed pod stays for its log"


def tell(simulation: Simulation, *members: Member) -> None:
    """The parameter server says that these were members."""
    simulation.server = ServerStatus(
        job="digits", shard=0, shards=1, term=1, ready=True, members=list(members)
    )


def stay(steps: int, *, index: int = 1, **fields: Any) -> Member:
    """A worker's stay that has ended this very moment."""
    given = {"pid": 7, "host": f"digits-worker-{index}", "state": "lost", "gone_seconds": 0.0, **fields}
    return Member(worker=index, incarnation=1, joined_version=0, steps=steps, **given)


def end_again_and_again(simulation: Simulation, times: int, code: int, **fields: Any) -> int:
    """Worker 1 ends so each time it is started; how many failures there are then."""
    for _ in range(times):
        assert simulation.end("digits-worker-1", code, **fields)
        simulation.settle()
    failures: int = simulation.status["worker"]["failures"]
    return failures


@pytest.mark.parametrize(
    ("code", "reason"), [(139, "Error"), (130, "Error"), (255, "Error"), (137, "OOMKilled")]
)
def test_a_worker_that_crashes_alike_before_its_first_step_counts_from_the_second_time(
    code: int, reason: str
) -> None:
    simulation = running(worker={"replicas": 2}, runPolicy={"backoffLimit": 2})
    tell(simulation, stay(5, index=0), stay(0))
    assert end_again_and_again(simulation, 3, code, reason=reason) == 2
    assert simulation.status["phase"] == "Running"
    assert end_again_and_again(simulation, 1, code, reason=reason) == 3
    assert simulation.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_crashes_that_differ_or_are_another_worker_s_or_follow_a_step_do_not_count() -> None:
    simulation = running(worker={"replicas": 2})
    tell(simulation)
    for code in (139, 134, 139, 134):
        assert end_again_and_again(simulation, 1, code) == 0
    simulation.end("digits-worker-0", 134)
    simulation.settle()
    assert simulation.status["worker"]["failures"] == 0, "worker 0 has not crashed before"
    tell(simulation, stay(1))
    assert end_again_and_again(simulation, 5, 134) == 0
    tell(simulation, stay(1, state="training", gone_seconds=None))
    assert end_again_and_again(simulation, 5, 134) == 0, "its lease has not run out yet"


def test_what_a_pod_of_the_same_name_trained_before_is_no_use_of_the_next() -> None:
    simulation = running(worker={"replicas": 2})
    before = [stay(9, gone_seconds=7200.0), stay(9, gone_seconds=None), stay(9, host="digits-worker-11")]
    tell(simulation, *before)
    assert end_again_and_again(simulation, 3, 139) == 2


@pytest.mark.parametrize("fields", [{"reason": "Evicted"}, {"reason": "NodeLost"}, {}])
def test_pods_that_were_evicted_or_lost_never_count_whatever_their_exit_status(
    fields: dict[str, str],
) -> None:
    simulation = running(worker={"replicas": 2})
    tell(simulation)
    for _ in range(4):
        simulation.end("digits-worker-1", 139)
        status = simulation.pods["digits-worker-1"]["status"]
        status.update(fields)
        if not fields:
            status["containerStatuses"] = []
        simulation.settle()
    assert simulation.status["worker"].items() >= {"failures": 0, "restarts": 4, "crashes": {}}.items()


def test_a_row_of_crashes_is_not_forgotten_while_the_parameter_server_is_silent() -> None:
    """It is not known then whether a worker was of use, so its crash does not count, but later ones do."""
    simulation = running(worker={"replicas": 2})
    tell(simulation)
    assert end_again_and_again(simulation, 1, 139) == 0
    assert simulation.status["worker"]["crashes"] == {"1": "was killed by SIGSEGV"}
    starting = ServerStatus(job="digits", shard=0, shards=1, term=0, ready=False)
    for silent in (None, starting):
        simulation.server = silent
        assert end_again_and_again(simulation, 1, 139) == 0
        assert end_again_and_again(simulation, 1, 137) == 0
    tell(simulation)
    assert end_again_and_again(simulation, 1, 139) == 1
    tell(simulation, stay(1))
    assert end_again_and_again(simulation, 1, 143) == 1
    assert simulation.status["worker"]["crashes"] == {}, "it had trained, so the row is over"


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


def test_a_worker_of_which_it_is_not_known_when_it_failed_is_replaced_at_once() -> None:
    simulation = running()
    simulation.end("digits-worker-0", 1)
    status = simulation.pods["digits-worker-0"]["status"]["containerStatuses"][0]
    del status["state"]["terminated"]["finishedAt"]
    simulation.step()
    assert _names(simulation.plan()) == ["digits-worker-0"]


@pytest.mark.parametrize(("lived", "seconds"), [(59, 5), (60, 0)])
def test_a_worker_that_was_killed_soon_is_replaced_after_a_while(lived: int, seconds: int) -> None:
    simulation = running()
    simulation.end("digits-worker-0", 137)
    end = simulation.pods["digits-worker-0"]["status"]["containerStatuses"][0]["state"]["terminated"]
    end["startedAt"] = stamp(simulation.now - timedelta(seconds=lived))
    simulation.step()
    simulation.now += timedelta(seconds=max(0, seconds - 1))
    assert _names(simulation.plan()) == ([] if seconds else ["digits-worker-0"])
    simulation.now += timedelta(seconds=1)
    assert _names(simulation.plan()) == ["digits-worker-0"]


def test_workers_that_are_gone_come_back_unless_one_has_come_to_the_end() -> None:
    """All records being in the model, the others would only find that there is nothing to do."""
    simulation = running(worker={"replicas": 2})
    finish(simulation)
    del simulation.pods["digits-worker-1"]
    assert _names(simulation.plan()) == ["digits-worker-1"], "nobody has evaluated the model yet"
    simulation.end("digits-worker-0", 0)
    assert _names(simulation.plan()) == []
    unfinished = Progress(records_expected=10, records_applied=9)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=unfinished)
    assert _names(simulation.plan()) == ["digits-worker-1"]


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
    assert simulation.status["summary"] == {"workers": "2/2", "progress": "100%"}
    simulation.scale(4)
    simulation.settle()
    assert len(simulation.workers()) == 2


def test_workers_that_end_with_records_left_fail_the_job() -> None:
    simulation = running()
    progress = Progress(records_expected=10, records_applied=4)
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, progress=progress)
    simulation.end("digits-worker-0", 0)
    simulation.settle()
    assert simulation.condition("Failed")["reason"] == "RecordsLeft"
    assert "session.stop(reason)" in simulation.condition("Failed")["message"]


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
    assert _names(simulation.step()) == ["digits-worker-0", "digits-worker-1"]
    stopping = simulation.condition("Suspended")
    assert (stopping["status"], stopping["reason"]) == ("False", "Stopping")
    assert stopping["message"].startswith("3 pods")
    assert simulation.condition("Running")["status"] == "False"
    assert _names(simulation.step()) == ["digits-ps-0"]
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    assert simulation.pods == {}
    simulation.edit(runPolicy={"suspend": False})
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Suspended")["status"] == "False"


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"entrypoint": "nonsense"}, "entrypoint"),
        ({"image": None}, "spec.image"),
        ({"worker": {"replicas": 9, "maxReplicas": 2}}, "maxReplicas"),
        ({"worker": {"template": {"spec": {"containers": 5}}}}, "spec.worker.template"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_invalid_spec_fails_once_and_is_looked_at_again_when_edited(spec: dict[str, Any], word: str) -> None:
    simulation = Simulation(job_document(**spec))
    simulation.settle()
    assert simulation.pods == {}
    assert simulation.condition("Failed")["reason"] == "InvalidSpec"
    assert word in simulation.condition("Failed")["message"]
    assert simulation.job is not None
    simulation.job["spec"] = job_document()["spec"]
    simulation.job["metadata"]["generation"] += 1
    simulation.settle()
    assert simulation.status["phase"] == "Running"


def test_long_name_is_refused_in_words() -> None:
    simulation = Simulation(job_document(name="x" * 60))
    simulation.settle()
    assert "52 characters" in simulation.condition("Failed")["message"]


def test_invalid_edit_does_not_end_a_training() -> None:
    simulation = running()
    simulation.edit(data={"shardRecords": 0})
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["status"] == "True"


def test_running_job_keeps_what_it_trains_and_goes_to_the_bound() -> None:
    simulation = running(worker={"replicas": 1, "maxReplicas": 2})
    simulation.edit(entrypoint="other:main")
    simulation.scale(7)
    simulation.settle()
    assert len(simulation.workers()) == 2
    degraded = simulation.condition("Degraded")
    assert "maxReplicas 2" in degraded["message"]
    assert "entrypoint cannot change" in degraded["message"]
    variables = {
        e["name"]: e["value"] for e in simulation.pods["digits-worker-1"]["spec"]["containers"][0]["env"]
    }
    assert "examples.digits.train:main" in variables["ELASTIC_PS_SPEC"]


@pytest.mark.parametrize("replicas", [1, 4, 9])
def test_deterministic_job_keeps_its_workers(replicas: int) -> None:
    simulation = running(worker={"replicas": 3, "maxReplicas": 8}, consistency={"deterministic": True})
    simulation.scale(replicas)
    simulation.settle()
    assert len(simulation.workers()) == 3
    assert simulation.status["phase"] == "Running"
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "SpecNotFollowed")
    assert degraded["message"].startswith(f"worker.replicas {replicas} has no effect")
    assert "maxReplicas" not in degraded["message"]
    assert "DegradedSpecNotFollowed" in simulation.notes.values()
    for name in ("digits-ps-0", "digits-worker-2"):
        del simulation.pods[name]
    simulation.settle()
    for name in ("digits-ps-0", "digits-worker-2"):
        variables = {e["name"]: e["value"] for e in simulation.pods[name]["spec"]["containers"][0]["env"]}
        assert json.loads(variables["ELASTIC_PS_SPEC"])["worker"]["replicas"] == 3
    simulation.scale(3)
    simulation.settle()
    assert simulation.condition("Degraded")["status"] == "False"


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
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Degraded")["reason"] == "Unschedulable"
    assert "no cpu" in simulation.condition("Degraded")["message"]


def test_refused_creation_is_told() -> None:
    simulation = Simulation(job_document())
    assert simulation.job is not None
    quota = with_refusals(simulation.observed(), [Problem("QuotaExceeded", "exceeded quota: pods=0")])
    plan = reconcile(simulation.job, quota, simulation.now, Options())
    assert plan.status is not None
    found = {c.type: c for c in plan.status.conditions}
    assert found["Created"].reason == found["Running"].reason == "QuotaExceeded"
    invalid = with_refusals(simulation.observed(), [Problem("InvalidSpec", "containers[0].image: required")])
    plan = reconcile(simulation.job, invalid, simulation.now, Options())
    assert plan.status is not None
    assert plan.status.phase == "Failed"


def test_pod_of_a_lost_node_is_removed_by_force() -> None:
    simulation = running()
    pod = simulation.pods["digits-worker-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    simulation.now += timedelta(minutes=10)
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [(a.name, a.force) for a in forced] == [("digits-worker-0", True)]


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
    assert [(a.name, a.force) for a in forced] == [("digits-worker-0", True)]
    lost = {"state": {"waiting": {}}, "lastState": {"terminated": {"reason": "ContainerStatusUnknown"}}}
    simulation.pods["digits-ps-0"]["status"]["containerStatuses"] = [lost]
    forced = [a for a in simulation.plan().actions if isinstance(a, DeletePod)]
    assert [a.name for a in forced] == ["digits-ps-0", "digits-worker-0"]


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


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=30))
def test_from_anywhere_it_comes_to_rest_where_it_should(happened: list[tuple[str, Any, int]]) -> None:
    """An operator killed after any write neither forgets nor double counts, and reaches the same end."""
    simulation = Simulation(job_document(worker={"replicas": 2}, runPolicy={"backoffLimit": 1000}))
    tell(simulation)
    failures, crashed = 0, set[int]()
    for what, value, code in happened:
        if what == "end":
            ended = simulation.end(f"digits-worker-{value}", code)
            failures += ended and (code < 128 or (code == 139 and value in crashed))
            if ended and code == 139:
                crashed.add(value)
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
    assert simulation.workers() == [f"digits-worker-{index}" for index in range(wanted)]
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
