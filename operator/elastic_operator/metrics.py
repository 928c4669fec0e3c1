"""The operator's metrics for Prometheus, and the small HTTP server for metrics and probes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from elastic_ps.process.listening import HttpServer

_PREFIX = "elastic_ps_operator"


class Metrics:
    """The metrics of one operator, in a registry of its own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("api_requests", "Requests to the API server.", "verb", "resource")
        self.request_errors = self._counter(
            "api_request_errors",
            "Requests that the API server refused, by HTTP status and reason.",
            "verb",
            "resource",
            "status",
            "reason",
        )
        self.reconciles = self._counter("reconciles", "Reconcile passes.", "result")
        self.duration = Histogram(
            f"{_PREFIX}_reconcile_seconds", "Duration of a reconcile pass.", registry=self.registry
        )
        self.jobs = self._counter("jobs", "Jobs that have started, succeeded or failed.", "event")
        self.restarts = self._counter("worker_restarts", "Workers that have been replaced.")
        self.watch_age = Gauge(
            f"{_PREFIX}_watch_age_seconds",
            "Age of the oldest change that the watch has not delivered, in seconds.",
            ["resource"],
            registry=self.registry,
        )
        self.queue = Gauge(
            f"{_PREFIX}_queue", "Number of jobs that wait for a reconcile pass.", registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)


class HealthServer:
    """Serves /healthz, /readyz and /metrics in a thread of its own until closed.

    `healthy` and `ready` return what is wrong, or None. They are called in that thread.
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        *,
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(metrics.registry))
                elif self.path in ("/healthz", "/readyz"):
                    wrong = healthy() if self.path == "/healthz" else ready()
                    self._answer(503 if wrong else 200, (wrong or "ok").encode())
                else:
                    self._answer(404, b"not found; this server has /healthz, /readyz and /metrics")

            def _answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        self._server = HttpServer(address, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
