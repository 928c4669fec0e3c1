"""How the kubelet finds out about a parameter server. Pure.

The kubelet writes a Warning event for each probe that fails. A start takes seconds, since torch is imported
and workers bring the model; so the startup probe is a command that waits for that, and a normal start leaves
no Warning. It fails if nobody answers for `_UP` seconds. It ends well, too, if the server has answered and
only the workers do not come.
"""

from __future__ import annotations

from elastic_operator.manifests import Manifest
from elastic_ps.env import DEFAULT_HTTP_PORT

_UP = 50
_READY = 280
_START_LIMIT = 300

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
    if time.monotonic() - begin > ({_READY} if up else {_UP}):
        sys.exit(not up)
    time.sleep(0.3)
"""
"""It imports nothing of the library, so that it is quick, and the same for an older image."""


def of_server() -> Manifest:
    """The probes of a server's container."""

    def get(path: str, **timing: int) -> Manifest:
        return {"httpGet": {"path": path, "port": DEFAULT_HTTP_PORT}, **timing}

    wait: Manifest = {"exec": {"command": ["python", "-c", _WAIT]}}
    return {
        "startupProbe": wait | {"periodSeconds": 1, "failureThreshold": 6, "timeoutSeconds": _START_LIMIT},
        "livenessProbe": get("/healthz", periodSeconds=10, failureThreshold=6, timeoutSeconds=5),
        "readinessProbe": get("/readyz", periodSeconds=2, failureThreshold=3, timeoutSeconds=2),
    }
