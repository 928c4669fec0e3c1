"""Full listings beside kopf's watches: they fill the store before the first pass, and find dead watches.

kopf lists each kind of object, then watches it, and reports each object and each change. It does not report
when its listing is complete, what was deleted while it had no watch, or that a watch delivers nothing any
more. So everything is also listed here: at the start, periodically, and after kopf has restarted a watch. If
no watch delivers a listed version for too long, the watch is dead. The store keeps no more of a page than it
needs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from elastic_operator import names
from elastic_operator.api import Api, ApiError
from elastic_operator.settings import Settings
from elastic_operator.store import Resource, Store, group_of, keys, number_of, path_of

logger = logging.getLogger(__name__)

PAGE = 250
"""The number of objects in a page of a listing, some megabytes of JSON."""

Scope: TypeAlias = tuple[Resource, str]
"""A kind of object, and the namespace that is listed and watched; "" for all namespaces."""


def selector_of(resource: Resource) -> str:
    """The label that selects objects of this kind for the operator; "" for all of them."""
    return "" if resource == "trainingjobs" else names.JOB_LABEL


class WatchMonitor:
    """Compares the versions that a watch delivers with those listed, for one kind of object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._late: dict[str, float] = {}

    def delivered(self, manifest: Mapping[str, Any], *, gone: bool) -> None:
        """Note that the watch has delivered this object, or its deletion."""
        metadata = manifest["metadata"]
        with self._lock:
            self._late.pop(metadata["uid"], None)
            if gone:
                self._seen.pop(metadata["uid"], None)
            else:
                self._seen[metadata["uid"]] = metadata["resourceVersion"]

    def caught_up(self, versions: Mapping[str, str]) -> None:
        """Note that a watch began no later than a listing of these versions, by uid."""
        with self._lock:
            self._seen |= {uid: version for uid, version in versions.items() if not self._has(uid, version)}
            for uid in versions:
                self._late.pop(uid, None)

    def listed(self, versions: Mapping[str, str], now: float) -> None:
        """Note a complete listing: these versions, by uid."""
        with self._lock:
            self._late = {uid: since for uid, since in self._late.items() if uid in versions}
            for uid, version in versions.items():
                if self._has(uid, version):
                    self._late.pop(uid, None)
                else:
                    self._late.setdefault(uid, now)

    def _has(self, uid: str, version: str) -> bool:
        """Whether the watch has delivered this version or, while it was listed, a later one."""
        seen = self._seen.get(uid, "")
        ours, listed = number_of(seen), number_of(version)
        return seen == version or (ours is not None and listed is not None and ours > listed)

    def age(self, now: float) -> float:
        """Seconds since the oldest change that was listed but not delivered; 0 if there is none."""
        with self._lock:
            return max((now - since for since in self._late.values()), default=0.0)


class Listings:
    """The listings of an operator. Call `answered` and `notify` in kopf's event loop, the rest in any thread.

    Attributes:
        monitors: the monitor of each kind of object that is listed and watched.
        due: set when everything should be listed now.
    """

    def __init__(self, api: Api, store: Store, settings: Settings) -> None:
        self._api, self._store = api, store
        self._namespaces = settings.namespaces or ("",)
        kinds: list[Resource] = ["trainingjobs", "pods", "services", "persistentvolumeclaims"]
        if settings.options.http_from is not None:
            kinds.append("networkpolicies")
        self.monitors = {resource: WatchMonitor() for resource in kinds}
        self.due = asyncio.Event()
        self._left_out: frozenset[str] = frozenset()
        self._listed_by_kopf: set[Scope] = set()
        self._begun: Counter[Scope] = Counter()
        self._caught_up: Counter[Scope] = Counter()

    def answered(self, verb: str, scope: Scope) -> None:
        """Note that the API server has answered a listing of kopf, or has begun to answer its watch."""
        if verb == "list":
            self._listed_by_kopf.add(scope)
        elif scope in self._listed_by_kopf:
            self._listed_by_kopf.remove(scope)
            self._begun[scope] += 1
            self.due.set()

    def notify(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """Take an object from kopf. The event's type is None if kopf has listed the object."""
        kind, manifest = event["type"], event["object"]
        if kind is not None:
            self.monitors[resource].delivered(manifest, gone=kind == "DELETED")
        if kind == "DELETED":
            self._store.remove(resource, manifest)
        else:
            self._store.put(resource, manifest)

    def find(self) -> None:
        """Check that the API server's discovery names TrainingJobs, in which kopf looks only once.

        Raises:
            ApiError, ConnectionLost: it does not name them yet.
        """
        group, _, version = group_of("trainingjobs").partition("/")
        found = self._api.request("get", "apis", "/apis").get("groups") or []
        if group not in (each.get("name") for each in found):
            raise ApiError(404, "NotFound", f"the API server does not name the group {group} yet")
        self._api.request("get", "apis", f"/apis/{group}/{version}")

    def list_all(self, resource: Resource) -> None:
        """List all objects of a kind into the store, and compare them with those that watches delivered.

        If the jobs of one of several namespaces cannot be listed, for example because the namespace was
        deleted with the operator's Role, that namespace is forgotten. It is served again once it can be
        listed.

        Raises:
            ApiError, ConnectionLost: the API server cannot be asked.
        """
        found: dict[str, str] = {}
        refused: dict[str, ApiError] = {}
        jobs = resource == "trainingjobs"
        for namespace in self._namespaces:
            if namespace in self._left_out and not jobs:
                continue
            try:
                found |= self._list(resource, namespace)
            except ApiError as error:
                if not jobs or error.status not in (403, 404):
                    raise
                refused[namespace] = error
        if len(refused) == len(self._namespaces):
            raise max(refused.values(), key=lambda error: error.status)  # 404: the definition is gone
        if jobs:
            self._leave_out(refused)
        self.monitors[resource].listed(found, time.monotonic())

    def _list(self, resource: Resource, namespace: str) -> dict[str, str]:
        """List into the store; returns the versions by uid. After an error, the store forgets nothing."""
        scope = (resource, namespace)
        begun = self._begun[scope]
        found: dict[str, str] = {}
        query = {"limit": str(PAGE)}
        if selector := selector_of(resource):
            query["labelSelector"] = selector
        version = ""
        while True:
            answer = self._api.request("list", resource, path_of(resource, namespace), query=query)
            items = answer.get("items") or []
            metadata = answer.get("metadata") or {}
            version = version or str(metadata.get("resourceVersion") or "")
            found |= keys(items)
            for item in items:
                self._store.put(resource, item)
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        self._store.listed(resource, namespace, found, version)
        if begun != self._caught_up[scope]:
            self._caught_up[scope] = begun
            self.monitors[resource].caught_up(found)
        return found

    def _leave_out(self, refused: Mapping[str, ApiError]) -> None:
        for namespace, error in refused.items():
            logger.warning("cannot serve the namespace %s: its jobs cannot be listed: %s", namespace, error)
            self._store.forget_jobs(namespace)
        self._left_out = frozenset(refused)

    def ages(self) -> dict[str, float]:
        """The time by which each watch lags behind the listings, in seconds."""
        now = time.monotonic()
        return {resource: monitor.age(now) for resource, monitor in self.monitors.items()}
