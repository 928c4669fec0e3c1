"""Keeps the store like the cluster: one thread for each kind of object and namespace lists, then watches.

A listing comes in pages, and of each page only what the store keeps outlives it. A watch goes on where the
one before it ended; only if the API server has forgotten that version is everything listed again. Whether a
thread is alive is found out from outside, by `watches`.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator import names
from elastic_operator.api import Api, ApiError
from elastic_operator.settings import Settings
from elastic_operator.store import Resource, Store, keys, path_of
from elastic_operator.watches import WatchMonitor
from elastic_ps.errors import ConnectionLost

logger = logging.getLogger(__name__)

PAGE = 250
"""Objects in a page of a listing: some megabytes of JSON."""

_WATCH_SECONDS = 300
_BACKOFFS = (1, 1, 2, 3, 5, 8, 13, 20)


def _query(resource: Resource) -> dict[str, str]:
    return {} if resource == "trainingjobs" else {"labelSelector": names.JOB_LABEL}


class Lister:
    """Lists objects into the store. Blocking; thread-safe."""

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store

    def list(self, resource: Resource, namespace: str) -> tuple[dict[str, str], str]:
        """List everything of a kind; the versions by uid, and the listing's own.

        Raises:
            ApiError, ConnectionLost: there is no listing; the store has what it had.
        """
        found: dict[str, str] = {}
        query = {**_query(resource), "limit": str(PAGE)}
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
        return found, version


class Reflector:
    """Lists and watches a kind of object in a namespace, or in all ("") of them, until stopped."""

    def __init__(
        self, api: Api, store: Store, monitor: WatchMonitor, resource: Resource, namespace: str
    ) -> None:
        self._api, self._store, self._monitor = api, store, monitor
        self._resource, self._namespace = resource, namespace
        self._lister = Lister(api, store)
        self._version = ""
        self._listed: dict[str, str] = {}
        self._failures = 0
        self._ended = threading.Event()

    def stop(self) -> None:
        """End with the watch that lasts now; does not block."""
        self._ended.set()

    def start(self) -> None:
        where = f"watch-{self._resource}" + (f"-{self._namespace}" if self._namespace else "")
        threading.Thread(target=self._run, name=where, daemon=True).start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._once()
                self._failures = 0
            except (ApiError, ConnectionLost) as error:
                self._again(error)
            except Exception as error:  # it must not die in silence
                logger.exception("the watch of %s", self._resource)
                self._version = ""
                self._again(error)

    def _again(self, error: Exception) -> None:
        if isinstance(error, ApiError):
            # Where it was forbidden, or the version is too old, a new listing tells what was missed.
            self._version = ""
            if error.status == 410 and self._failures == 0:
                self._failures = 1
                return
        delay = _BACKOFFS[min(self._failures, len(_BACKOFFS) - 1)]
        self._failures += 1
        logger.warning("cannot watch %s, next try in %g s: %s", self._resource, delay, error)
        self._ended.wait(delay * random.uniform(0.8, 1.2))

    def _once(self) -> None:
        if not self._version:
            self._listed, self._version = self._lister.list(self._resource, self._namespace)
        seconds = round(_WATCH_SECONDS * random.uniform(0.8, 1.2))
        query = {
            **_query(self._resource),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        path = path_of(self._resource, self._namespace)
        with self._api.stream(self._resource, path, query=query, timeout=seconds + 30) as lines:
            # What was listed before a watch that begins there has been delivered.
            self._monitor.caught_up(self._listed)
            self._listed = {}
            for event in _events(lines):
                self._failures = 0
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, manifest = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(
                int(manifest.get("code") or 500),
                str(manifest.get("reason") or ""),
                str(manifest.get("message") or "the watch was ended"),
            )
        self._version = manifest["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        gone = kind == "DELETED"
        self._monitor.delivered(manifest, gone=gone)
        if gone:
            self._store.remove(self._resource, manifest)
        else:
            self._store.put(self._resource, manifest)


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield json.loads(line)


class Reflectors:
    """All of an operator's. `list_all` may be called from any thread, before `start` too."""

    def __init__(self, api: Api, store: Store, settings: Settings) -> None:
        self._namespaces = settings.namespaces or ("",)
        self._lister = Lister(api, store)
        kinds: list[Resource] = ["trainingjobs", "pods", "services", "persistentvolumeclaims"]
        if settings.options.http_from is not None:
            kinds.append("networkpolicies")
        self.monitors = {resource: WatchMonitor() for resource in kinds}
        self._all = [
            Reflector(api, store, monitor, resource, namespace)
            for resource, monitor in self.monitors.items()
            for namespace in self._namespaces
        ]
        self._store = store
        self._left_out: frozenset[str] = frozenset()

    def start(self) -> None:
        for reflector in self._all:
            reflector.start()

    def stop(self) -> None:
        """Watch no longer; does not block."""
        for reflector in self._all:
            reflector.stop()

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
                found |= self._lister.list(resource, namespace)[0]
            except ApiError as error:
                if not jobs or error.status not in (403, 404):
                    raise
                refused[namespace] = error
        if len(refused) == len(self._namespaces):
            raise max(refused.values(), key=lambda error: error.status)  # 404: there is no definition, either
        if jobs:
            self._leave_out(refused)
        self.monitors[resource].listed(found, time.monotonic())

    def _leave_out(self, refused: Mapping[str, ApiError]) -> None:
        for namespace, error in refused.items():
            logger.warning("the namespace %s is not served, its jobs cannot be listed: %s", namespace, error)
            self._store.forget_jobs(namespace)
        self._left_out = frozenset(refused)

    def ages(self) -> dict[str, float]:
        """Seconds by which each watch is behind what was listed."""
        now = time.monotonic()
        return {resource: monitor.age(now) for resource, monitor in self.monitors.items()}
