"""Reads what a job asks for, as far as the operator can follow it now. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elastic_operator import builders, documents, names
from elastic_operator.permissions import Policy, refusal, violations
from elastic_operator.plan import Create, Observed
from elastic_operator.pods import Pod, parse_time
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.api.status import TrainingJobStatus
from elastic_ps.contract.env import Role
from elastic_ps.errors import InvalidJob


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The job to work towards.

    Attributes:
        spec: the spec.
        replicas: the number of workers.
        ignored: why `spec` differs from the resource; empty if it does not.
        invalid: why `spec` is an earlier one; "" if the resource's own is valid.
        withheld: the roles that get no new pods, since their template is no longer permitted.
        restart: pods older than this are to be replaced; None if nobody has asked for a restart, or pods are
            withheld.
        generation: the number of the settings that shard 0 is told.
        secured: whether the job's processes use TLS.
    """

    name: str
    spec: TrainingJobSpec
    replicas: int
    ignored: tuple[str, ...] = ()
    invalid: str = ""
    withheld: frozenset[Role] = frozenset()
    restart: datetime | None = None
    generation: int = 0
    secured: bool = False

    @property
    def advice(self) -> str:
        """How to restart the job after it has failed, and from where it then trains."""
        begins = "continues from its last checkpoint, if it has written one"
        if builders.claim_name(self.name, self.spec) is None:
            begins = (
                "starts from scratch, since its checkpoints were on the disk of the pod; "
                "parameterServer.checkpoint.volumeClaim keeps those of the next job"
            )
        return f"restart the job: `{names.restart_command(self.name)}`. It then {begins}"

    def with_completed(self, observed: Observed, status: TrainingJobStatus) -> Observed:
        """Add a pod for each worker that was done before its own pod was removed, as by a drain."""
        there = {pod.index for pod in observed.of("worker")}
        gone = (index for index in status.worker.completed_indexes if index not in there)
        since = parse_time(status.start_time)
        ended = [
            Pod(
                name=names.pod(self.name, "worker", index),
                uid="",
                role="worker",
                index=index,
                ending="done",
                ended=since,
            )
            for index in gone
        ]
        return replace(observed, pods=(*observed.pods, *ended))

    def changed(self, pod: Pod) -> bool:
        """Return True if a pod was made from another image or template."""
        return pod.template not in ("", builders.template_hash(self.spec, pod.role))

    def outdated(self, pod: Pod) -> bool:
        """Whether a pod was made from another image or template, or before a restart was asked for."""
        return self.changed(pod) or pod.older_than(self.restart)

    def renewable(self, pod: Pod) -> bool:
        """Return True if a pod is outdated and may be replaced."""
        return pod.role not in self.withheld and self.outdated(pod)

    def workers(self, observed: Observed) -> list[int]:
        """The indexes of the wanted workers: those of existing ones, then the lowest free ones.

        If there are too many workers, those with the least to lose go first, as in a ReplicaSet, and among
        equals those with the highest indexes. The remaining indexes may have gaps. If each worker has a fixed
        share of the records, the wanted indexes are always the lowest.
        """
        if self.spec.consistency.fixed_workers:
            return list(range(self.replicas))
        there = sorted((_loss(pod), pod.index) for pod in observed.of("worker") if pod.deleting is None)
        kept = {index for _, index in there[: self.replicas]}
        held = {pod.index for pod in observed.of("worker") if pod.held_by}
        free = (index for index in itertools.count() if index not in kept | held)
        return sorted([*kept, *itertools.islice(free, self.replicas - len(kept))])


def _loss(worker: Pod) -> int:
    """A worker's rank when workers are removed: 0 (last) if it trains, 4 (first) if it has no node."""
    if worker.active and worker.started is not None:
        return 0 if worker.ready else 1
    if worker.ending == "done":
        return 2
    return 3 if worker.active and worker.node else 4


def read_desired(
    job: Mapping[str, Any],
    observed: Observed,
    policy: Policy,
    *,
    secured: bool = False,
    withhold: bool = False,
) -> Desired:
    """Read a job. `policy`: what templates may hold. `secured`: whether jobs that start now use TLS.

    `withhold`: a template that is not permitted does not make the spec invalid; see `Desired.withheld`.

    Raises:
        InvalidJob: the spec cannot be followed; each line of the message names a field.
    """
    name = job["metadata"]["name"]
    document = dict(job.get("spec") or {})
    if documents.too_deep(document):
        raise InvalidJob(f"spec is nested deeper than {documents.MOST_LEVELS} levels")
    unknown: list[str] = []
    if started(job, observed):
        # A running job goes on after a downgrade of the operator that started it.
        document, unknown = documents.known_spec(document)
    ignored = [
        f"this version of the operator does not know {field}, so the field has no effect" for field in unknown
    ]
    spec = parse_spec(document, source="spec")
    withheld = _check_pods(job, spec, policy, withhold=withhold)
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
        withheld=withheld,
        restart=None if withheld else restart,
        generation=builders.generation(job),
        secured=secured,
    )


def read_last_valid(
    job: Mapping[str, Any], observed: Observed, policy: Policy, why: str, *, secured: bool = False
) -> Desired | None:
    """The last valid spec of a job that has started, while its spec is invalid; None if that is unknown.

    The resource still decides whether the job is suspended. Pods whose template is no longer permitted are
    withheld.

    `why`: what is wrong with the spec. See `read_desired` for the rest.
    """
    if not (observed.valid_spec and started(job, observed)):
        return None
    try:
        spec = dict(json.loads(observed.valid_spec))
        spec["runPolicy"] = {**(spec.get("runPolicy") or {}), **_suspend(job)}
        known = read_desired({**job, "spec": spec}, observed, policy, secured=secured, withhold=True)
    except (ValueError, TypeError, RecursionError, InvalidJob):
        return None
    kept = "the job keeps its last valid spec"
    if known.withheld:
        kept += ", without new pods from templates that are not permitted any more,"
    return replace(known, invalid=f"{kept} until you correct this: {why}")


def foreign_claim(job: Mapping[str, Any]) -> str | None:
    """The volume claim that a job mounts and has not created; None for none, or if the spec is invalid."""
    checkpoint = ((job.get("spec") or {}).get("parameterServer") or {}).get("checkpoint") or {}
    if not (checkpoint.get("existingClaim") or checkpoint.get("resumeFrom")):
        return None  # as of most jobs, whose spec need not be read for this
    try:
        spec = parse_spec(dict(job.get("spec") or {}), source="spec")
    except (InvalidJob, RecursionError):
        return None
    return builders.claim_name(job["metadata"]["name"], spec)


def spec_text(job: Mapping[str, Any]) -> str:
    """The spec as JSON, as it is recorded when it is valid."""
    return json.dumps(job.get("spec"), sort_keys=True)


def untried(
    job: Mapping[str, Any], observed: Observed, policy: Policy, *, secured: bool = False
) -> Iterator[Create]:
    """A pod of each role whose image or template has changed since the last valid spec.

    The API server has to check them before any pod is deleted to make room for such ones. See `read_desired`
    for the arguments.
    """
    if not observed.valid_spec:
        return
    try:
        if observed.valid_spec == spec_text(job):
            return
        new = read_desired(job, observed, policy, secured=secured)
    except (InvalidJob, RecursionError):
        return
    last = read_last_valid(job, observed, policy, "", secured=secured)
    if last is None:
        return
    roles: tuple[Role, ...] = ("ps", "worker", "evaluator") if new.spec.evaluator else ("ps", "worker")
    for role in roles:
        if builders.template_hash(last.spec, role) != builders.template_hash(new.spec, role):
            manifest = builders.pod(job, new.spec, role, 0, secured=new.secured)
            yield Create("Pod", names.pod(new.name, role, 0), manifest, "it is only checked")


def _suspend(job: Mapping[str, Any]) -> dict[str, bool]:
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    asked = policy.get("suspend", False) if isinstance(policy, Mapping) else None
    return {"suspend": asked} if isinstance(asked, bool) else {}


def _is_secured(job: Mapping[str, Any], observed: Observed, default: bool) -> bool:
    """Whether the job uses TLS: its Service says so, or its certificates if the Service is gone."""
    if observed.service:
        return observed.secured
    return bool(_status(job).get("certificates")) or (default and not started(job, observed))


def started(job: Mapping[str, Any], observed: Observed) -> bool:
    """Whether objects of the job have been created. The status tells if its Service is gone."""
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
    """The time at which somebody has asked for a restart of the job; None if nobody has.

    Raises:
        ValueError: the annotation is not a time with a zone.
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
    """The settings to tell shard 0, as JSON; "" if it knows them."""
    wanted = MutableFields.of(desired.spec, generation=desired.generation)
    try:
        told = read_mutable(server.tuning, source="annotation")
    except InvalidJob:
        return wanted.to_json()
    return wanted.to_json() if wanted.differs(told) else ""


def _check_pods(
    job: Mapping[str, Any], spec: TrainingJobSpec, policy: Policy, *, withhold: bool
) -> frozenset[Role]:
    """Raise InvalidJob if a template has another shape or no image, or holds what is not permitted.

    With `withhold`, return the roles whose template holds what is not permitted.
    """
    namespace = job["metadata"]["namespace"]
    permitted = policy.of(namespace)
    withheld: set[Role] = set()
    roles: dict[Role, str] = {"ps": "parameterServer", "worker": "worker"}
    if spec.evaluator is not None:
        roles["evaluator"] = "evaluator"
    for role, field in roles.items():
        template = builders.template(spec, role)
        if unknown := sorted(template.keys() - {"metadata", "spec"}):
            raise InvalidJob(f"unknown field spec.{field}.template.{unknown[0]}; known here: metadata, spec")
        try:
            pod = builders.pod(job, spec, role, 0)
            without = [each["name"] for each in pod["spec"]["containers"] if not each.get("image")]
            forbidden = list(violations(pod, permitted))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise InvalidJob(f"spec.{field}.template is not a PodTemplateSpec: {error!r}") from error
        own = names.CONTAINER[role]
        if own in without:
            raise InvalidJob(
                f"spec.image is missing, and spec.{field}.template names no image for its container"
            )
        if without:
            raise InvalidJob(
                f"spec.{field}.template has a container {without[0]!r} without an image; the job's own "
                f"container is called {own!r}. Correct the name, or set an image"
            )
        if forbidden and not withhold:
            raise InvalidJob(refusal(forbidden, f"spec.{field}.template", namespace))
        if forbidden:
            withheld |= {*builders.SERVERS} if role == "ps" else {role}
    return frozenset(withheld)


def _check_claim(name: str, spec: TrainingJobSpec) -> None:
    """Raise InvalidJob if several servers would not share their checkpoints."""
    if builders.share(spec) and builders.claim_name(name, spec) is None:
        shards = f"spec.parameterServer.replicas {spec.parameter_server.replicas}"
        what = "spec.parameterServer.durability standby" if builders.has_standbys(spec) else shards
        raise InvalidJob(
            f"{what} needs spec.parameterServer.checkpoint.volumeClaim, existingClaim or resumeFrom: "
            "all shards and their standbys share the checkpoints"
        )
