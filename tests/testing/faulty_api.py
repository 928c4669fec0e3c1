"""A proxy in front of the real API server that answers some requests as one in trouble does.

What is refused has had no effect, but for "lost": there the request is carried out and its answer withheld.
Watches end after `WATCH_SECONDS`, so that they too are asked for again and again.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import urllib3
from kubernetes import client, config

WATCH_SECONDS = 2

Call: TypeAlias = Literal["watch", "read", "write"]
Fault: TypeAlias = Literal["409", "410", "429", "500", "lost"]

REASONS: dict[Fault, str] = {
    "409": "Conflict",
    "410": "Expired",
    "429": "TooManyRequests",
    "500": "InternalError",
}

FAULTS: dict[Call, tuple[Fault, ...]] = {
    "watch": ("410", "429", "500", "lost"),
    "read": ("429", "500", "lost"),
    "write": ("409", "429", "500", "lost"),
}
"""What each call may meet; 410 is for who names a version, and comes in the stream of a watch."""


def answer(fault: Fault) -> dict[str, Any]:
    """What an API server says in its body."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"made up by a test: {REASONS[fault]}",
        "reason": REASONS[fault],
        "code": int(fault),
    }


@dataclass(frozen=True)
class Storm:
    """Which requests fail, each with the given probability, by one of the faults that it may meet."""

    calls: Collection[Call]
    faults: Collection[Fault]
    probability: float


CALM = Storm((), (), 0.0)


class FaultyApi:
    """Serves from threads of its own until closed; the storms are seeded."""

    def __init__(self, kubeconfig: Path, *, seed: int) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._server_url = configuration.host
        token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        self._credentials = {"Authorization": token} if token else {}
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._storm = CALM
        self.happened: Counter[tuple[Call, Fault]] = Counter()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.serve(self)

            do_POST = do_PATCH = do_DELETE = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """The operator logs what fails."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def storm(
        self,
        faults: Collection[Fault],
        *,
        calls: Collection[Call] = ("watch", "read", "write"),
        probability: float = 1.0,
    ) -> Iterator[None]:
        """Requests that begin while this lasts may fail in these ways."""
        self._storm = Storm(calls, faults, probability)
        try:
            yield
        finally:
            self._storm = CALM

    def kubeconfig(self) -> str:
        """For a client that goes through here."""
        server = {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "faulty", "cluster": server}],
                "users": [{"name": "nobody", "user": {}}],
                "contexts": [{"name": "faulty", "context": {"cluster": "faulty", "user": "nobody"}}],
                "current-context": "faulty",
            }
        )

    def _draw(self, call: Call) -> Fault | None:
        with self._lock:
            storm = self._storm
            possible = [fault for fault in FAULTS[call] if fault in storm.faults]
            if call not in storm.calls or not possible or self._random.random() >= storm.probability:
                return None
            fault = self._random.choice(possible)
            self.happened[call, fault] += 1
            return fault

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """One request, in a thread of the server."""
        url = urlsplit(request.path)
        query = dict(parse_qsl(url.query))
        watching = query.get("watch", "false").lower() in ("true", "1")
        if watching:
            query["timeoutSeconds"] = str(WATCH_SECONDS)
        call: Call = "watch" if watching else "read" if request.command == "GET" else "write"
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        fault = self._draw(call)
        if fault == "410":
            event = {"type": "ERROR", "object": answer(fault)}
            _send(request, 200, json.dumps(event).encode() + b"\n")
            return
        if fault is not None and fault != "lost":
            _send(request, int(fault), json.dumps(answer(fault)).encode())
            return
        if fault == "lost" and watching:
            request.close_connection = True
            return
        kept = request.headers
        response = self._pool.request(
            request.command,
            f"{self._server_url}{url.path}?{urlencode(query)}",
            body=body or None,
            headers=self._credentials
            | {name: kept[name] for name in ("Accept", "Content-Type") if name in kept},
            preload_content=False,
            retries=False,
        )
        try:
            if fault == "lost":
                response.read()
                request.close_connection = True
            elif watching:
                self._stream(request, response)
            else:
                _send(request, response.status, response.read())
        finally:
            response.close()

    def _stream(self, request: BaseHTTPRequestHandler, response: urllib3.BaseHTTPResponse) -> None:
        request.send_response(response.status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        try:
            while part := cast(urllib3.HTTPResponse, response).read1():
                request.wfile.write(part)
                request.wfile.flush()
        except (OSError, urllib3.exceptions.HTTPError):
            """One of the two has gone."""


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    if status == 429:
        request.send_header("Retry-After", "1")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
