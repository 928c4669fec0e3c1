"""How the operator takes it that a pod ends: what counts as a failure, and when it is replaced."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from elastic_operator.plan import DeletePod, stamp
from elastic_ps.status import Member, Progress, ServerStatus
from tests.unit.simulation import Simulation, finish, named, running, tell


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
    assert named(simulation.plan()) == ["digits-worker-0"]


@pytest.mark.parametrize(("lived", "seconds"), [(59, 5), (60, 0)])
def test_a_worker_that_was_killed_soon_is_replaced_after_a_while(lived: int, seconds: int) -> None:
    simulation = running()
    simulation.end("digits-worker-0", 137)
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
