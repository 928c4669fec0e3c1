"""How the kubelet finds out about a parameter server, and about a worker. Pure.

The kubelet writes a Warning event for each probe that fails. A start takes seconds, since torch is imported
and workers bring the model; so the startup probe of a server is a command that waits for that, and a start
leaves no Warning. It fails if nobody answers for `_LIMIT` seconds, and says so; the second time, the kubelet
starts the container again. It ends well, too, if the server has answered and only the workers do not come.

A worker is ready when it has joined the job. Its readiness probe waits for the file that it makes then, which
names its process: one of before may have left such a file in the pod. A script may take as long as it likes
before that.
"""

from __future__ import annotations

from elastic_operator import names
from elastic_operator.manifests import Manifest
from elastic_ps.contract.env import DEFAULT_HTTP_PORT

_LIMIT = 280
_MARGIN = 20
"""By which the kubelet waits longer for the command, so that it reads what that says."""

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
"""It imports nothing of the library, so that it is quick."""

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
"""What the file holds, see `elastic_ps.process.lifecycle.tell_joined`."""


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
