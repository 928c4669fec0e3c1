"""What a person asks for, as far as it can be followed now. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elastic_operator import builders, documents, names
from elastic_operator.permissions import Policy, refusal, violations
from elastic_operator.plan import Observed
from elastic_operator.pods import Pod
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.contract.env import Role
from elastic_ps.errors import InvalidJob


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The job to work towards.

    Attributes:
        spec: the spec.
        replicas: wanted workers.
        ignored: why `spec` is not quite what the resource says; empty if it is.
        invalid: why `spec` is the last one that could be followed; "" if that of the resource can be.
        restart: what was made before then is to be made again; None if nobody has asked for that.
        generation: the number of what shard 0 is told.
        secured: whether its processes talk to each other over TLS.
    """

    name: str
    spec: TrainingJobSpec
    replicas: int
    ignored: tuple[str, ...] = ()
    invalid: str = ""
    restart: datetime | None = None
    generation: int = 0
    secured: bool = False

    def outdated(self, pod: Pod) -> bool:
        """Whether a pod was made from another image or template, or before a restart was asked for."""
        changed = pod.template not in ("", builders.template_hash(self.spec, pod.role))
        return changed or pod.older_than(self.restart)

    def workers(self, observed: Observed) -> list[int]:
        """The indexes of the wanted workers: of those that are there, and the lowest free ones.

        Where each has a fixed share of the records, there are no others than the first ones.
        There may be too many. Then those go first that lose the least, as a ReplicaSet's pods do, and of
        equal ones those with the highest indexes. So the indexes of the others may have holes.
        """
        if self.spec.consistency.fixed_workers:
            return list(range(self.replicas))
        there = sorted((_loss(pod), pod.index) for pod in observed.of("worker") if pod.deleting is None)
        kept = {index for _, index in there[: self.replicas]}
        held = {pod.index for pod in observed.of("worker") if pod.held_by}
        free = (index for index in itertools.count() if index not in kept | held)
        return sorted([*kept, *itertools.islice(free, self.replicas - len(kept))])


def _loss(worker: Pod) -> int:
    """How little is lost with a worker: 0 for one that trains, 4 for one that has no node."""
    if worker.active and worker.started is not None:
        return 0 if worker.ready else 1
    if worker.ending == "done":
        return 2
    return 3 if worker.active and worker.node else 4


def read_desired(
    job: Mapping[str, Any], observed: Observed, policy: Policy, *, secured: bool = False
) -> Desired:
    """What to work towards. `policy`: what templates may hold. `secured`: jobs that start now use TLS.

    Raises:
        InvalidJob: the spec cannot be followed; each line of the message names a field.
    """
    name = job["metadata"]["name"]
    document = dict(job.get("spec") or {})
    unknown: list[str] = []
    if started(job, observed):
        # A job that runs goes on, also where a newer operator has started it and an older one is back.
        document, unknown = documents.known_spec(document)
    ignored = [
        f"this version of the operator does not know {field}, so it has no effect" for field in unknown
    ]
    spec = parse_spec(document, source="spec")
    _check_pods(job, spec, policy)
    _check_claim(name, spec)
    secured = _is_secured(job, observed, secured)
    if why := spec.refuse_unencrypted(secured=secured):
        raise InvalidJob(f"spec.strategy: {why}")
    restart = _restart(job, ignored)
    return Desired(
        name=name,
        spec=spec,
        replicas=spec.worker.replicas,
        ignored=tuple(ignored),
        restart=restart,
        generation=builders.generation(job),
        secured=secured,
    )


def read_last_valid(
    job: Mapping[str, Any], observed: Observed, policy: Policy, why: str, *, secured: bool = False
) -> Desired | None:
    """What a job that has started goes on with, since its spec cannot be followed. None: that is not known.

    The resource still says whether the job is suspended.

    `why`: what is wrong with the spec. See `read_desired` for the rest.
    """
    if not (observed.valid_spec and started(job, observed)):
        return None
    try:
        spec = dict(json.loads(observed.valid_spec))
        spec["runPolicy"] = {**(spec.get("runPolicy") or {}), **_suspend(job)}
        known = read_desired({**job, "spec": spec}, observed, policy, secured=secured)
    except (ValueError, TypeError, InvalidJob):
        return None
    return replace(known, invalid=kept_valid(why))


def _suspend(job: Mapping[str, Any]) -> dict[str, bool]:
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    asked = policy.get("suspend", False) if isinstance(policy, Mapping) else None
    return {"suspend": asked} if isinstance(asked, bool) else {}


def kept_valid(why: str) -> str:
    """That a job goes on though its spec is invalid, in words."""
    return f"the job keeps its last valid spec until you correct this: {why}"


def _is_secured(job: Mapping[str, Any], observed: Observed, default: bool) -> bool:
    """Whether the job's processes talk TLS. Its Service says so, and if that is lost, its certificates do."""
    if observed.service:
        return observed.secured
    return bool(_status(job).get("certificates")) or (default and not started(job, observed))


def started(job: Mapping[str, Any], observed: Observed) -> bool:
    """Whether something has been created for the job, or was; the status knows if its Service is gone."""
    return observed.service or "startTime" in _status(job)


def _status(job: Mapping[str, Any]) -> Mapping[str, Any]:
    found = job.get("status")
    return found if isinstance(found, Mapping) else {}


def _restart(job: Mapping[str, Any], ignored: list[str]) -> datetime | None:
    try:
        return restart_of(job)
    except ValueError as error:
        ignored.append(str(error))
        return None


def restart_of(job: Mapping[str, Any]) -> datetime | None:
    """When a person has asked for a restart of the job; None if nobody has.

    Raises:
        ValueError: it is not a time.
    """
    asked = (job["metadata"].get("annotations") or {}).get(names.RESTART_ANNOTATION)
    if asked is None:
        return None
    try:
        moment = datetime.fromisoformat(asked)
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(
            f"the annotation {names.RESTART_ANNOTATION} is {asked!r}; expected a time with its zone, as in "
            "2026-01-31T12:00:00Z"
        )
    return moment


def tuning_to_tell(desired: Desired, server: Pod) -> str:
    """What shard 0 is to be told that the job wants, as JSON; "" if it was told."""
    wanted = MutableFields.of(desired.spec, generation=desired.generation)
    try:
        told = read_mutable(server.tuning, source="annotation")
    except InvalidJob:
        return wanted.to_json()
    return wanted.to_json() if wanted.differs(told) else ""


def _check_pods(job: Mapping[str, Any], spec: TrainingJobSpec, policy: Policy) -> None:
    """Raise InvalidJob where no pod may be built: another shape, no image, or beyond what is permitted."""
    namespace = job["metadata"]["namespace"]
    permitted = policy.of(namespace)
    roles: dict[Role, str] = {"ps": "parameterServer", "worker": "worker"}
    if spec.evaluator is not None:
        roles["evaluator"] = "evaluator"
    for role, field in roles.items():
        template = builders.template(spec, role)
        if unknown := sorted(template.keys() - {"metadata", "spec"}):
            raise InvalidJob(f"unknown field spec.{field}.template.{unknown[0]}; known here: metadata, spec")
        try:
            pod = builders.pod(job, spec, role, 0)
            images = [container.get("image") for container in pod["spec"]["containers"]]
            forbidden = list(violations(pod, permitted))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise InvalidJob(f"spec.{field}.template is not a PodTemplateSpec: {error!r}") from error
        if not all(images):
            raise InvalidJob(f"spec.image is missing, and spec.{field}.template names none for its container")
        if forbidden:
            raise InvalidJob(refusal(forbidden, f"spec.{field}.template", namespace))


def _check_claim(name: str, spec: TrainingJobSpec) -> None:
    """Raise InvalidJob where several servers would not see the same checkpoints."""
    if builders.share(spec) and builders.claim_name(name, spec) is None:
        shards = f"spec.parameterServer.replicas {spec.parameter_server.replicas}"
        what = "spec.parameterServer.durability standby" if builders.has_standbys(spec) else shards
        raise InvalidJob(
            f"{what} needs spec.parameterServer.checkpoint.volumeClaim, existingClaim or resumeFrom: "
            "all shards and their standbys share the checkpoints"
        )
