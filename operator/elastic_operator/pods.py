"""Reads a pod's status: how the pod has ended, or why it does not start. Pure.

===================== ======================================================================
ending                how it is recognised
===================== ======================================================================
done                  exit status 0
invalid               exit status `exits.INVALID`: the process reports that a restart is of no use
disrupted             the pod has the condition DisruptionTarget or a reason from its node (eviction,
                      preemption, shutdown), or its node does not know how it ended; or exit status
                      `exits.LOST`: the model is lost with the parameter server's pod; or
                      `exits.SILENT`: the parameter server did not answer for too long
failed                any other exit status or signal, out of memory, a command that cannot be started, an
                      init container that failed, eviction for more storage than the pod's own limits allow
===================== ======================================================================
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, cast

from pydantic import ValidationError

from elastic_operator import names
from elastic_operator.documents import read_server_status
from elastic_ps.api.status import ServerStatus
from elastic_ps.contract import exits
from elastic_ps.contract.deaths import cause_of, describe_exit, kind_of
from elastic_ps.contract.env import Role

Ending: TypeAlias = Literal["done", "invalid", "failed", "disrupted"]

_IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
}
_CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
UNSCHEDULABLE = "Unschedulable"
_GATED = "SchedulingGated"
_NOT_FOUND = "ContainerStatusUnknown"
_LOST_SIGHT = {_NOT_FOUND, "Unknown"}
_CANNOT_START = {"StartError", "ContainerCannotRun"}
_REASONS = {"failed": "WorkerFailed", "crashed": "WorkerCrashed", "killed": "WorkerKilled"}
_OWN_LIMIT = re.compile(r"exceed(s|ed) (the|the total|its local ephemeral storage) limit")
"""Matches the kubelet's message when a pod is evicted for exceeding a limit of its own."""

LOST = "ModelLost"
MODEL_LOST = (
    "the parameter server was lost, and its checkpoints with it. Training begins again from the start. To "
    "keep the model when a pod is lost, set parameterServer.checkpoint.volumeClaim in the next job"
)
"""The message when a parameter server without a volume claim has lost its pod."""

LAST_OUTPUT = ". Last output: "
"""Stands between how a pod has ended and the last lines that it printed."""

_KILLED_AS = {
    "Evicted": "was evicted",
    "Preempting": "was preempted",
    "Preempted": "was preempted",
    "NodeLost": "was lost with its node",
    "Shutdown": "was stopped by the shutdown of its node",
    "NodeShutdown": "was stopped by the shutdown of its node",
    "Terminated": "was stopped by the shutdown of its node",
}


@dataclass(frozen=True)
class Problem:
    """A problem of a job or a pod. `reason`: that of a condition; `message`: a sentence for a person."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """One pod of a job, as far as decisions need it.

    Attributes:
        uid: the object's; "" if it is gone, and only its end is remembered.
        ready: the pod's Ready condition.
        deleting: when its grace period ends, if it is being deleted.
        held_by: the finalizers that alone still keep its object; "" if there are none.
        ending: how it ended; None while it may still run. A PS or standby is restarted in place; while it
            lives, `ending` may only be `invalid`.
        live: some of its containers may run, perhaps only side-cars of a worker that has ended.
        reported: its kubelet says why it is not ready.
        silent: the control plane reports that its node does not answer. The pod may still run.
        finished: its phase says that it has ended, so no container is restarted.
        stopped: all its containers have terminated, side-cars included. If it is being deleted, none is
            restarted.
        exit: its container's exit status, if that is known.
        said: the last line that it printed.
        node: where it runs or ran.
        conditions: (type, status) of each of its conditions.
        disruption: the reason of its condition DisruptionTarget; "" if it is not disrupted.
        created: when it was created.
        template: the `builders.template_hash` that it was made from; "" if that is not known.
        pending: not all of its containers have ever been started.
        begun: a container has been started, perhaps an init container.
        problem: why it ended or cannot start.
        placed: when a node was found for it.
        started, ended: when its container started and ended.
        address: its IP.
        last_words: the status that its parameter server left when it ended; None while it runs.
        version: the resourceVersion of the object.
        tuning: the settings that shard 0 is told, see `names.TUNING_ANNOTATION`; "" if there are none.
        durable: whether shard 0 is told that a version is on disk, see `names.DURABLE_ANNOTATION`.
    """

    name: str
    uid: str
    role: Role
    index: int
    ready: bool = False
    deleting: datetime | None = None
    held_by: str = ""
    ending: Ending | None = None
    live: bool = False
    reported: bool = False
    silent: bool = False
    finished: bool = False
    stopped: bool = False
    exit: int | None = None
    said: str = ""
    node: str = ""
    conditions: frozenset[tuple[str, str]] = frozenset()
    disruption: str = ""
    created: datetime | None = None
    template: str = ""
    pending: bool = False
    begun: bool = False
    problem: Problem | None = None
    placed: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    address: str | None = None
    last_words: ServerStatus | None = None
    version: str = field(default="", compare=False)
    tuning: str = ""
    durable: bool = False

    @property
    def active(self) -> bool:
        """Whether it runs or is about to, and is not being deleted."""
        return self.ending is None and self.deleting is None

    @property
    def stuck(self) -> bool:
        """Whether it cannot run, or does not run yet, so that nothing is lost with it."""
        waits = self.active and self.started is None and not self.ready
        return waits and (self.pending or self.problem is not None)

    @property
    def unjoined(self) -> bool:
        """Whether it runs, but is not ready: a worker has not joined."""
        return self.active and not (self.ready or self.stuck)

    @property
    def unbegun(self) -> bool:
        """Whether its process never started: it waits for a node, an image, a volume or an init container."""
        return self.pending and self.started is None

    def unplaced(self, now: datetime) -> timedelta | None:
        """How long it has waited for a node; None if it does not wait."""
        waits = self.problem is not None and self.problem.reason in (UNSCHEDULABLE, _GATED)
        return now - self.created if waits and self.created is not None else None

    def unstarted(self, now: datetime) -> timedelta | None:
        """How long it has had a node without a container that has started; None if one has.

        None, too, if `problem` says why.
        """
        waits = self.active and self.node and not self.begun and self.problem is None
        since = self.placed or self.created
        return now - since if waits and since is not None else None

    def older_than(self, moment: datetime | None) -> bool:
        """Whether it was created before `moment`."""
        return moment is not None and self.created is not None and self.created < moment

    @property
    def unheard(self) -> bool:
        """Whether it was deleted because its node does not answer, which cannot confirm its end."""
        lost = self.disruption == "DeletionByTaintManager" and not (self.ready or self.reported)
        return self.deleting is not None and lost

    @property
    def over(self) -> bool:
        """Whether it failed or was disrupted, and is not being deleted."""
        return self.ending not in (None, "done") and self.deleting is None


def parse_time(value: object) -> datetime | None:
    """Read a timestamp of the API; None if it is None or no timestamp."""
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo is not None else None


def read(manifest: Mapping[str, Any]) -> Pod | None:
    """A pod of the API as a `Pod`; None if its labels are not the operator's."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    labels = metadata.get("labels") or {}
    known, index = labels.get(names.ROLE_LABEL), str(labels.get(names.INDEX_LABEL, ""))
    if known not in names.CONTAINER or not index.isdecimal():
        return None
    role = cast(Role, known)
    container = _main_container(manifest, names.CONTAINER[role])
    annotations = metadata.get("annotations") or {}
    state = container.get("state") or {}
    terminated = state.get("terminated") or _end_of(_failed_init(manifest))
    last = _last_exit(container) or terminated
    finished = status.get("phase") in ("Succeeded", "Failed")
    ending, problem = _ended(manifest, container)
    if ending is None:
        problem = _not_starting(manifest, container, names.CONTAINER[role])
    started = terminated.get("startedAt") or (state.get("running") or {}).get("startedAt")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        index=int(index),
        ready=_condition(status, "Ready").get("status") == "True",
        reported=bool(_condition(status, "Ready").get("reason")),
        deleting=parse_time(metadata.get("deletionTimestamp")),
        # 0: the kubelet has confirmed its end, or it was deleted by force.
        held_by=", ".join(metadata.get("finalizers") or [])
        if metadata.get("deletionGracePeriodSeconds") == 0
        else "",
        ending=ending,
        live=not finished and not _stopped(status),
        silent=_silent(status),
        finished=finished,
        stopped=_stopped(status),
        exit=last.get("exitCode"),
        said=str(last.get("message") or "").strip().rpartition("\n")[2][-300:],
        node=str((manifest.get("spec") or {}).get("nodeName") or ""),
        conditions=_shared(
            frozenset((str(c.get("type")), str(c.get("status"))) for c in status.get("conditions") or [])
        ),
        problem=problem,
        placed=_placed(status),
        started=parse_time(started),
        ended=parse_time(terminated.get("finishedAt")),
        disruption=_disruption(status),
        created=parse_time(metadata.get("creationTimestamp")),
        template=str(annotations.get(names.TEMPLATE_ANNOTATION) or ""),
        tuning=str(annotations.get(names.TUNING_ANNOTATION) or ""),
        durable=bool(annotations.get(names.DURABLE_ANNOTATION)),
        pending=status.get("phase") == "Pending",
        begun=status.get("phase") not in (None, "Pending") or any(map(_has_begun, _containers(status))),
        address=status.get("podIP"),
        last_words=_last_words(metadata, container),
        version=str(metadata.get("resourceVersion") or ""),
    )


@functools.lru_cache(maxsize=256)
def _shared(conditions: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """The first equal set: thousands of pods are kept, and most have the same conditions."""
    return conditions


def _last_exit(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the container ended; if it was restarted, how it ended before."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    end: Mapping[str, Any] = state.get("terminated") or last.get("terminated") or {}
    return end


def _main_container(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    statuses = (manifest.get("status") or {}).get("containerStatuses") or []
    return next((status for status in statuses if status.get("name") == name), {})


def _end_of(container: Mapping[str, Any]) -> Mapping[str, Any]:
    end: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
    return end


def _failed_init(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The init container that failed the pod before its main container started; empty if there is none.

    An init container that is always restarted is a side-car.
    """
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    if status.get("phase") != "Failed":
        return {}
    sidecars = {c.get("name") for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"}
    inits = [c for c in status.get("initContainerStatuses") or [] if c.get("name") not in sidecars]
    return next((container for container in inits if _end_of(container).get("exitCode")), {})


def _last_words(metadata: Mapping[str, Any], container: Mapping[str, Any]) -> ServerStatus | None:
    """The status that a parameter server left; None if a new process runs, which knows more."""
    end = _last_exit(container)
    if "running" in (container.get("state") or {}) or not (text := str(end.get("message") or "")).startswith(
        "{"
    ):
        return None
    try:
        words = read_server_status(dict(json.loads(text)))
    except (ValueError, TypeError, RecursionError, ValidationError):
        return None
    return words if words.job == (metadata.get("labels") or {}).get(names.JOB_LABEL) else None


def _disruption(status: Mapping[str, Any]) -> str:
    target = _condition(status, "DisruptionTarget")
    return str(target.get("reason") or "Disrupted") if target.get("status") == "True" else ""


def _stopped(status: Mapping[str, Any]) -> bool:
    def gone(container: Mapping[str, Any]) -> bool:
        last = (container.get("lastState") or {}).get("terminated") or {}
        # The kubelet no longer finds such a container, and reports it as waiting.
        return "terminated" in (container.get("state") or {}) or last.get("reason") == _NOT_FOUND

    return bool(status.get("containerStatuses")) and all(map(gone, _containers(status)))


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The statuses of all containers, the init containers first."""
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _has_begun(container: Mapping[str, Any]) -> bool:
    state = container.get("state") or {}
    return "running" in state or "terminated" in state or bool(container.get("lastState"))


def _placed(status: Mapping[str, Any]) -> datetime | None:
    scheduled = _condition(status, "PodScheduled")
    return parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None


def _silent(status: Mapping[str, Any]) -> bool:
    """The control plane then sets Ready to False without a reason; a kubelet gives one."""
    ready = _condition(status, "Ready")
    unready = ready.get("status") == "False" and not ready.get("reason")
    return unready and _condition(status, "ContainersReady").get("status") == "True"


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or [] if c.get("type") == kind), {})


def _ended(manifest: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[Ending | None, Problem | None]:
    name, status = manifest["metadata"]["name"], manifest.get("status") or {}
    phase, reason = status.get("phase"), str(status.get("reason") or "")
    last, terminated = (container.get("lastState") or {}).get("terminated") or {}, _end_of(container)
    for end in (terminated, last):
        if end.get("exitCode") == exits.INVALID:
            return "invalid", Problem(
                "InvalidJob", _said(f"{name} reports that the job cannot run as specified", end)
            )
    # A worker's container is not restarted, nor an evaluator's that has succeeded. Its end is that of the
    # pod, whatever side-cars do. Other containers are restarted.
    called, code = container.get("name"), terminated.get("exitCode")
    final = called == names.CONTAINER["worker"] or (called == names.CONTAINER["evaluator"] and code == 0)
    own = terminated if final else {}
    if phase == "Succeeded" or (own and own.get("exitCode") == 0):
        return "done", None
    if phase != "Failed" and not own:
        return None, None
    if reason:
        words = _KILLED_AS.get(reason, f"was ended by its node ({reason})")
        message = str(status.get("message") or "")
        ending: Ending = "failed" if reason == "Evicted" and _OWN_LIMIT.search(message) else "disrupted"
        return ending, Problem(reason, f"{name} {words}{f': {message}' if message else ''}")
    if why := _disruption(status):
        said = _condition(status, "DisruptionTarget").get("message") or why
        return "disrupted", Problem(why, f"{name} was disrupted: {said}")
    init = _failed_init(manifest)
    end = terminated or _end_of(init)
    if not end or end.get("reason") in _LOST_SIGHT:
        return "disrupted", Problem("Lost", f"{name} ended, and its node does not know how it ended")
    if not terminated:
        return "failed", _exit(_init_name(init, name), end)
    if end.get("exitCode") == exits.LEFT:
        return "failed", Problem("WorkerLeft", f"{name} got SIGTERM, finished its step and left")
    if end.get("exitCode") == exits.LOST:
        return "disrupted", Problem(LOST, f"{name} ended: {MODEL_LOST}")
    if end.get("exitCode") == exits.SILENT:
        said = _said(f"{name} ended because the parameter server did not answer it", end)
        return "disrupted", Problem("ServerSilent", said)
    if end.get("exitCode") == exits.HUNG:
        return "failed", Problem("WorkerHung", _said(f"{name} exited because it made no progress", end))
    return "failed", _exit(name, end, limit=_limit(manifest))


def _init_name(container: Mapping[str, Any], pod: str) -> str:
    return f"the init container {container.get('name')} of {pod}"


def _exit(name: str, end: Mapping[str, Any], *, limit: str = "") -> Problem:
    code = int(end.get("exitCode", 255))
    if end.get("reason") == "OOMKilled":
        return Problem("OutOfMemory", f"{name} was killed: out of memory{limit}")
    if end.get("reason") in _CANNOT_START:
        return Problem("CannotStart", _said(f"the command of {name} cannot be started", end))
    return Problem(_REASONS[kind_of(code)], _said(f"{name} {describe_exit(code)}", end))


def _limit(manifest: Mapping[str, Any]) -> str:
    for container in (manifest.get("spec") or {}).get("containers") or []:
        memory = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if memory and container["name"] in names.CONTAINER.values():
            return f" (its limit is {memory})"
    return ""


def _said(what: str, end: Mapping[str, Any]) -> str:
    """The cause of an end, if its last output names one, then `what` has happened and the output itself."""
    words = str(end.get("message") or "").strip()
    if not words or words.startswith("{"):  # a parameter server leaves JSON for the operator
        return what
    cause = cause_of(words).partition("\n")[0][:300]
    return f"{f'{cause} ({what})' if cause else what}{LAST_OUTPUT}{words[-600:]}"


def _not_starting(manifest: Mapping[str, Any], container: Mapping[str, Any], own: str) -> Problem | None:
    """Why a pod is not ready, or about to be. `own`: the name of the job's own container."""
    name, status = manifest["metadata"]["name"], manifest.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("reason") == UNSCHEDULABLE:
        return Problem(UNSCHEDULABLE, f"{name} fits on no node: {scheduled.get('message', '')}")
    if scheduled.get("reason") == _GATED:
        gates = (manifest.get("spec") or {}).get("schedulingGates") or []
        listed = ", ".join(str(gate.get("name")) for gate in gates)
        text = f"{name} waits for its scheduling gates to be removed: {listed}"
        return Problem(_GATED, f"{text}. Their owner, such as a queue, removes them")
    if (why := _waiting(name, name, container, limit=_limit(manifest))) is not None:
        return why
    running = "running" in (container.get("state") or {})
    inits = () if running else status.get("initContainerStatuses") or ()
    others = [(_init_name(each, name), each) for each in inits]
    for each in status.get("containerStatuses") or ():
        if each.get("name") != own:  # the pod is not ready without it
            others.append((f"the container {each.get('name')} of {name}", each))
    return next(filter(None, (_waiting(name, called, each) for called, each in others)), None)


def _waiting(pod: str, name: str, container: Mapping[str, Any], *, limit: str = "") -> Problem | None:
    """Why the container that messages call `name` does not start; None if it is about to."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _IMAGE_REASONS:
        image = container.get("image") or "its image"
        # The kubelet's own message alternates while it backs off.
        hint = f"`kubectl describe pod {pod}` says why"
        return Problem("ImagePullFailed", f"the image {image!r} of {name} cannot be pulled; {hint}")
    if reason in _CONFIG_REASONS:
        return Problem("CannotStart", f"{name} cannot be started: {message or reason}")
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        if last.get("reason") == "OOMKilled":
            return Problem("OutOfMemory", f"{name} was killed: out of memory{limit}")
        code = last.get("exitCode", "unknown")
        return Problem("CrashLoop", _said(f"{name} keeps crashing, last with exit status {code}", last))
    return None
