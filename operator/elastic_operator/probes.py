"""The kubelet's probes of parameter servers and workers. Pure.

The kubelet writes a Warning event for each failed probe, and a server takes seconds to start: it imports
torch and waits for workers to bring the model. Its startup probe is therefore a command that waits. It fails,
with a message, if the server does not answer for `_LIMIT` seconds; after the second failure, the kubelet
restarts the container. It succeeds if the server answers but no workers come.

A worker is ready when it has joined the job. It then creates a file that names its process, since an earlier
process may have left one, and its readiness probe waits for that file. The script has no time limit before.
"""

from __future__ import annotations

from elastic_operator import names
from elastic_operator.manifests import Manifest
from elastic_ps.contract.env import DEFAULT_HTTP_PORT

_LIMIT = 280
_MARGIN = 20
"""The seconds that the kubelet waits longer than the command, to read its message."""

_DAY = 24 * 3600

_WAIT = f"""
import socket, sys, time

def ask(path):
    try:
        with socket.create_connection(("127.0.0.1", {DEFAULT_HTTP_PORT}), 2) as sock:
            sock.settimeout(2)
            sock.sendall(b"GET " + path + b" HTTP/1.0\\r\\n\\r\\n")
            return sock.recv(64).split()[1:2] == [b"200"]
    except OSError:
        return False

begin, up = time.monotonic(), False
while not ask(b"/readyz"):
    up = up or ask(b"/healthz")
    if time.monotonic() - begin > {_LIMIT}:
        if not up:
            print("the parameter server has not answered on port {DEFAULT_HTTP_PORT} for {_LIMIT} s")
        sys.exit(not up)
    time.sleep(0.3)
"""
"""It imports nothing of the library, so that it starts quickly."""

_WAIT_FOR_WORKER = f"""
import time

def joined():
    try:
        pid, began = open({names.JOINED!r}).read().split()
        return open("/proc/" + pid + "/stat").read().rpartition(")")[2].split()[19] == began
    except (OSError, ValueError):
        return False

while not joined():
    time.sleep(0.5)
"""
"""`elastic_ps.process.lifecycle.tell_joined` says what the file holds."""


def of_server() -> Manifest:
    """The probes of a server's container."""

    def get(path: str, **timing: int) -> Manifest:
        return {"httpGet": {"path": path, "port": DEFAULT_HTTP_PORT}, **timing}

    wait: Manifest = {"exec": {"command": ["python", "-c", _WAIT]}}
    limit = _LIMIT + _MARGIN
    return {
        "startupProbe": wait | {"periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": limit},
        "livenessProbe": get("/healthz", periodSeconds=10, failureThreshold=6, timeoutSeconds=5),
        "readinessProbe": get("/readyz", periodSeconds=2, failureThreshold=3, timeoutSeconds=2),
    }


def of_worker() -> Manifest:
    """The probe of a worker's container."""
    command = {"exec": {"command": ["python", "-Sc", _WAIT_FOR_WORKER]}}
    return {"readinessProbe": command | {"periodSeconds": 60, "timeoutSeconds": _DAY}}
