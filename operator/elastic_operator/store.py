"""The operator's cache of the cluster, from listings, watches and its own writes.

It keeps only the parts of an object that decisions need. An object never goes back to an older version, in
whatever order watches, listings and answers to own writes arrive: versions of one API server count up, and a
deleted object, known by its uid, does not come back. So the operator reads its own writes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from elastic_operator import names, pods
from elastic_operator.plan import Observed
from elastic_operator.pods import Pod
from elastic_operator.queue import Key
from elastic_ps.api.job import GROUP, KIND, VERSION

logger = logging.getLogger(__name__)

Resource: TypeAlias = Literal["trainingjobs", "pods", "services", "persistentvolumeclaims", "networkpolicies"]

_GROUPS: dict[Resource, str] = {
    "trainingjobs": f"{GROUP}/{VERSION}",
    "networkpolicies": "networking.k8s.io/v1",
}
_REMEMBER_GONE = 600.0


@dataclass(frozen=True, slots=True)
class _Item:
    """Attributes: `value`: the kept parts; `mark`: changes if a pass should look at the object."""

    uid: str
    version: int | None
    key: Key
    owners: frozenset[str]
    value: Any
    mark: object
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A job and its objects. `changed`: the time of the last change, in monotonic seconds."""

    job: dict[str, Any]
    observed: Observed
    changed: float


class Store:
    """The cache. Thread-safe; does no I/O.

    `changed`, if it is set, is called after a change that a pass should look at, with the job's key and the
    resource, without a lock and in the thread that brought the change.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.changed: Callable[[Key, Resource], None] | None = None
        self._lock = threading.Lock()
        self._items: dict[tuple[Resource, str, str], _Item] = {}
        self._belongings: dict[Key, set[tuple[Resource, str, str]]] = {}
        self._changed: dict[Key, float] = {}
        self._gone: dict[str, float] = {}

    def put(self, resource: Resource, manifest: Mapping[str, Any], *, ours: bool = False) -> None:
        """Store an object. `ours`: it is the answer to an own write, which needs no pass.

        One that cannot be read is logged and left out.
        """
        metadata = manifest["metadata"]
        place = (resource, metadata["namespace"], metadata["name"])
        try:
            item = _read(resource, manifest)
        except Exception as error:  # one object may not hide the others
            debug = logger.isEnabledFor(logging.DEBUG)
            logger.warning("%s %s/%s cannot be read: %r", *place, error, exc_info=debug)
            return
        if item is None:
            return
        with self._lock:
            before = self._items.get(place)
            if item.uid in self._gone or (before is not None and not _newer(item, before)):
                return
            if before is not None and before.key != item.key:  # its label names another job now
                self._belongings.get(before.key, set()).discard(place)
            self._items[place] = item
            self._changed[item.key] = self._clock()
            if resource != "trainingjobs":
                self._belongings.setdefault(item.key, set()).add(place)
        new = before is None or before.uid != item.uid or before.mark != item.mark
        if new and not ours and self.changed is not None:
            self.changed(item.key, resource)

    def remove(self, resource: Resource, manifest: Mapping[str, Any]) -> None:
        """Remove an object that was deleted."""
        metadata = manifest["metadata"]
        self._remove((resource, metadata["namespace"], metadata["name"]), metadata["uid"])

    def forget_jobs(self, namespace: str) -> None:
        """Forget the jobs of a namespace, which may still exist and come back.

        Their objects stay, so that no later pass sees a job without its pods.
        """
        jobs = ("trainingjobs", namespace)
        with self._lock:
            known = [(place, item.uid) for place, item in self._items.items() if place[:2] == jobs]
        for place, uid in known:
            self._drop(place, uid)

    def _remove(self, place: tuple[Resource, str, str], uid: str) -> None:
        with self._lock:
            self._forget_gone()
            self._gone[uid] = self._clock()
        self._drop(place, uid)

    def _drop(self, place: tuple[Resource, str, str], uid: str) -> None:
        with self._lock:
            item = self._items.get(place)
            if item is None or item.uid != uid:
                return
            del self._items[place]
            belongings = self._belongings.get(item.key, set())
            belongings.discard(place)
            self._changed[item.key] = self._clock()
            if not belongings:
                self._belongings.pop(item.key, None)
                if ("trainingjobs", *item.key) not in self._items:
                    del self._changed[item.key]
        if self.changed is not None:
            self.changed(item.key, place[0])

    def _forget_gone(self) -> None:
        """Forget deletions that are too old for any watch to contradict them."""
        limit = self._clock() - _REMEMBER_GONE
        while self._gone and next(iter(self._gone.values())) < limit:
            del self._gone[next(iter(self._gone))]

    def listed(self, resource: Resource, namespace: str, found: Mapping[str, str], version: str) -> None:
        """Remove the objects that a complete listing of this version lacks. Its own were `put` already.

        `found`: the listed uids. `namespace`: the one that was listed; "" for all.
        """
        limit = number_of(version)
        with self._lock:
            missing = [
                (place, item.uid)
                for place, item in self._items.items()
                if place[0] == resource
                and namespace in ("", place[1])
                and item.uid not in found
                and (limit is None or item.version is None or item.version <= limit)
            ]
        for place, uid in missing:
            self._remove(place, uid)

    def snapshot(self, key: Key) -> Snapshot | None:
        """The job with all its objects; None if there is no such job."""
        with self._lock:
            item = self._items.get(("trainingjobs", *key))
            if item is None:
                return None
            changed = self._changed[key]
            places = self._belongings.get(key, ())
            owned = [(place, self._items[place]) for place in places if item.uid in self._items[place].owners]
        found: list[Pod] = [other.value for place, other in owned if place[0] == "pods" and other.value]
        service = next((other.value for place, other in owned if place[0] == "services"), None)
        secured, valid_spec = service or (False, "")
        observed = Observed(
            pods=tuple(sorted(found, key=lambda pod: pod.name)),
            service=service is not None,
            secured=secured,
            valid_spec=valid_spec,
            claims=frozenset(place[2] for place, _ in owned if place[0] == "persistentvolumeclaims"),
            policies=frozenset(place[2] for place, _ in owned if place[0] == "networkpolicies"),
        )
        return Snapshot(job=json.loads(item.value), observed=observed, changed=changed)

    def is_lent(self, namespace: str, claim: str, uid: str) -> bool:
        """Return True if a volume claim is deleted with other jobs, and not with the one of this uid."""
        with self._lock:
            item = self._items.get(("persistentvolumeclaims", namespace, claim))
        return item is not None and bool(item.value) and uid not in item.value

    def jobs(self) -> dict[Key, bool]:
        """All jobs, each with whether it is over."""
        with self._lock:
            found = [item for (resource, _, _), item in self._items.items() if resource == "trainingjobs"]
        return {item.key: item.over for item in sorted(found, key=lambda item: item.key)}


def group_of(resource: Resource) -> str:
    """The API group and its version, as an `apiVersion` names them."""
    return _GROUPS.get(resource, "v1")


def path_of(resource: Resource, namespace: str) -> str:
    """The URL path of a namespace's objects; "" for all namespaces."""
    group = f"/{'apis' if resource in _GROUPS else 'api'}/{group_of(resource)}"
    return f"{group}/namespaces/{namespace}/{resource}" if namespace else f"{group}/{resource}"


def _newer(item: _Item, before: _Item) -> bool:
    if item.version is None or before.version is None:
        return True
    return item.version > before.version


def number_of(version: str) -> int | None:
    """A version as a number, by which versions are compared; None if an API server has other versions."""
    return int(version) if version.isdecimal() else None


def _read(resource: Resource, manifest: Mapping[str, Any]) -> _Item | None:
    metadata = manifest["metadata"]
    uid, version = metadata["uid"], number_of(metadata["resourceVersion"])
    if resource == "trainingjobs":
        key = (metadata["namespace"], metadata["name"])
        # Own writes of the status do not change these.
        restart = (metadata.get("annotations") or {}).get(names.RESTART_ANNOTATION)
        mark = (metadata.get("generation"), "deletionTimestamp" in metadata, restart)
        text = json.dumps(_trimmed(manifest)).encode()
        return _Item(uid, version, key, frozenset(), text, mark, over=is_over(manifest))
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if names.JOB_LABEL not in labels:
        return None
    owners = {str(ref.get("uid")) for ref in metadata.get("ownerReferences") or []}
    if (run := annotations.get(names.RUN_ANNOTATION)) is not None:
        owners.add(str(run))
    value: Any = None
    if resource == "pods":
        value = pods.read(manifest)
    elif resource == "services":
        valid = str(annotations.get(names.VALID_ANNOTATION) or "")
        secured = annotations.get(names.TLS_ANNOTATION) == "true"
        value = (secured, valid)
    elif resource == "persistentvolumeclaims":
        references = metadata.get("ownerReferences") or []
        value = frozenset(str(ref.get("uid")) for ref in references if ref.get("kind") == KIND)
    key = (metadata["namespace"], labels[names.JOB_LABEL])
    return _Item(uid, version, key, frozenset(owners), value, value)


def _trimmed(job: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in job["metadata"].items() if name != "managedFields"}
    return {"metadata": metadata, "spec": job.get("spec"), "status": job.get("status")}


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether the job's status says that it has ended."""
    status = job.get("status") or {}
    ends = [c for c in status.get("conditions") or [] if c.get("type") in ("Succeeded", "Failed")]
    return status.get("completionTime") is not None or any(c.get("status") == "True" for c in ends)


def is_owned(manifest: Mapping[str, Any], uid: str) -> bool:
    """Whether an object belongs to the job with this uid."""
    metadata = manifest["metadata"]
    retained = (metadata.get("annotations") or {}).get(names.RUN_ANNOTATION) == uid
    return retained or any(ref.get("uid") == uid for ref in metadata.get("ownerReferences") or [])


def keys(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The versions of objects by uid."""
    return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in found}
