"""Requests to the API server, as plain dicts, each with a deadline and counted."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from elastic_operator.documents import read_json
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from elastic_ps.errors import ConnectionLost, ElasticPSError, UsageError

logger = logging.getLogger(__name__)

EXIT_TEST = 86
"""Exit status of an operator that `fail_after_writes` ended."""

NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The reason of a 403 while the namespace is being deleted. The operator does not lack a permission."""

_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}

# The package has no types for these.
_load_file: Callable[..., None] = config.load_kube_config
_load_service_account: Callable[..., None] = config.load_incluster_config


class ApiError(ElasticPSError):
    """The API server refused. `status`: the HTTP status; `reason`: Kubernetes' most specific reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Api:
    """A thin client over the `kubernetes` package's connection handling. Thread-safe."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        configuration = client.Configuration()
        try:
            if settings.kubeconfig is not None:
                _load_file(str(settings.kubeconfig), client_configuration=configuration)
            else:
                _load_service_account(client_configuration=configuration)
        except ConfigException as error:
            raise UsageError(f"no cluster is configured: {error}; set --kubeconfig") from error
        configuration.retries = False
        configuration.connection_pool_maxsize = settings.concurrency + 2
        self._client = client.ApiClient(configuration)
        self._timeout = settings.request_timeout.total_seconds()
        self.metrics = metrics
        self._left = settings.fail_after_writes
        self._lock = threading.Lock()

    @property
    def configuration(self) -> client.Configuration:
        """How this client reaches the API server."""
        found: client.Configuration = self._client.configuration
        return found

    @property
    def proxy(self) -> str | None:
        """The URL of the proxy to the API server, which the client has found; None if there is none."""
        through = self._client.rest_client.pool_manager.proxy
        return through.url if through is not None else None

    def authorization(self) -> str | None:
        """The value of the Authorization header now. A token in a file is read again when it expires."""
        bearer: Any = self.configuration.auth_settings().get("BearerToken")
        return bearer["value"] if bearer else None

    def request(
        self,
        verb: str,
        resource: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a request; `verb` and `resource` are those of RBAC. Blocks.

        Raises:
            ApiError: the API server refused.
            ConnectionLost: no answer came; the request may or may not have taken effect.
        """
        # Writes to a lease are no work on a job.
        counts = verb not in ("get", "list") and resource != "leases"
        if self._left == 0 and counts:
            self._end()
        response = self._send(verb, resource, path, body=body, query=query)
        if not 200 <= response.status < 300:
            raise self.error(verb, resource, response.status, response.data)
        if counts:
            self._written()
        answer = read_json(response.data)
        return answer if isinstance(answer, dict) else {}

    def _send(
        self,
        verb: str,
        resource: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        self.metrics.requests.labels(verb, resource).inc()
        # A strategic merge patch adds an owner to those of a claim; a merge patch would replace them.
        patch = "strategic-merge-patch" if resource == "persistentvolumeclaims" else "merge-patch"
        content = f"application/{patch}+json" if verb == "patch" else "application/json"
        headers = {**self._client.default_headers, "Accept": "application/json", "Content-Type": content}
        authorization = self.authorization()
        if authorization is not None:
            headers["Authorization"] = authorization
        url = f"{self.configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        try:
            # The client's own calls differ between versions and turn empty strings of a body into nulls.
            answer: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                _METHODS[verb],
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=self._timeout,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectionLost(f"{verb} {path}: {error}") from error
        return answer

    def error(self, verb: str, resource: str, status: int, body: bytes | str | None) -> ApiError:
        """Read a refusal, and count it."""
        error = read_error(status, body)
        self.metrics.request_errors.labels(verb, resource, str(status), error.reason).inc()
        return error

    def _written(self) -> None:
        with self._lock:
            if self._left is None:
                return
            self._left -= 1
            if self._left > 0:
                return
        self._end()

    def _end(self) -> None:
        logger.error("ended by --fail-after-writes")
        os._exit(EXIT_TEST)


def read_error(status: int, body: bytes | str | None) -> ApiError:
    """Read a refusal. A proxy in between may have sent any text."""
    try:
        document = read_json(body or "{}")
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    reason, message = str(document.get("reason", "")), str(document.get("message", text[:500]))
    details = document.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else []:
        if isinstance(cause, dict) and cause.get("reason") == NAMESPACE_TERMINATING:
            reason = NAMESPACE_TERMINATING
    return ApiError(status, reason, message)
