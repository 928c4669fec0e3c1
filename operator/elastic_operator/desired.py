"""What a person asks for, as far as it can be followed now. Pure."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elastic_operator import builders, documents, names
from elastic_operator.permissions import Policy, refusal, violations
from elastic_operator.plan import Observed
from elastic_operator.pods import Pod
from elastic_ps.api.job import TrainingJobSpec, parse_spec
from elastic_ps.api.tuning import Tuning, read_tuning
from elastic_ps.contract.env import Role
from elastic_ps.errors import InvalidJob


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The job to work towards.

    Attributes:
        spec: the spec; what describes the training itself is as it was when the job started.
        replicas: wanted workers, within the bounds.
        ignored: why `spec` is not quite what the resource says; empty if it is.
        invalid: why `spec` is the last one that could be followed; "" if that of the resource can be.
        restart: what was made before then is to be made again; None if nobody has asked for that.
        generation: the number of what shard 0 is told; 0 if it is not known what the job wants, because the
            spec cannot be followed and the pod is gone that was told before. Then a checkpoint's word counts.
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
    if not re.match(names.PATTERN, name):
        raise InvalidJob(f"metadata.name is {name!r}: {names.EXPECTED}")
    document = dict(job.get("spec") or {})
    unknown: list[str] = []
    if started(job, observed):
        # A job that runs goes on, also where a newer operator has started it and an older one is back.
        document, unknown = documents.known_spec(document)
    ignored = [
        f"this version of the operator does not know {field}, so it has no effect" for field in unknown
    ]
    recorded = revision(job, observed)
    fixed = json.loads(recorded) if recorded else {}
    if "worker" in fixed:
        document = _keep_workers(document, fixed["worker"]["replicas"], ignored)
    elif started(job, observed):
        document = _clamp(document, ignored)
    known = True
    if fixed:
        fixed, known = _keep_tunable(document, fixed, observed, ignored)
        document, _ = documents.known_spec(_keep_fixed(document, fixed, ignored))
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
        generation=builders.generation(job) if known else 0,
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
    if observed.services:
        return observed.secured
    status = job.get("status")
    return bool(isinstance(status, Mapping) and status.get("certificates")) or (
        default and not started(job, observed)
    )


def revision(job: Mapping[str, Any], observed: Observed) -> str:
    """The fixed part of the spec as it was recorded when the job started; "" if it has not started.

    The status has it, and so has the job's Service, which exists from the very first.
    """
    name, status = job["metadata"]["name"], job.get("status")
    kept = status.get("revision") if isinstance(status, Mapping) else None
    texts = (observed.services.get(names.service(name)), kept)
    return next((text for text in texts if isinstance(text, str) and _is_revision(text)), "")


def _is_revision(text: str) -> bool:
    """Whether it names what is trained; somebody may have written into the Service."""
    try:
        fixed = json.loads(text)
    except ValueError:
        return False
    return isinstance(fixed, dict) and {"entrypoint", "parameterServer"} <= fixed.keys()


def started(job: Mapping[str, Any], observed: Observed) -> bool:
    """Whether something has been created for the job, or was."""
    return bool(observed.services) or bool(revision(job, observed))


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


TUNABLE = ("consistency", "compression")
"""Of the fixed part, what may change in some ways while a job runs."""


def _keep_fixed(document: dict[str, Any], fixed: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """What is trained stays as it was when the job started."""
    kept = builders.overlay_fixed(document, fixed)
    try:
        asked = builders.fixed_part(parse_spec(document, source="spec"))
        # Younger fields than the record have their defaults in both; those of a newer version are in neither.
        fixed = builders.fixed_part(parse_spec(documents.known_spec(kept)[0], source="spec"))
    except InvalidJob as error:
        ignored.append(f"the spec cannot be followed: {error}")
        return kept
    others = [field for field in builders.FIXED_FIELDS if field not in TUNABLE]  # see `_keep_tunable`
    changed = [field for field in others if asked[field] != fixed[field]]
    before, after = fixed["parameterServer"], asked["parameterServer"]
    fields = sorted(before.keys() | after.keys())
    changed += [f"parameterServer.{field}" for field in fields if after.get(field) != before.get(field)]
    younger = ("evaluator", *builders.YOUNGER_FIELDS)
    changed += [field for field in younger if asked.get(field) != fixed.get(field)]
    if changed:
        ignored.append(f"{', '.join(changed)} cannot change while the job runs; create a new job for that")
    return kept


def _keep_tunable(
    document: dict[str, Any], fixed: dict[str, Any], observed: Observed, ignored: list[str]
) -> tuple[dict[str, Any], bool]:
    """The fixed part with the consistency and compression asked for, if a running job can change to those.

    If not, it keeps those that its parameter server was told last; it was started with them, if that is not
    known. Returns also whether it is known what the job wants.
    """
    others = {name: fixed[name] for name in builders.YOUNGER_FIELDS if name in fixed}
    kept = {"entrypoint": "module:function", **others, **{name: fixed.get(name) or {} for name in TUNABLE}}
    wanted = {**kept, **{name: document.get(name) or {} for name in TUNABLE}}
    before, asked, told = _tuning_of(kept), _tuning_of(wanted), _told(observed)
    if before is None:
        return fixed, True  # what is wrong with it is said with the rest; likewise below
    refusal = _refusal(before, asked, told) if asked is not None else ""
    if refusal:
        ignored.append(refusal)
    follows = asked is not None and not refusal
    meant = asked if asked is not None and follows else (told or before).over(before)
    tunable = meant.model_dump(mode="json", by_alias=True, include=set(TUNABLE))
    return {**fixed, **tunable}, follows or told is not None


def _tuning_of(document: dict[str, Any]) -> Tuning | None:
    """What a part of a spec says; None if it cannot be followed."""
    try:
        return Tuning.of(parse_spec(documents.known_spec(document)[0], source="spec"))
    except InvalidJob:
        return None


def _told(observed: Observed) -> Tuning | None:
    """What shard 0 was told last; None if that is not known: the pod is gone, or was made without a word."""
    leader = next((pod for pod in observed.of("ps") if pod.index == 0 and pod.tuning), None)
    try:
        told = read_tuning(leader.tuning, source="annotation") if leader is not None else None
    except InvalidJob:
        return None
    return told if told is not None and told.generation else None


def _refusal(before: Tuning, asked: Tuning, told: Tuning | None) -> str:
    """Why a job cannot change to what is asked for; "" if it can."""
    unheard = told is not None and told.compression is None and asked.compression != before.compression
    return before.refusal(asked) or (
        "compression cannot change yet: the job's parameter server was created by an earlier version of "
        f"the operator. Ask for a restart with the annotation {names.RESTART_ANNOTATION} first"
        if unheard
        else ""
    )


def tuning_to_tell(desired: Desired, server: Pod) -> str:
    """What shard 0 is to be told that the job wants, as JSON; "" if it was told, or if that is not known."""
    if not desired.generation:
        return ""
    wanted = Tuning.of(desired.spec, generation=desired.generation)
    try:
        told = read_tuning(server.tuning, source="annotation")
    except InvalidJob:
        return wanted.to_json()
    if told.compression is None:  # it may not know of such changes
        wanted = wanted.model_copy(update={"compression": None})
    return wanted.to_json() if wanted.differs(told) or not told.generation else ""


def _keep_workers(document: dict[str, Any], replicas: int, ignored: list[str]) -> dict[str, Any]:
    """The records of a deterministic job are shared out over the workers that it was started with."""
    worker = document.get("worker") or {}
    asked = worker.get("replicas", 1)
    if asked == replicas:
        return document
    ignored.append(
        f"worker.replicas {asked} has no effect: with consistency.deterministic each worker has a fixed "
        f"share of the records, so the job keeps its {replicas}"
    )
    return {**document, "worker": {**worker, "replicas": replicas}}


def _clamp(document: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A running job that is scaled out of its bounds goes to the bound."""
    worker = document.get("worker") or {}
    low, high = worker.get("minReplicas", 1), worker.get("maxReplicas")
    replicas = worker.get("replicas", 1)
    if not all(isinstance(n, int) for n in (low, replicas)) or not (high is None or isinstance(high, int)):
        return document
    size = (document.get("consistency") or {}).get("globalBatchSize")
    most = min((n for n in (high, size) if isinstance(n, int)), default=None)
    bounded = max(low, replicas if most is None else min(replicas, most))
    if bounded == replicas or (most is not None and low > most):
        return document
    above = f"maxReplicas {high}" if most == high else f"globalBatchSize {size}"
    bound = f"minReplicas {low}" if bounded > replicas else above
    ignored.append(f"worker.replicas {replicas} is outside of {bound}; the job runs with {bounded} workers")
    return {**document, "worker": {**worker, "replicas": bounded}}


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
