"""What the operator counts, and when a finished job is deleted."""

from __future__ import annotations

import copy
import json
import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.documents import over, read_status
from elastic_operator.plan import DeleteJob, Observed, Options, Plan
from elastic_operator.pods import Pod
from elastic_operator.reconcile import reconcile
from elastic_operator.status import dump_status, explained, holds, model_lost, turned, with_counts
from elastic_ps.api.status import Progress, ServerStatus, TrainingJobStatus, WorkerStatus
from elastic_ps.api.tables import MOST_LISTED, TableStatus
from elastic_ps.api.traffic import Traffic
from tests.testing.simulation import START, Simulation, finish, job_document, running, tell

ENDED = "2026-01-01T00:00:00Z"


def worker(index: int, **fields: Any) -> Pod:
    return Pod(name=f"w-{index}", uid=f"uid-{index}", role="worker", index=index, **fields)


def counted(status: TrainingJobStatus, *pods: Pod) -> WorkerStatus:
    return with_counts(status, Observed(pods=pods), job="digits", replicas=2, shards=1).worker


def with_condition(kind: str, status: str, reason: str, *, phase: str = "Running") -> TrainingJobStatus:
    condition = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": ENDED}
    return TrainingJobStatus.model_validate({"phase": phase, "conditions": [condition] if status else []})


@pytest.mark.parametrize(
    ("kind", "before", "after", "event"),
    [
        ("Degraded", ("", ""), ("True", "Pods"), ("Warning", "DegradedPods")),
        ("Degraded", ("True", "Pods"), ("True", "Pods"), None),
        ("Degraded", ("True", "Pods"), ("True", "Spec"), ("Warning", "DegradedSpec")),
        ("Degraded", ("True", "Pods"), ("True", "Recovering"), None),
        ("Degraded", ("True", "Pods"), ("False", "Healthy"), ("Normal", "Recovered")),
        ("Degraded", ("False", "Healthy"), ("False", "Ended"), None),
        ("Degraded", ("", ""), ("False", "Healthy"), None),
        ("Failed", ("False", "Going"), ("True", "Failed"), ("Warning", "Failed")),
        ("Running", ("False", "Starting"), ("True", "Running"), ("Normal", "Running")),
        ("Running", ("True", "Running"), ("False", "Starting"), None),
        ("Succeeded", ("", ""), ("True", "Finished"), ("Normal", "Succeeded")),
        ("Created", ("", ""), ("True", "Created"), None),
    ],
)
def test_an_event_tells_what_has_come_about_once(
    kind: str, before: tuple[str, str], after: tuple[str, str], event: tuple[str, str] | None
) -> None:
    notes = turned(with_condition(kind, *before), with_condition(kind, *after))
    assert [(note.kind, note.reason) for note in notes] == ([event] if event else [])


def at(version: int, term: int) -> TrainingJobStatus:
    return TrainingJobStatus.model_validate(
        {"progress": {"version": version, "durableVersion": version and 5}, "parameterServer": {"term": term}}
    )


GONE, BACK = "version 7 is gone", "gone back to version 5: at least 2 later versions are trained again"


@pytest.mark.parametrize(
    ("before", "after", "event"),
    [
        ((7, 1), (0, 1), ("ModelLost", GONE)),
        ((7, 1), (0, 2), ("ModelLost", GONE)),  # it was started twice since
        ((7, 3), (2, 1), ("ModelLost", GONE)),
        ((7, 1), (5, 2), ("RolledBack", BACK)),
        ((7, 1), (8, 1), None),
        ((7, 1), (7, 2), None),
        ((0, 0), (0, 1), None),
    ],
)
def test_an_event_tells_that_versions_are_lost(
    before: tuple[int, int], after: tuple[int, int], event: tuple[str, str] | None
) -> None:
    notes = list(model_lost(at(*before), at(*after), Observed()))
    assert [(note.kind, note.reason) for note in notes] == ([("Warning", event[0])] if event else [])
    assert all(event and event[1] in note.message for note in notes)


def test_a_job_that_does_not_run_any_more_has_not_recovered() -> None:
    degraded = with_condition("Degraded", "True", "Pods")
    assert turned(degraded, with_condition("Degraded", "False", "Ended", phase="Succeeded")) == []


def test_a_worker_on_its_way_out_is_not_counted_as_ready() -> None:
    worker_status = counted(
        TrainingJobStatus(), worker(0, ready=True), worker(1, ready=True, deleting=START), worker(2)
    )
    assert (worker_status.replicas, worker_status.ready) == (2, 1)


def test_workers_that_completed_are_kept_when_the_job_is_over_and_their_pods_are_gone() -> None:
    status = TrainingJobStatus(worker=WorkerStatus(completed=2))
    assert counted(status, worker(0, ending="done"), worker(5, ending="done")).completed == 2
    assert counted(status.model_copy(update={"completion_time": ENDED})).completed == 2


def test_a_worker_that_has_completed_is_not_missing_in_the_summary() -> None:
    pods = (worker(0, ending="done"), worker(1, ready=True))
    status = with_counts(TrainingJobStatus(), Observed(pods=pods), job="digits", replicas=2, shards=1)
    assert status.summary.workers == "2/2"


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({"Running": ("True", "Running"), "Degraded": ("False", "AsAsked")}, ""),
        ({"Running": ("True", "Running"), "Degraded": ("True", "Unschedulable")}, "Unschedulable"),
        ({"Running": ("False", "WaitingForWorkers"), "Degraded": ("False", "AsAsked")}, "WaitingForWorkers"),
        ({"Running": ("False", "Failed"), "Failed": ("True", "InvalidSpec")}, "InvalidSpec"),
        ({"Running": ("False", "Suspended"), "Suspended": ("True", "Suspended")}, "Suspended"),
        ({"Succeeded": ("True", "StoppedEarly")}, "StoppedEarly"),
        ({}, ""),
    ],
)
def test_kubectl_get_has_the_reason_that_says_most(
    conditions: dict[str, tuple[str, str]], reason: str
) -> None:
    listed = [
        {"type": kind, "status": status, "reason": why, "lastTransitionTime": ENDED}
        for kind, (status, why) in conditions.items()
    ]
    status = TrainingJobStatus.model_validate({"conditions": listed})
    assert explained(status).summary.reason == reason


def sent(**counts: Any) -> Traffic:
    return Traffic.model_validate({"pushed_plain_bytes": 400, "pulled_plain_bytes": 400, **counts})


def tell_traffic(simulation: Simulation, traffic: Traffic) -> None:
    """The parameter server says that this was the traffic."""
    tell(simulation)
    assert simulation.server is not None
    simulation.server = simulation.server.model_copy(update={"traffic": traffic})


def test_the_status_says_how_many_bytes_all_workers_have_sent() -> None:
    """It is kept when the parameter server has just come back, and when the job has ended."""
    simulation = running(worker={"replicas": 2})
    assert "traffic" not in simulation.status
    first = sent(pushed_bytes=100, pulled_bytes=200, encode_seconds=1.5, codec="int8")
    second = sent(pushed_bytes=60, pulled_bytes=200, decode_seconds=0.25, codec="topk")
    tell_traffic(simulation, first + second)
    simulation.settle()
    expected: dict[str, Any] = {
        "pushedBytes": 160,
        "pushedRatio": 0.2,
        "pulledBytes": 400,
        "pulledRatio": 0.5,
        "codecSeconds": 1.75,
        "codec": "int8, topk",
    }
    assert simulation.status["traffic"] == expected
    assert simulation.server is not None
    simulation.server = simulation.server.model_copy(update={"bucket_bytes": 65536})
    simulation.settle()
    expected["bucketBytes"] = 65536
    assert simulation.status["traffic"] == expected
    hidden = {"push_seconds": 2.0, "hidden_seconds": 1.5, "overlap": "gradients are sent early"}
    tell_traffic(simulation, sent(pushed_bytes=100, **hidden))
    simulation.settle()
    said = simulation.status["traffic"]
    assert (said["overlap"], said["hiddenShare"]) == ("gradients are sent early", 0.75)
    expected = said
    tell_traffic(simulation, Traffic())
    simulation.settle()
    assert simulation.status["traffic"] == expected
    finish(simulation)
    simulation.settle()
    assert simulation.status["traffic"] == expected


@pytest.mark.parametrize(("seconds", "deleted"), [(9, False), (10, True), (11, True)])
def test_a_finished_job_is_deleted_when_its_time_is_over(seconds: int, deleted: bool) -> None:
    succeeded = {"type": "Succeeded", "status": "True", "reason": "Finished", "lastTransitionTime": ENDED}
    job = job_document(runPolicy={"ttlSecondsAfterFinished": 10})
    job["status"] = {"phase": "Succeeded", "completionTime": ENDED, "conditions": [succeeded]}
    plan: Plan = reconcile(job, Observed(), START + timedelta(seconds=seconds), Options())
    assert [type(action) for action in plan.actions] == ([DeleteJob] if deleted else [])
    if not deleted:
        assert plan.requeue == timedelta(seconds=1)


SUCCEEDED = {"type": "Succeeded", "status": "True", "reason": "Finished", "lastTransitionTime": ENDED}


@pytest.mark.parametrize(
    "change",
    [
        {"conditions": [{**SUCCEEDED, "type": "Archived"}, SUCCEEDED]},
        {"conditions": [{**SUCCEEDED, "severity": "Low"}]},
        {"conditions": [{"type": "Running"}, "text", SUCCEEDED]},
        {"phase": "Archived", "conditions": [SUCCEEDED]},
        {"worker": {"replicas": "many", "failures": 2}, "conditions": [SUCCEEDED]},
        {"conditions": [{**SUCCEEDED, "type": "Completed"}], "completionTime": ENDED},
    ],
)
def test_a_job_that_a_newer_operator_has_ended_does_not_run_again(change: dict[str, Any]) -> None:
    simulation = Simulation(job_document())
    assert simulation.job is not None
    simulation.job["status"] = {"completionTime": ENDED, **change}
    assert read_status(simulation.job).worker.failures == change.get("worker", {}).get("failures", 0)
    simulation.settle()
    assert simulation.pods == {}


@pytest.mark.parametrize("status", [None, "text", [], {"conditions": "text", "worker": 3}])
def test_what_is_no_status_is_read_as_none(status: Any) -> None:
    assert read_status({"status": status}) == TrainingJobStatus()


def test_what_a_newer_operator_has_written_is_kept() -> None:
    simulation = Simulation(job_document())
    assert simulation.job is not None
    foreign = {"type": "Archived", "status": "False", "reason": "No", "lastTransitionTime": ENDED}
    created = {"type": "Created", "status": "True", "reason": "Old", "lastTransitionTime": ENDED, "new": 1}
    simulation.job["status"] = {
        "lineage": {"number": 3},
        "worker": {"failures": 1, "rack": {"a": 1}},
        "progress": {"version": 3, "flops": 7},
        "conditions": [foreign, created],
    }
    simulation.settle()
    status = simulation.status
    assert status["phase"] == "Running"
    assert status["lineage"] == {"number": 3}
    assert status["worker"].items() >= {"failures": 1, "rack": {"a": 1}, "ready": 1}.items()
    assert status["progress"]["flops"] == 7
    assert simulation.condition("Archived") == foreign
    assert simulation.condition("Created")["new"] == 1
    before = simulation.writes
    simulation.step()
    assert simulation.writes == before


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (*TrainingJobStatus.model_json_schema()["properties"], "phase2")


@given(
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=6),
    st.lists(JUNK, max_size=3),
    st.dictionaries(st.sampled_from([*WorkerStatus.model_json_schema()["properties"], "rack"]), JUNK),
)
def test_whatever_else_there_is_what_is_understood_is_read_and_what_is_not_ours_is_kept(
    status: dict[str, Any], conditions: list[Any], worker: dict[str, Any]
) -> None:
    document = {**status, "conditions": [*conditions, SUCCEEDED], "worker": worker}
    before = copy.deepcopy(document)
    read = read_status({"status": document})
    assert holds(read, "Succeeded")
    assert document == before
    written = over(document, dump_status(read))
    assert written.get("phase2") == status.get("phase2")
    assert written["worker"].get("rack") == worker.get("rack")
    assert dump_status(read_status({"status": written})) == dump_status(read)


def test_a_job_that_runs_goes_on_though_its_spec_has_a_field_of_a_newer_version() -> None:
    simulation = Simulation(job_document(worker={"replicas": 2}))
    simulation.settle()
    assert simulation.job is not None
    simulation.edit(worker={"replicas": 2, "topology": "ring"}, budget={"hours": 3})
    del simulation.pods["digits-worker-1"]
    simulation.settle()
    assert len(simulation.workers()) == 2
    degraded = simulation.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "SpecNotFollowed")
    assert "does not know worker.topology" in degraded["message"]
    assert "does not know budget" in degraded["message"]


def test_what_json_or_the_api_server_cannot_hold_is_not_stored() -> None:
    progress = Progress(version=3, loss=math.nan, metrics={"a": math.inf, "b": -math.inf, "c": 0.5})
    stored = dump_status(TrainingJobStatus(progress=progress))
    assert stored["progress"]["version"] == 3
    assert stored["progress"]["metrics"] == {"c": 0.5}
    assert not {"loss", "stopped", "percentage"} & stored["progress"].keys(), "no NaN, no empty text"
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored


@pytest.mark.parametrize(
    ("stored", "phase", "conditions"),
    [
        ({}, "Pending", 0),
        ({"phase": "Running", "conditions": "none"}, "Running", 0),
        ({"phase": "Running", "conditions": [{"type": "Running"}, 7]}, "Running", 0),
        ({"phase": "Resting"}, "Pending", 0),
        ({"phase": "Running", "progress": {"percent": 200, "version": "x"}}, "Running", 0),
        ({"phase": "Running", "conditions": [SUCCEEDED | {"new": 1}]}, "Running", 1),
    ],
)
def test_a_status_that_another_version_wrote_is_read_as_far_as_it_is_understood(
    stored: dict[str, Any], phase: str, conditions: int
) -> None:
    before = copy.deepcopy(stored)
    status = read_status({"status": stored})
    assert (status.phase, len(status.conditions)) == (phase, conditions)
    assert stored == before, "what the API server holds is not changed"


def test_a_job_whose_training_is_over_does_not_wait_for_its_workers() -> None:
    """They are no longer ready, and their node has not said yet how they ended."""
    simulation = running(worker={"replicas": 2})
    finish(simulation)
    for name in simulation.workers():
        simulation.pods[name]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    simulation.step()
    assert simulation.status["phase"] == "Running"
    assert simulation.condition("Running")["status"] == "True"
    for name in simulation.workers():
        simulation.end(name, 0)
    simulation.step()
    assert simulation.status["phase"] == "Succeeded"


def test_a_server_that_has_no_model_yet_waits_for_workers() -> None:
    simulation = Simulation(job_document(worker={"replicas": 2}))
    simulation.step()
    assert simulation.condition("Running")["reason"] == "WaitingForParameterServer"
    simulation.server = ServerStatus(job="digits", shard=0, shards=1, term=1, ready=False)
    simulation.step()
    assert simulation.condition("Running")["reason"] == "WaitingForParameterServer"
    running = {"name": "parameter-server", "state": {"running": {"startedAt": ENDED}}}
    simulation.pods["digits-ps-0"]["status"] = {
        "phase": "Running",
        "held": True,
        "containerStatuses": [running],
    }
    simulation.step()
    assert simulation.condition("Running")["reason"] == "WaitingForWorkers"


def test_the_status_has_the_rows_of_the_largest_tables() -> None:
    """They are kept when the parameter server has just come back, and when the job has ended."""
    simulation = running(worker={"replicas": 1})
    tell(simulation)
    simulation.settle()
    assert "tables" not in simulation.status
    assert simulation.server is not None
    counts = {"admitted": 9, "expired": 2, "hits": 5}
    tables = [TableStatus(name=f"{i:03}", rows=7, size_bytes=i, **counts) for i in reversed(range(30))]
    simulation.server = simulation.server.model_copy(update={"tables": tables})
    simulation.settle()
    expected = [
        {"name": f"{i:03}", "rows": 7, "sizeBytes": i, "admitted": 9, "expired": 2}
        for i in range(30 - MOST_LISTED, 30)
    ]
    assert simulation.status["tables"] == expected
    simulation.server = simulation.server.model_copy(update={"tables": []})
    simulation.settle()
    assert simulation.status["tables"] == expected
    finish(simulation)
    simulation.settle()
    assert simulation.status["tables"] == expected
