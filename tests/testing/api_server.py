"""A small API server on localhost: objects, versions, watches and refusals, as far as the operator uses them.

It knows neither schemas nor rights, runs no pods and collects no garbage; what depends on these is tested
on a real cluster, in `tests/e2e`. What it does is done as Kubernetes documents it: names are taken once,
the uid in a deletion's preconditions has to be the object's, a patch that names an old version is refused.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.testing.simulation import job_document

JOBS = "trainingjobs"
_KINDS = {
    "pods": "Pod",
    "services": "Service",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "events": "Event",
    "leases": "Lease",
    "networkpolicies": "NetworkPolicy",
    "secrets": "Secret",
    JOBS: "TrainingJob",
}

Object = dict[str, Any]
Where = tuple[str, str, str]
"""(resource, namespace, name)."""


class Refusal(Exception):
    """What the server answers instead; if `streamed`, a watch is told it in its stream, which then ends."""

    def __init__(self, code: int, reason: str, message: str = "", *, streamed: bool = False) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.streamed = code, reason, message, streamed


@dataclass
class Request:
    """One request, as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class _Watch:
    resource: str
    namespace: str
    changes: queue.Queue[Object | None] = field(default_factory=queue.Queue)


class ApiServer:
    """Serves from threads of its own until closed.

    Attributes:
        objects: what there is.
        requests: what has been asked, in order.
        refuse: looks at each request first, and raises `Refusal` for those that are to fail.
        page: objects in a page of a listing at most; None: as many as the request says.
        discovery: what it says it serves, by path.
        texts: the JSON that answers have in place of these texts, such as what Python cannot write.
    """

    def __init__(self) -> None:
        self.objects: dict[Where, Object] = {}
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], None] = lambda _: None
        self.page: int | None = None
        self.discovery = dict(_DISCOVERY)
        self.texts: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._watches: list[_Watch] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                outer._handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                """Requests are kept in `requests`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def cut(self) -> None:
        """End all watches."""
        with self._lock:
            for watch in self._watches:
                watch.changes.put(None)
            self._watches.clear()

    def close(self) -> None:
        self.cut()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, directory: Path, *, token: str = "secret") -> Path:
        """A file that says how this server is reached."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        path = directory / "kubeconfig"
        path.write_text(json.dumps(document))
        return path

    def add_job(self, name: str = "digits", namespace: str = "default", **spec: Any) -> Object:
        """Create a job, as `kubectl apply` does."""
        job = job_document(name, **spec)
        job["metadata"]["namespace"] = namespace
        return self.put(JOBS, job)

    def put(self, resource: str, manifest: Object) -> Object:
        """Create or replace an object, and tell the watches."""
        with self._lock:
            metadata = manifest["metadata"]
            where = (resource, metadata["namespace"], metadata["name"])
            known = where in self.objects
            metadata.setdefault("uid", f"uid-{next(self._numbers)}")
            metadata["resourceVersion"] = str(next(self._numbers))
            self.objects[where] = manifest
            self._tell(resource, "MODIFIED" if known else "ADDED", manifest)
            return manifest

    def remove(self, resource: str, name: str, namespace: str = "default") -> None:
        """Take an object away, as garbage collection does."""
        with self._lock:
            gone = self.objects.pop((resource, namespace, name))
            gone["metadata"]["resourceVersion"] = str(next(self._numbers))
            self._tell(resource, "DELETED", gone)

    def get(self, resource: str, name: str, namespace: str = "default") -> Object:
        with self._lock:
            return self.objects[resource, namespace, name]

    def phase(self, job: str) -> str:
        """As its status says; "" while it has none."""
        return str((self.get(JOBS, job).get("status") or {}).get("phase", ""))

    def names(self, resource: str) -> list[str]:
        with self._lock:
            return sorted(name for kind, _, name in self.objects if kind == resource)

    def start(self, name: str, *, address: str = "127.0.0.1", namespace: str = "default") -> None:
        """A pod's container starts and is ready."""
        with self._lock:
            pod = self.get("pods", name, namespace)
            state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            container = {"name": pod["spec"]["containers"][0]["name"], "state": state}
            pod["status"] = {
                "phase": "Running",
                "podIP": address,
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [container],
            }
            self.put("pods", pod)

    def asked(self, method: str, resource: str) -> list[Request]:
        """The requests so far with this method whose path ends with the resource, or is below it."""
        with self._lock:
            found = [request for request in self.requests if request.method == method]
        return [request for request in found if resource in request.path.split("/")]

    def watched(self, resource: str) -> bool:
        """Whether somebody watches the resource."""
        with self._lock:
            return any(watch.resource == resource for watch in self._watches)

    def counts(self) -> Counter[str]:
        """How many objects of each resource there are."""
        with self._lock:
            return Counter(resource for resource, _, _ in self.objects)

    def _tell(self, resource: str, kind: str, manifest: Object) -> None:
        for watch in self._watches:
            if watch.resource == resource and watch.namespace in ("", manifest["metadata"]["namespace"]):
                watch.changes.put(json.loads(json.dumps({"type": kind, "object": manifest})))

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        address = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        query = dict(parse_qsl(address.query))
        request = Request(
            handler.command,
            address.path,
            query,
            {key.lower(): value for key, value in handler.headers.items()},
            body,
        )
        try:
            with self._lock:
                self.requests.append(request)
                self.refuse(request)
                if request.query.get("watch") == "true":
                    watch = self._watch(request)
                else:
                    return _send(handler, 200, self._encoded(self._answer(request)))
        except Refusal as refusal:
            status = _status(refusal)
            if refusal.streamed:
                watch = _Watch("", "")
                watch.changes.put({"type": "ERROR", "object": status})
                watch.changes.put(None)
            else:
                return _send(handler, refusal.code, self._encoded(status))
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        try:
            while (change := watch.changes.get()) is not None:
                handler.wfile.write(self._encoded(change) + b"\n")
                handler.wfile.flush()
        except OSError:
            with self._lock:
                if watch in self._watches:
                    self._watches.remove(watch)

    def _encoded(self, document: Object) -> bytes:
        text = json.dumps(document)
        for short, long in self.texts.items():
            text = text.replace(json.dumps(short), long)
        return text.encode()

    def _watch(self, request: Request) -> _Watch:
        namespace, resource, _, _ = _locate(request.path)
        watch = _Watch(resource, namespace)
        since = int(request.query.get("resourceVersion", 0))
        for (kind, place, _), manifest in self.objects.items():
            newer = int(manifest["metadata"]["resourceVersion"]) > since
            if kind == resource and namespace in ("", place) and newer:
                watch.changes.put({"type": "ADDED", "object": json.loads(json.dumps(manifest))})
        self._watches.append(watch)
        return watch

    def _answer(self, request: Request) -> Object:
        if (known := self.discovery.get(request.path)) is not None:
            return known
        namespace, resource, name, sub = _locate(request.path)
        if resource not in _KINDS:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if request.method == "POST":
            return self._create(resource, namespace, request.body, dry="dryRun" in request.query)
        if not name:
            return self._list(resource, namespace, request.query)
        found = self.objects.get((resource, namespace, name))
        if found is None:
            raise Refusal(404, "NotFound", f'{resource} "{name}" not found')
        if request.method == "DELETE":
            return self._delete(resource, namespace, name, found, request.body or {})
        if request.method == "PUT":
            if request.body.get("type") != found.get("type"):
                raise Refusal(422, "Invalid", f"{name} is invalid: type: field is immutable")
            return self.put(resource, request.body)
        if request.method == "PATCH":
            if resource == "services":
                return self.put(
                    resource, {**found, "metadata": _merged(found["metadata"], request.body["metadata"])}
                )
            if resource == "persistentvolumeclaims":
                return self.put(resource, _with_owners(found, request))
            whole = resource == "leases"
            patch = request.headers.get("content-type") == "application/merge-patch+json"
            if not patch or sub != ("" if whole else "status"):
                raise Refusal(415, "UnsupportedMediaType")
            named = request.body["metadata"]["resourceVersion"]
            if named != found["metadata"]["resourceVersion"]:
                raise Refusal(409, "Conflict", "the object has been modified")
            if whole:
                return self.put(resource, {**found, "spec": _merged(found["spec"], request.body["spec"])})
            status = _merged(found.get("status") or {}, request.body["status"])
            return self.put(resource, {**found, "status": status})
        return found

    def _create(self, resource: str, namespace: str, manifest: Object, *, dry: bool) -> Object:
        if manifest["kind"] != _KINDS[resource] or manifest["metadata"]["namespace"] != namespace:
            raise Refusal(400, "BadRequest", "the object is not of that kind or namespace")
        if (resource, namespace, manifest["metadata"]["name"]) in self.objects:
            raise Refusal(409, "AlreadyExists", "it exists already")
        return manifest if dry else self.put(resource, manifest)

    def _list(self, resource: str, namespace: str, query: dict[str, str]) -> Object:
        selector, begin = query.get("labelSelector", ""), int(query.get("continue", 0))
        items = [
            manifest
            for (kind, place, _), manifest in self.objects.items()
            if kind == resource and namespace in ("", place) and _selected(manifest, selector)
        ]
        metadata = {"resourceVersion": str(next(self._numbers))}
        end = begin + min(int(query.get("limit", len(items))), self.page or len(items))
        if end < len(items):
            metadata["continue"] = str(end)
        page = items[begin:end]
        return {"kind": f"{_KINDS[resource]}List", "apiVersion": "v1", "metadata": metadata, "items": page}

    def _delete(self, resource: str, namespace: str, name: str, found: Object, options: Object) -> Object:
        uid = (options.get("preconditions") or {}).get("uid")
        if uid not in (None, found["metadata"]["uid"]):
            raise Refusal(409, "Conflict", "the uid is another one")
        version = (options.get("preconditions") or {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            raise Refusal(409, "Conflict", "the object has been modified")
        self.remove(resource, name, namespace)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _locate(path: str) -> tuple[str, str, str, str]:
    """(namespace, resource, name, subresource) of a path; "" for what it does not have."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"]:
        namespace, rest = rest[1], rest[2:]
    resource, name, sub, *_ = [*rest, "", "", ""]
    return namespace, resource, name, sub


def _selected(manifest: Object, selector: str) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    for wanted in filter(None, selector.split(",")):
        key, equals, value = wanted.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def _merged(old: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _with_owners(found: Object, request: Request) -> Object:
    """Strategic merge patch of the owners: those of the same uid are replaced, and the others stay."""
    if request.headers.get("content-type") != "application/strategic-merge-patch+json":
        raise Refusal(415, "UnsupportedMediaType")
    metadata, added = found["metadata"], request.body["metadata"]["ownerReferences"]
    owners = {ref["uid"]: ref for ref in [*metadata.get("ownerReferences", []), *added]}
    return {**found, "metadata": {**metadata, "ownerReferences": [*owners.values()]}}


def _status(refusal: Refusal) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": refusal.reason,
        "message": refusal.message,
        "code": refusal.code,
    }


def _send(handler: BaseHTTPRequestHandler, code: int, body: bytes) -> None:
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _resource(name: str, kind: str, *, namespaced: bool) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    return {"name": name, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs}


def _resources(*resources: Object) -> Object:
    return {"kind": "APIResourceList", "resources": list(resources)}


def _group(name: str, version: str) -> Object:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


_DISCOVERY: dict[str, Object] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": _resources(
        _resource("namespaces", "Namespace", namespaced=False),
        *(
            _resource(name, kind, namespaced=True)
            for name, kind in _KINDS.items()
            if name not in (JOBS, "leases", "networkpolicies")
        ),
    ),
    "/apis": {
        "groups": [
            _group("elastic-ps.dev", "v1alpha1"),
            _group("networking.k8s.io", "v1"),
            _group("apiextensions.k8s.io", "v1"),
        ]
    },
    "/apis/networking.k8s.io/v1": _resources(_resource("networkpolicies", "NetworkPolicy", namespaced=True)),
    "/apis/elastic-ps.dev/v1alpha1": _resources(_resource(JOBS, "TrainingJob", namespaced=True)),
    "/apis/apiextensions.k8s.io/v1": _resources(
        _resource("customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
    ),
}
