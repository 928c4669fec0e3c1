"""Reads what belongs to a job and carries out plans. With `api` the only module that talks to Kubernetes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from elastic_operator import builders, names, pods
from elastic_operator.api import NAMESPACE_TERMINATING, Api, ApiError
from elastic_operator.builders import Manifest
from elastic_operator.documents import over, read_server_status
from elastic_operator.plan import Action, Create, DeleteJob, DeletePod, Note, Observed, stamp
from elastic_operator.pods import Pod, Problem
from elastic_operator.reading import PageReader, Unreadable
from elastic_operator.status import dump_status
from elastic_ps.env import DEFAULT_HTTP_PORT
from elastic_ps.errors import ConnectionLost
from elastic_ps.job import GROUP, VERSION
from elastic_ps.status import ServerStatus, TrainingJobStatus

logger = logging.getLogger(__name__)

_RESOURCES = {
    "Pod": "pods",
    "Service": "services",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "NetworkPolicy": "networkpolicies",
}
_GROUPS = {"networkpolicies": "/apis/networking.k8s.io/v1"}


class Cluster:
    """The cluster as the operator uses it. Blocking; thread-safe."""

    def __init__(self, api: Api, *, status_timeout: float, policies: bool = False) -> None:
        """`policies`: whether jobs have network policies."""
        self._api = api
        self._policies = policies
        self._pages = PageReader(status_timeout)

    def jobs(self, namespaces: Sequence[str]) -> list[dict[str, Any]]:
        """All jobs that are served."""
        paths = [f"{_group()}/namespaces/{ns}/{names.PLURAL}" for ns in namespaces]
        return self._list_all(names.PLURAL, paths or [f"{_group()}/{names.PLURAL}"], {})

    def all_pods(self, namespaces: Sequence[str]) -> list[dict[str, Any]]:
        """All pods of all jobs that are served."""
        paths = [f"/api/v1/namespaces/{ns}/pods" for ns in namespaces]
        return self._list_all("pods", paths or ["/api/v1/pods"], {"labelSelector": names.JOB_LABEL})

    def _list_all(self, resource: str, paths: Iterable[str], query: Mapping[str, str]) -> list[Manifest]:
        return [
            item
            for path in paths
            for item in self._api.request("list", resource, path, query=query).get("items") or []
        ]

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The job, or None if there is no such."""
        try:
            return self._api.request("get", names.PLURAL, _job_path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def observe(self, job: Mapping[str, Any]) -> Observed:
        """Everything that belongs to the job, and what its parameter server says."""
        metadata = job["metadata"]
        selector = {"labelSelector": names.job_selector(metadata["name"])}

        def owned(resource: str) -> list[dict[str, Any]]:
            path = _path(metadata["namespace"], resource)
            return [m for m in self._list_all(resource, [path], selector) if _is_owned(m, metadata["uid"])]

        found = tuple(pod for manifest in owned("pods") if (pod := pods.read(manifest)) is not None)
        services = {
            item["metadata"]["name"]: (item["metadata"].get("annotations") or {}).get(names.SPEC_ANNOTATION)
            for item in owned("services")
        }
        claims = frozenset(item["metadata"]["name"] for item in owned("persistentvolumeclaims"))
        policies = owned("networkpolicies") if self._policies else []
        server = self._server_status(metadata["namespace"], metadata["name"], found)
        return Observed(
            pods=found,
            services=services,
            claims=claims,
            policies=frozenset(item["metadata"]["name"] for item in policies),
            server=server,
        )

    def execute(self, job: Mapping[str, Any], actions: Sequence[Action]) -> list[Problem]:
        """Carry out a plan; what the API server refuses for good comes back in words.

        Raises:
            ApiError, ConnectionLost: the API server is not well; the whole pass is to be made again.
        """
        refused = []
        done: list[Action] = []
        for action in actions:
            problem = self._create(job, action) if isinstance(action, Create) else self._delete(job, action)
            if problem is None:
                done.append(action)
            else:
                refused.append(problem)
        metadata = job["metadata"]
        identity = f"{metadata['namespace']}/{metadata['name']}"
        for note in _summaries(done):
            self.post(job, note)
        for action in done:
            what = "created" if isinstance(action, Create) else "deleted"
            kind = action.kind if isinstance(action, Create) else type(action).__name__[len("Delete") :]
            name = getattr(action, "name", metadata["name"])
            logger.info("%s: %s %s %s: %s", identity, what, kind, name, action.reason)
        for problem in refused:
            logger.warning("%s: refused: %s", identity, problem.message)
        return refused

    def _create(self, job: Mapping[str, Any], action: Create) -> Problem | None:
        resource = _RESOURCES[action.kind]
        path = _path(job["metadata"]["namespace"], resource)
        try:
            # So that a misspelt field of a template is refused, and not dropped in silence.
            strict = {"fieldValidation": "Strict"}
            self._api.request("create", resource, path, body=action.manifest, query=strict)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return self._check_owner(job, resource, action.name)
            if error.reason == NAMESPACE_TERMINATING:
                return Problem(error.reason, f"{action.name}: {error.message}")
            if error.status == 403:
                quota = "exceeded quota" in error.message
                return Problem("QuotaExceeded" if quota else "Forbidden", f"{action.name}: {error.message}")
            if error.status in (400, 422):
                return Problem("InvalidSpec", f"{_source(action)}{action.name}: {error.message}")
            raise
        return None

    def _check_owner(self, job: Mapping[str, Any], resource: str, name: str) -> Problem | None:
        path = f"{_path(job['metadata']['namespace'], resource)}/{name}"
        try:
            there = self._api.request("get", resource, path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        if _is_owned(there, job["metadata"]["uid"]):
            return None
        if there["metadata"].get("deletionTimestamp"):
            return Problem(
                "NameTaken", f"{name} of {resource} belongs to an earlier job and is still being deleted"
            )
        text = f"{name} of {resource} exists already and does not belong to this job"
        if resource == "persistentvolumeclaims":
            text += f"; to continue from it, set parameterServer.checkpoint.resumeFrom: {{claim: {name}}}"
        return Problem("NameTaken", text)

    def _delete(self, job: Mapping[str, Any], action: DeletePod | DeleteJob) -> Problem | None:
        metadata = job["metadata"]
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": action.uid},
        }
        if isinstance(action, DeletePod):
            resource, path = "pods", f"/api/v1/namespaces/{metadata['namespace']}/pods/{action.name}"
            if action.force:
                body["gracePeriodSeconds"] = 0
        else:
            resource, path = names.PLURAL, _job_path(metadata["namespace"], metadata["name"])
        try:
            self._api.request("delete", resource, path, body=body)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or another one has the name by now
                raise
        return None

    def post(self, job: Mapping[str, Any], note: Note) -> None:
        """Record an Event; one that cannot be recorded is only logged."""
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
        """Write the status if it differs; whether it did. A job that changed meanwhile is an ApiError 409."""
        old = job.get("status") or {}
        changes = difference(old, over(old, dump_status(status)))
        if not changes:
            return False
        metadata = job["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": changes}
        path = f"{_job_path(metadata['namespace'], metadata['name'])}/status"
        self._api.request("patch", f"{names.PLURAL}/status", path, body=body)
        return True

    def _server_status(self, namespace: str, job: str, found: Sequence[Pod]) -> ServerStatus | None:
        """What shard 0 says about itself, or None if it does not answer in time."""
        first = next((pod for pod in found if pod.role == "ps" and pod.index == 0), None)
        if first is None or first.ending is not None or first.address is None:
            return None
        owner = f"{namespace}/{job}"
        try:
            answer = self._pages.read(owner, (first.address, DEFAULT_HTTP_PORT), "/status")
            status = read_server_status(dict(json.loads(answer)))
        except (Unreadable, ValueError, TypeError, RecursionError) as error:
            logger.debug("%s/%s does not answer GET /status: %s", namespace, first.name, error)
            return None
        return status if status.job == job else None


def _source(action: Create) -> str:
    """Where in the job's spec a refused object comes from."""
    role = (action.manifest["metadata"].get("labels") or {}).get(names.ROLE_LABEL)
    if action.kind != "Pod":
        return ""
    field = role if role in ("worker", "evaluator") else "parameterServer"
    return f"spec.{field}.template does not make a valid pod "


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


def with_refusals(observed: Observed, refused: Sequence[Problem]) -> Observed:
    return replace(observed, refusals=tuple(refused))


def _summaries(done: Sequence[Action]) -> Iterable[Note]:
    """One Event for all that was done for the same reason."""
    now = stamp(datetime.now(UTC))
    pairs = [action for action in done if isinstance(action, Create | DeletePod)]
    for (kind, reason), group in groupby(pairs, key=lambda action: (type(action), action.reason)):
        items = [f"{a.kind.lower()} {a.name}" if isinstance(a, Create) else f"pod {a.name}" for a in group]
        word = "Created" if kind is Create else "Deleted"
        what = ", ".join(items[:20]) + (f" and {len(items) - 20} more" if len(items) > 20 else "")
        yield Note(f"{now}/{word}/{what}", "Normal", word, f"{word} {what}: {reason}")


def _is_owned(manifest: Mapping[str, Any], uid: str) -> bool:
    metadata = manifest["metadata"]
    retained = (metadata.get("annotations") or {}).get(names.RUN_ANNOTATION) == uid
    return retained or any(ref.get("uid") == uid for ref in metadata.get("ownerReferences") or [])


def _path(namespace: str, resource: str) -> str:
    return f"{_GROUPS.get(resource, '/api/v1')}/namespaces/{namespace}/{resource}"


def _group() -> str:
    return f"/apis/{GROUP}/{VERSION}"


def _job_path(namespace: str, name: str) -> str:
    return f"{_group()}/namespaces/{namespace}/{names.PLURAL}/{name}"
