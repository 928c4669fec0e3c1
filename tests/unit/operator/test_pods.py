"""What a pod's status means for the job, and why a pod does not start, in words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elastic_operator import names
from elastic_operator.pods import Pod, Problem, read

LIMIT = {"limits": {"memory": "2Gi"}}


def manifest(
    *, role: str = "worker", index: str = "1", resources: Any = None, **status: Any
) -> dict[str, Any]:
    """A pod as the API has it."""
    labels = {names.ROLE_LABEL: role, names.INDEX_LABEL: index}
    return {
        "metadata": {"name": f"digits-{role}-{index}", "uid": "u", "labels": labels},
        "spec": {"containers": [{"name": "side"}, {"name": "worker", "resources": resources}]},
        "status": status,
    }


def waiting(reason: str, *, message: str = "", last: dict[str, Any] | None = None, **more: Any) -> Pod:
    """One whose container waits for that reason."""
    container = {
        "name": "worker",
        "image": "mine:1",
        "state": {"waiting": {"reason": reason, "message": message}},
        "lastState": {"terminated": last} if last else {},
    }
    pod = read(manifest(phase="Pending", containerStatuses=[container], **more))
    assert pod is not None
    assert (pod.ending, pod.ready) == (None, False)
    return pod


@pytest.mark.parametrize("change", [{"role": "other"}, {"role": ""}, {"index": "x"}, {"index": ""}])
def test_a_pod_whose_labels_are_not_the_operators_is_none_of_the_jobs(change: dict[str, str]) -> None:
    assert read(manifest()) is not None
    assert read(manifest(**change)) is None
    assert read({"metadata": {"name": "p", "uid": "u"}, "spec": {}}) is None


@pytest.mark.parametrize(
    "reason",
    ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"],
)
def test_an_image_that_cannot_be_pulled_is_named(reason: str) -> None:
    hint = "`kubectl describe pod digits-worker-1` says why"
    message = f"the image 'mine:1' of digits-worker-1 cannot be pulled; {hint}"
    assert waiting(reason, message="back-off 20s").problem == Problem("ImagePullFailed", message)


def test_a_container_that_cannot_be_made_is_told_with_the_reason() -> None:
    problem = waiting("CreateContainerConfigError", message='secret "s" not found').problem
    assert problem == Problem("CannotStart", 'digits-worker-1 cannot be started: secret "s" not found')
    problem = waiting("RunContainerError").problem
    assert problem == Problem("CannotStart", "digits-worker-1 cannot be started: RunContainerError")


def test_a_container_that_is_started_again_and_again_is_told_with_its_last_end() -> None:
    last = {"exitCode": 3, "message": "KeyError: 'x'"}
    problem = waiting("CrashLoopBackOff", last=last).problem
    words = "digits-worker-1 keeps crashing, last with exit status 3. Last output: KeyError: 'x'"
    assert problem == Problem("CrashLoop", words)
    problem = waiting("CrashLoopBackOff").problem
    words = "digits-worker-1 keeps crashing, last with exit status unknown"
    assert problem == Problem("CrashLoop", words)
    last = {"exitCode": 137, "reason": "OOMKilled"}
    problem = waiting("CrashLoopBackOff", last=last, resources=LIMIT).problem
    words = "digits-worker-1 was killed: out of memory (its limit is 2Gi)"
    assert problem == Problem("OutOfMemory", words)
    problem = waiting("CrashLoopBackOff", last=last).problem
    assert problem == Problem("OutOfMemory", "digits-worker-1 was killed: out of memory")


NOT_YET = {"name": "worker", "image": "mine:1", "state": {"waiting": {"reason": "PodInitializing"}}}


def initialised(end: dict[str, Any], *, sidecar: bool = False, **more: Any) -> Pod:
    """One that has failed, with an init container that has ended so."""
    init = {"name": "fetch", "state": {"terminated": end}}
    status = {"phase": "Failed", "initContainerStatuses": [init], "containerStatuses": [NOT_YET], **more}
    document = manifest(**status)
    policy = {"restartPolicy": "Always"} if sidecar else {}
    document["spec"]["initContainers"] = [{"name": "fetch", **policy}]
    pod = read(document)
    assert pod is not None
    return pod


@pytest.mark.parametrize(
    ("end", "reason", "words"),
    [
        ({"exitCode": 1, "message": "boom"}, "WorkerFailed", " exited with 1. Last output: boom"),
        ({"exitCode": 78}, "WorkerFailed", " exited with 78"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "OutOfMemory", " was killed: out of memory"),
    ],
)
def test_a_pod_whose_init_container_fails_has_failed(end: dict[str, Any], reason: str, words: str) -> None:
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
    pod = initialised({**end, **times}, resources=LIMIT)
    assert pod.ending == "failed"
    assert pod.problem == Problem(reason, f"the init container fetch of digits-worker-1{words}")
    assert (pod.exit, pod.said) == (end["exitCode"], end.get("message", ""))
    assert pod.started is not None
    assert pod.ended is not None
    assert (pod.ended - pod.started).seconds == 9


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ({"exitCode": 0}, {}),
        ({"exitCode": 137, "reason": "ContainerStatusUnknown"}, {}),
        ({"exitCode": 143}, {"sidecar": True}),
        ({"exitCode": 143}, {"reason": "Terminated"}),
        ({"exitCode": 143}, {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}),
    ],
)
def test_an_init_container_that_did_not_fail_by_itself_is_no_failure(
    end: dict[str, Any], more: dict[str, Any]
) -> None:
    assert initialised(end, **more).ending == "disrupted"


def test_an_init_container_that_is_not_started_is_told() -> None:
    def told(reason: str, *, of: dict[str, Any], last: dict[str, Any] | None = None) -> Problem | None:
        state = {"state": {"waiting": {"reason": reason}}, "lastState": {"terminated": last or {}}}
        inits = [{"name": "first", "state": {"terminated": {"exitCode": 0}}}, {"name": "fetch", **state}]
        pod = read(manifest(phase="Pending", initContainerStatuses=inits, containerStatuses=[of]))
        assert pod is not None
        return pod.problem

    problem = told("ImagePullBackOff", of=NOT_YET)
    assert problem is not None
    assert problem.reason == "ImagePullFailed"
    assert "of the init container fetch of digits-worker-1 cannot be pulled" in problem.message
    assert "`kubectl describe pod digits-worker-1`" in problem.message
    problem = told("CrashLoopBackOff", of=NOT_YET, last={"exitCode": 3})
    words = "the init container fetch of digits-worker-1 keeps crashing, last with exit status 3"
    assert problem == Problem("CrashLoop", words)
    assert told("PodInitializing", of=NOT_YET) is None
    runs = {"name": "worker", "state": {"running": {}}}
    assert told("CrashLoopBackOff", of=runs) is None, "it is a side-car, and does not matter"


@pytest.mark.parametrize("name", ["wroker", "parameter-server"])
@pytest.mark.parametrize(
    "own",
    [{"running": {"startedAt": "2026-01-01T00:00:00Z"}}, {"waiting": {"reason": "ContainerCreating"}}],
    ids=str,
)
def test_another_container_without_which_the_pod_is_never_ready_is_told(
    own: dict[str, Any], name: str
) -> None:
    other = {"name": name, "image": "foo", "state": {"waiting": {"reason": "ErrImagePull"}}}
    for containers in itertools.permutations([{"name": "worker", "state": own}, other]):
        pod = read(manifest(phase="Pending", containerStatuses=[*containers]))
        assert pod is not None
        problem = pod.problem
        assert problem is not None
        assert problem.reason == "ImagePullFailed"
        assert problem.message.startswith(
            f"the image 'foo' of the container {name} of digits-worker-1 cannot"
        )
        assert pod.stuck == ("running" not in own), "what trains is not deleted as if it could not run"


def test_a_pod_that_is_gated_names_its_gates() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    document = manifest(phase="Pending", conditions=[gated])
    document["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pod = read(document)
    assert pod is not None
    assert pod.problem is not None
    assert pod.problem.reason == "SchedulingGated"
    assert "to be removed: kueue.x-k8s.io/admission." in pod.problem.message


@pytest.mark.parametrize(
    ("ready", "containers", "silent"),
    [
        ({"status": "False"}, "True", True),
        ({"status": "True"}, "True", False),
        ({"status": "False", "reason": "ContainersNotReady"}, "False", False),
        ({"status": "False", "reason": "ReadinessGatesNotReady"}, "True", False),
    ],
)
def test_a_pod_whose_node_does_not_answer(ready: dict[str, str], containers: str, silent: bool) -> None:
    """The control plane then writes Ready, and nothing else."""
    conditions = [{"type": "Ready", **ready}, {"type": "ContainersReady", "status": containers}]
    pod = read(manifest(phase="Running", conditions=conditions))
    assert pod is not None
    assert pod.silent is silent


@pytest.mark.parametrize(
    ("message", "ending"),
    [
        ('Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ', "failed"),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ", "failed"),
        ('Container worker exceeded its local ephemeral storage limit "2Gi". ', "failed"),
        (
            "The node was low on resource: ephemeral-storage. Container worker was using 20Ki, which exceeds "
            "its request of 0. ",
            "disrupted",
        ),
        ("", "disrupted"),
    ],
)
def test_a_pod_that_is_evicted_for_its_own_limits_has_failed(message: str, ending: str) -> None:
    pod = read(manifest(phase="Failed", reason="Evicted", message=message))
    assert pod is not None
    assert pod.ending == ending
    assert pod.problem is not None
    assert pod.problem.reason == "Evicted"
    assert message in pod.problem.message


def test_a_container_that_is_about_to_start_is_no_problem() -> None:
    assert waiting("ContainerCreating").problem is None
    pod = read(manifest(phase="Pending"))
    assert pod is not None
    assert pod.problem is None
