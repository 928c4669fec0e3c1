"""What a pod's status means for the job, and why a pod does not start, in words."""

from __future__ import annotations

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
    words = "digits-worker-1 keeps crashing, last with exit status 3. Its last output: KeyError: 'x'"
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


def test_a_container_that_is_about_to_start_is_no_problem() -> None:
    assert waiting("ContainerCreating").problem is None
    pod = read(manifest(phase="Pending"))
    assert pod is not None
    assert pod.problem is None
