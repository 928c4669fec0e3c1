"""What is listed beside kopf's watches: it fills the store before the first pass, and proves that they live.

kopf lists each kind of object, then watches it, and tells of each object and of each change. Three things it
does not tell: when its listing is complete; what was deleted while it had no watch; and that a watch delivers
nothing any more, though the process lives. So everything is listed beside it: at the start, now and then, and
when kopf has had to begin a watch anew. A version that was listed, and that no watch delivers for too long,
means that the watch is dead. Of each page only what the store keeps outlives it.
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
from elastic_operator.store import Resource, Store, group_of, keys, path_of

logger = logging.getLogger(__name__)

PAGE = 250
"""Objects in a page of a listing: some megabytes of JSON."""

Scope: TypeAlias = tuple[Resource, str]
"""A kind of object, and the namespace in which it is listed and watched; "" for all."""


def selector_of(resource: Resource) -> str:
    """The label that objects of this kind must have to be the operator's concern; "" if none."""
    return "" if resource == "trainingjobs" else names.JOB_LABEL


class WatchMonitor:
    """Compares what a watch has delivered with what listings say, for one kind of object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._late: dict[str, float] = {}

    def delivered(self, manifest: Mapping[str, Any], *, gone: bool) -> None:
        """The watch delivered this object, or that it is gone."""
        metadata = manifest["metadata"]
        with self._lock:
            self._late.pop(metadata["uid"], None)
            if gone:
                self._seen.pop(metadata["uid"], None)
            else:
                self._seen[metadata["uid"]] = metadata["resourceVersion"]

    def caught_up(self, versions: Mapping[str, str]) -> None:
        """The watch has begun no later than a listing that had these versions, by uid."""
        with self._lock:
            self._seen |= versions
            for uid in versions:
                self._late.pop(uid, None)

    def listed(self, versions: Mapping[str, str], now: float) -> None:
        """A listing says that these versions, by uid, are all there are."""
        with self._lock:
            self._late = {uid: since for uid, since in self._late.items() if uid in versions}
            for uid, version in versions.items():
                if self._seen.get(uid) == version:
                    self._late.pop(uid, None)
                else:
                    self._late.setdefault(uid, now)

    def age(self, now: float) -> float:
        """Seconds since the oldest change that was listed and not delivered; 0 if there is none."""
        with self._lock:
            return max((now - since for since in self._late.values()), default=0.0)


class Listings:
    """All of an operator's. `answered` and `notify` are for kopf's event loop, the rest for any thread.

    Attributes:
        monitors: by each kind of object that is listed and watched.
        due: set when everything should be listed at once.
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
        """The API server has answered kopf's listing, or has begun to answer its watch."""
        if verb == "list":
            self._listed_by_kopf.add(scope)
        elif scope in self._listed_by_kopf:
            self._listed_by_kopf.remove(scope)
            self._begun[scope] += 1
            self.due.set()

    def notify(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """kopf tells of an object; the event's type is None if it has listed it."""
        kind, manifest = event["type"], event["object"]
        if kind is not None:
            self.monitors[resource].delivered(manifest, gone=kind == "DELETED")
        if kind == "DELETED":
            self._store.remove(resource, manifest)
        else:
            self._store.put(resource, manifest)

    def find(self) -> None:
        """See that kopf will find TrainingJobs: it looks once, and they may be served a moment earlier.

        Raises:
            ApiError, ConnectionLost: it will not find them yet.
        """
        group, _, version = group_of("trainingjobs").partition("/")
        found = self._api.request("get", "apis", "/apis").get("groups") or []
        if group not in (each.get("name") for each in found):
            raise ApiError(404, "NotFound", f"the API server does not name the group {group} yet")
        self._api.request("get", "apis", f"/apis/{group}/{version}")

    def list_all(self, resource: Resource) -> None:
        """List everything of a kind into the store, and compare it with what the watches have delivered.

        Of several namespaces, those are left out and forgotten whose jobs may not be listed: a namespace that
        was deleted, say, and the operator's Role with it. They are served again once that is possible.

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
            raise max(refused.values(), key=lambda error: error.status)  # 404: there is no definition, either
        if jobs:
            self._leave_out(refused)
        self.monitors[resource].listed(found, time.monotonic())

    def _list(self, resource: Resource, namespace: str) -> dict[str, str]:
        """The versions by uid. If it fails, the store has what it had."""
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
            logger.warning(
                "cannot serve the namespace %s, because its jobs cannot be listed: %s", namespace, error
            )
            self._store.forget_jobs(namespace)
        self._left_out = frozenset(refused)

    def ages(self) -> dict[str, float]:
        """Seconds by which each watch is behind what was listed."""
        now = time.monotonic()
        return {resource: monitor.age(now) for resource, monitor in self.monitors.items()}
