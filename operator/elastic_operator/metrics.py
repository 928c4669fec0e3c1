"""The operator's metrics for Prometheus, and the small HTTP server for metrics and probes."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from elastic_ps.process.listening import Page, PageServer

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


class HealthServer(PageServer):
    """Serves /healthz, /readyz and /metrics in a thread of its own until closed.

    `healthy` and `ready` return what is wrong, or None. They are called in a thread for each request.
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        *,
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
    ) -> None:
        kind = "text/plain; version=0.0.4; charset=utf-8"

        def probed(probe: Callable[[], str | None]) -> Page:
            wrong = probe()
            return 503 if wrong else 200, kind, wrong or "ok"

        pages: dict[str, Callable[[], Page]] = {
            "/healthz": lambda: probed(healthy),
            "/readyz": lambda: probed(ready),
            "/metrics": lambda: (200, kind, generate_latest(metrics.registry).decode()),
        }
        super().__init__(address, pages, name="health")
