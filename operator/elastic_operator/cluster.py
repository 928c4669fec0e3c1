"""Carries out plans and writes the status. `store` knows the objects."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from elastic_operator import builders, names, wiring
from elastic_operator.api import NAMESPACE_TERMINATING, Api, ApiError
from elastic_operator.authority import Authority
from elastic_operator.certificates import REFUSED, secrets
from elastic_operator.documents import over
from elastic_operator.manifests import owner
from elastic_operator.plan import (
    ROLE_TOO_OLD,
    Action,
    Certify,
    Create,
    DeleteJob,
    DeletePod,
    Kind,
    Note,
    Outcome,
    Remember,
    ShareClaim,
    TellPod,
    stamp,
)
from elastic_operator.pods import Problem
from elastic_operator.status import dump_status
from elastic_operator.store import Resource, Store, is_owned, path_of
from elastic_ps.api.job import KIND
from elastic_ps.api.status import TrainingJobStatus
from elastic_ps.errors import ConnectionLost, UsageError

logger = logging.getLogger(__name__)

_RESOURCES: dict[Kind, Resource] = {
    "Pod": "pods",
    "Service": "services",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "NetworkPolicy": "networkpolicies",
}

_UNWELL = {409, 429, 503, 504}
"""HTTP statuses that do not refuse the action: an object has changed, or the API server is unwell."""

_OF_THE_SPEC: frozenset[Kind] = frozenset({"Pod", "PersistentVolumeClaim"})
"""The objects that depend on the user's spec. If another one is refused, the spec is not to blame."""

_OF_A_POLICY = ('admission webhook "', "ValidatingAdmissionPolicy")
"""Marks of the messages of webhooks and policies, which may refuse a valid object with any status."""

_NO_VERDICT = ("exceeded quota", "does not support dry run")
"""Marks of refusals of a dry run that do not mean a denial: a quota may have room again."""

_STRICT = {"fieldValidation": "Strict"}
"""A misspelt field of a template is then refused instead of silently dropped."""

_PROTECTED = "cannot set an ownerRef"
_OF_A_ROLE = (' cannot patch resource "', _PROTECTED)
"""Marks of the messages by which RBAC refuses; the second one of clusters that protect owners, too."""

_SAME_ROLE = timedelta(minutes=10)
"""The time for which a Role is assumed to be unchanged."""

_BROKEN_LIMIT = 3
"""A pass ends after so many server errors: a webhook may let every action wait for its time-out.

After so many pods of a role were forbidden, as by a quota, no more of them are created in a pass.
"""


class Cluster:
    """The operator's writes to the cluster, which also go to the store. Blocking; thread-safe."""

    def __init__(
        self,
        api: Api,
        store: Store,
        authority: Authority | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._store = api, store
        self._authority = authority
        self._clock = clock
        self._missing: dict[tuple[str, Resource], tuple[float, Problem]] = {}  # the Role's in a namespace

    def execute(self, job: Mapping[str, Any], actions: Sequence[Action]) -> Outcome:
        """Carry out a plan. The outcome has the API server's refusals.

        After a refusal, only the actions that need the refused object are left out.

        Raises:
            ApiError, ConnectionLost: the API server is unwell, the job has changed or may not be deleted, or
                its NetworkPolicy could not be created. The whole pass has to be repeated.
        """
        refused: list[Problem] = []
        certified: datetime | None = None
        done: list[Action] = []
        missing: set[Kind] = set()
        broken, forbidden = 0, Counter[tuple[Kind, str]]()
        known = {problem for _, problem in self._missing.copy().values()}
        for action in actions:
            if isinstance(action, Create | Certify) and action.needs in missing:
                continue
            if isinstance(action, Create) and action.kind == "Pod" and "NetworkPolicy" in missing:
                continue  # it would run without protection
            if isinstance(action, Create) and forbidden[action.kind, _role(action)] == _BROKEN_LIMIT:
                continue
            try:
                result = self._carry_out(job, action)
            except ApiError as error:
                protects = (
                    isinstance(action, Create) and action.kind == "NetworkPolicy" and error.status >= 500
                )
                if protects or isinstance(action, DeleteJob) or error.status in _UNWELL:
                    raise
                result = _refusal(action, error)
                broken += error.status >= 500
            if isinstance(result, Problem):
                refused.append(result)
                if isinstance(action, Create):
                    missing.add(action.kind)
                    forbidden[action.kind, _role(action)] += result.reason in ("QuotaExceeded", "Forbidden")
            else:
                done.append(action)
                certified = result or certified
            if broken == _BROKEN_LIMIT:
                break
        metadata = job["metadata"]
        identity = f"{metadata['namespace']}/{metadata['name']}"
        for note in _summaries(done):
            self.post(job, note)
        for action in done:
            logger.info("%s: %s: %s", identity, _words(action, metadata["name"]), action.reason)
        for problem in refused:
            level = logging.DEBUG if problem in known else logging.WARNING
            logger.log(level, "%s: refused: %s", identity, problem.message)
        return Outcome(refusals=tuple(refused), certified=certified)

    def check(self, job: Mapping[str, Any], pods: Iterable[Create]) -> str:
        """Why the API server refuses or denies one of the pods; "" if it does not. Nothing is created.

        Raises:
            ApiError, ConnectionLost: the API server is unwell.
        """
        path = path_of("pods", job["metadata"]["namespace"])
        query = {**_STRICT, "dryRun": "All"}
        for action in pods:
            try:
                self._api.request("create", "pods", path, body=action.manifest, query=query)
            except ApiError as error:
                if _blames_the_spec(action, error):
                    return _invalid(action, error)
                if _is_denied(error):
                    return (
                        f"the cluster denies the pod {action.name} with the new image or template of "
                        f"spec.{_field(action)} (change it, or have the policy changed): {error.message}"
                    )
                # A valid pod may exist already, or be refused for another reason.
                if error.status in _UNWELL and error.reason != "AlreadyExists":
                    raise
        return ""

    def _carry_out(self, job: Mapping[str, Any], action: Action) -> Problem | datetime | None:
        """The refusal, if there is one; the end of new certificates after a `Certify`."""
        if isinstance(action, Create):
            return self._create(job, action)
        if isinstance(action, Certify):
            return self._certify(job, action)
        if isinstance(action, TellPod):
            named = {"uid": action.uid}  # another pod of that name refuses it (422)
            return self._change(job, "pods", action.name, {**named, "annotations": action.annotations})
        if isinstance(action, Remember):
            valid = {"annotations": {names.VALID_ANNOTATION: action.spec}}
            return self._change(job, "services", action.name, valid)
        if isinstance(action, ShareClaim):
            another = {**owner(job), "controller": False}  # there is at most one
            return self._change(job, "persistentvolumeclaims", action.name, {"ownerReferences": [another]})
        self._delete(job, action)
        return None

    def _change(
        self, job: Mapping[str, Any], resource: Resource, name: str, metadata: Mapping[str, Any]
    ) -> Problem | None:
        """Change the metadata of an object. One that is gone gets them when it is recreated.

        If the operator's Role does not permit the request, it is not repeated for a while.
        """
        namespace = job["metadata"]["namespace"]
        since, missing = self._missing.get((namespace, resource), (0.0, None))
        if missing is not None and self._clock() - since < _SAME_ROLE.total_seconds():
            return missing
        path = f"{path_of(resource, namespace)}/{name}"
        try:
            written = self._api.request("patch", resource, path, body={"metadata": metadata})
        except ApiError as error:
            if error.status == 403 and any(words in error.message for words in _OF_A_ROLE):
                text = (
                    f"the operator's Role does not permit it to patch {resource} in the namespace "
                    f"{namespace}. Upgrade the chart together with the image"
                )
                if _PROTECTED in error.message:
                    text = f"only who may delete {resource} may change their owners: grant the operator that"
                if resource == "persistentvolumeclaims":
                    text += ". Until then, the claim is deleted with the earlier job that created it"
                missing = Problem(ROLE_TOO_OLD, f"{text} ({error.message})")
                self._missing[namespace, resource] = self._clock(), missing
                return missing
            # A claim that is not shared is lost with the earlier job, so whoever refuses that is named.
            if error.status not in ((404,) if resource == "persistentvolumeclaims" else (404, 409, 422)):
                raise
            return None
        self._store.put(resource, written, ours=True)
        self._missing.pop((namespace, resource), None)
        return None

    def _create(self, job: Mapping[str, Any], action: Create) -> Problem | None:
        resource = _RESOURCES[action.kind]
        path = path_of(resource, job["metadata"]["namespace"])
        try:
            made = self._api.request("create", resource, path, body=action.manifest, query=_STRICT)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return self._check_owner(job, resource, action.name)
            if error.reason == NAMESPACE_TERMINATING:
                return Problem(error.reason, f"{action.name}: {error.message}")
            if error.status == 403 and "exceeded quota" in error.message:
                return Problem("QuotaExceeded", f"{action.name}: {error.message}")
            if _blames_the_spec(action, error):
                return Problem("InvalidSpec", _invalid(action, error))
            raise
        self._store.put(resource, made, ours=True)
        return None

    def _certify(self, job: Mapping[str, Any], action: Certify) -> Problem | datetime:
        """Issue certificates, and write them over the job's Secrets without reading those."""
        metadata = job["metadata"]
        wanted = {
            (role, index): wiring.certified(metadata["name"], metadata["namespace"], role, index)
            for role, count in action.processes.items()
            for index in range(count)
        }
        now = datetime.now(UTC)
        try:
            if self._authority is None:
                raise UsageError(
                    "the job uses TLS, but this operator was started without --tls-secret (tls.enabled of "
                    "the chart); keep it until the job has ended"
                )
            issued = self._authority.issue(metadata["uid"], wanted, now=now, lifetime=action.lifetime)
            for manifest in secrets(job, action, issued):
                self._write_secret(manifest, there=not action.first)
        except UsageError as error:
            return Problem(REFUSED, str(error))
        except ApiError as error:
            if error.status in _UNWELL:
                raise
            return Problem(REFUSED, error.message)
        return min(one.until for one in issued.values())

    def _write_secret(self, manifest: Mapping[str, Any], *, there: bool) -> None:
        """Write over the Secret, or create it. One of another type is refused (422): types never change."""
        metadata = manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/secrets"
        for update in (there, not there):
            try:
                verb, place = ("update", f"{path}/{metadata['name']}") if update else ("create", path)
                self._api.request(verb, "secrets", place, body=manifest)
                return
            except ApiError as error:
                missing = error.status == 404 if update else error.reason == "AlreadyExists"
                if not missing or update is not there:
                    raise

    def _check_owner(self, job: Mapping[str, Any], resource: Resource, name: str) -> Problem | None:
        path = f"{path_of(resource, job['metadata']['namespace'])}/{name}"
        try:
            there = self._api.request("get", resource, path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        if is_owned(there, job["metadata"]["uid"]):
            self._store.put(resource, there)
            return None
        if there["metadata"].get("deletionTimestamp"):
            return Problem(
                "NameTaken", f"{resource}/{name} belongs to an earlier job, and is still being deleted"
            )
        text = f"{resource}/{name} exists already and does not belong to this job"
        owners = there["metadata"].get("ownerReferences") or []
        if users := sorted(str(each["name"]) for each in owners if each.get("kind") == KIND):
            text += f", but to {', '.join(users)}. Choose another name for this job, or delete those first"
        elif resource == "persistentvolumeclaims":
            text += ". To continue from it, create the job again with parameterServer.checkpoint.resumeFrom: "
            text += f"{{claim: {name}}} in place of volumeClaim. To train from the start, delete the claim"
        return Problem("NameTaken", text)

    def _delete(self, job: Mapping[str, Any], action: DeletePod | DeleteJob) -> None:
        metadata = job["metadata"]
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": action.uid},
        }
        if isinstance(action, DeletePod):
            if action.version and not action.force:
                # A pod that has changed since the decision is not deleted.
                body["preconditions"]["resourceVersion"] = action.version
            resource, path = "pods", f"/api/v1/namespaces/{metadata['namespace']}/pods/{action.name}"
            if action.force:
                body["gracePeriodSeconds"] = 0
        else:
            resource, path = names.PLURAL, _job_path(metadata["namespace"], metadata["name"])
            body["preconditions"]["resourceVersion"] = metadata["resourceVersion"]
        try:
            self._api.request("delete", resource, path, body=body)
        except ApiError as error:
            changed = error.status == 409 and "resourceVersion" in body["preconditions"]
            if changed or error.status not in (404, 409):  # it is gone, or another pod has its name
                raise

    def post(self, job: Mapping[str, Any], note: Note) -> None:
        """Record an Event. A failure to do so is only logged."""
        metadata = job["metadata"]
        digest = hashlib.sha256(f"{metadata['uid']}/{note.key}".encode()).hexdigest()[:16]
        event = builders.event(
            job,
            name=f"{metadata['name']}.{digest}",
            kind=note.kind,
            reason=note.reason,
            message=note.message,
            now=stamp(datetime.now(UTC)),
        )
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        try:
            self._api.request("create", "events", path, body=event)
        except (ApiError, ConnectionLost) as error:
            if not (isinstance(error, ApiError) and error.reason == "AlreadyExists"):
                logger.warning(
                    "%s/%s: an Event could not be written: %s", metadata["namespace"], metadata["name"], error
                )

    def write_status(self, job: Mapping[str, Any], status: TrainingJobStatus) -> bool:
        """Write the status; returns whether it differed. Raises ApiError 409 if the job has changed."""
        old = job.get("status") or {}
        changes = difference(old, over(old, dump_status(status)))
        if not changes:
            return False
        metadata = job["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": changes}
        path = f"{_job_path(metadata['namespace'], metadata['name'])}/status"
        written = self._api.request("patch", f"{names.PLURAL}/status", path, body=body)
        self._store.put("trainingjobs", written, ours=True)
        return True


def _words(action: Action, job: str) -> str:
    if isinstance(action, Create):
        return f"created {action.kind} {action.name}"
    if isinstance(action, Certify):
        return f"issued certificates for {sum(action.processes.values())} processes"
    if isinstance(action, TellPod):
        return f"told Pod {action.name} of a change"
    if isinstance(action, Remember):
        return f"recorded the spec on Service {action.name}"
    if isinstance(action, ShareClaim):
        return f"became an owner of PersistentVolumeClaim {action.name}"
    return f"deleted Pod {action.name}" if isinstance(action, DeletePod) else f"deleted Job {job}"


def _refusal(
    action: Create | Certify | DeletePod | TellPod | Remember | ShareClaim, error: ApiError
) -> Problem:
    """The problem that the API server, a policy or a webhook refuses an action."""
    name = "the certificates" if isinstance(action, Certify) else action.name
    reason = "Forbidden" if error.status == 403 else "Refused"
    return Problem(reason, f"{name}: {error.message or error.reason}")


def _blames_the_spec(action: Create, error: ApiError) -> bool:
    """Whether the object is invalid, so that the user has to edit the job."""
    policy = any(words in error.message for words in _OF_A_POLICY)
    return error.status in (400, 422) and action.kind in _OF_THE_SPEC and not policy


def _is_denied(error: ApiError) -> bool:
    """Return True if a policy, a webhook or a limit of the namespace does not admit a pod."""
    passing = error.reason == NAMESPACE_TERMINATING or any(words in error.message for words in _NO_VERDICT)
    return not passing and (error.status == 403 or any(words in error.message for words in _OF_A_POLICY))


def _role(action: Create) -> str:
    """The role of a pod that is to be created; "" for other objects."""
    return str((action.manifest["metadata"].get("labels") or {}).get(names.ROLE_LABEL, ""))


def _invalid(action: Create, error: ApiError) -> str:
    """The message that an object is invalid, with the part of the job's spec that it was built from."""
    source = f"spec.{_field(action)}.template does not make a valid pod " if action.kind == "Pod" else ""
    return f"{source}{action.name}: {error.message}"


def _field(action: Create) -> str:
    """The field of the job's spec that has the template of a pod."""
    role = _role(action)
    return role if role in ("worker", "evaluator") else "parameterServer"


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that turns `old` into `new`; empty if they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := difference(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


def _summaries(done: Sequence[Action]) -> Iterator[Note]:
    """An Event for all created objects, and one for all deleted ones, each with the reasons."""
    now = stamp(datetime.now(UTC))
    for kind, word in ((Create, "Created"), (DeletePod, "Deleted")):
        parts = []
        of_kind = [a for a in done if isinstance(a, kind) and not (isinstance(a, DeletePod) and a.told)]
        for reason, group in groupby(of_kind, key=lambda action: action.reason):
            items = [
                f"{a.kind.lower()} {a.name}" if isinstance(a, Create) else f"pod {a.name}" for a in group
            ]
            more = f" and {len(items) - 20} more" if len(items) > 20 else ""
            parts.append(f"{', '.join(items[:20])}{more}: {reason}")
        if parts:
            what = "; ".join(parts)
            yield Note(f"{now}/{word}/{what}", "Normal", word, f"{word} {what}")


def _job_path(namespace: str, name: str) -> str:
    return f"{path_of('trainingjobs', namespace)}/{name}"
