"""An operator as a process beside the cluster, and jobs whose containers only sleep.

Sleeping containers replace neither the API server nor the kubelet; they stand where training would be.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.api import Api
from elastic_operator.merging import merge
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from elastic_ps import __version__
from tests.e2e.cluster import GivenCluster, wait_for
from tests.e2e.cluster.base import KUBECTL_TIMEOUT

ROOT = Path(__file__).parents[2]
SLEEP = ["python3", "-c", "import signal, time; signal.signal(15, lambda *_: exit(0)); time.sleep(9999)"]
NO_PROBES: dict[str, Any] = {"startupProbe": {}, "livenessProbe": {}, "readinessProbe": {}}
TRAINING_IMAGE = f"localhost/elastic-ps:{__version__}"
LIMIT = timedelta(seconds=90)
HISTORIES: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "histories"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
}
"""A claim that the processes of a job write their histories to."""


class OperatorProcess:
    """Serves one namespace. Start it as often as you like; `close` ends it."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path) -> None:
        self._kubeconfig, self.namespace, self.log = kubeconfig, namespace, log
        self._process: subprocess.Popen[bytes] | None = None
        self._start = 0

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "elastic_operator", f"--kubeconfig={self._kubeconfig}"]
        command += [f"--namespace={self.namespace}", "--health=127.0.0.1:0", "--poll=2s"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "operator")])
        with self.log.open("ab") as log:
            self._start = log.tell()
            self._process = subprocess.Popen(
                [*command, *arguments], stderr=log, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT
            )

    def wait(self, timeout: timedelta = LIMIT) -> int:
        """Wait until it has ended by itself; its exit status."""
        assert self._process is not None
        return self._process.wait(timeout.total_seconds())

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait(40)
        self._process = None
        return code

    def get(self, path: str) -> str:
        """A page of its probes and metrics. Raises OSError while it does not listen."""
        said = self.log.read_bytes()[self._start :]
        if (port := re.search(rb"probes and metrics on port (\d+)", said)) is None:
            raise ConnectionRefusedError(f"the operator told no port: {said.decode()}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{int(port[1])}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def writes(self) -> float:
        """Writes that the API server got from this process so far."""
        return sum(number for (verb, _), number in requests(self.get("/metrics")).items() if writes(verb))


def writes(verb: str) -> bool:
    return verb not in ("get", "list", "watch")


def requests(metrics: str) -> dict[tuple[str, str], float]:
    """The operator's count of API requests by (verb, resource), from its metrics."""
    return {
        (sample.labels["verb"], sample.labels["resource"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "elastic_ps_operator_api_requests_total"
    }


def sleeper(name: str, image: str, *, command: list[str] | None = None, **spec: Any) -> dict[str, Any]:
    """A TrainingJob of sleeping containers; `command` is the workers', `spec` is merged over."""

    def template(container: str, what: list[str]) -> dict[str, Any]:
        main = {"name": container, "command": what, **NO_PROBES}
        return {"spec": {"terminationGracePeriodSeconds": 2, "containers": [main]}}

    base: Mapping[str, Any] = {
        "entrypoint": "stand_in:main",
        "image": image,
        "parameterServer": {"template": template("parameter-server", SLEEP)},
        "worker": {"replicas": 2, "template": template("worker", command or SLEEP)},
    }
    merged = merge(base, spec)
    for field in ("parameterServer", "worker"):
        container = merged[field]["template"]["spec"]["containers"][0]
        for probe in NO_PROBES:
            container.setdefault(probe, {})
    return {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": merged,
    }


def digits(name: str = "digits", **arguments: Any) -> dict[str, Any]:
    """The sample job, which trains for real."""
    sample: dict[str, Any] = yaml.safe_load((ROOT / "manifests/samples/digits.yaml").read_text())
    sample["metadata"]["name"] = name
    sample["spec"]["arguments"].update(arguments)
    return sample


class Jobs:
    """What a test asks of the jobs in its namespace.

    What is asked again and again goes to the API server without kubectl: a process each time would keep a
    core busy with waiting.
    """

    def __init__(self, cluster: GivenCluster, namespace: str, image: str) -> None:
        self.cluster, self.namespace, self.image = cluster, namespace, image
        settings = Settings(kubeconfig=cluster.kubeconfig, request_timeout=KUBECTL_TIMEOUT)
        self._api = Api(settings, Metrics())

    def kubectl(
        self, *arguments: str, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("-n", self.namespace, *arguments, check=check, stdin=stdin)

    def apply(self, name: str, *, command: list[str] | None = None, **spec: Any) -> None:
        self.cluster.apply(sleeper(name, self.image, command=command, **spec), namespace=self.namespace)

    def _get(self, version: str, what: str, **query: str) -> dict[str, Any]:
        resource, _, name = what.partition("/")
        path = f"{version}/namespaces/{self.namespace}/{what}"
        return self._api.request("get" if name else "list", resource, path, query=query)

    def patch(self, name: str, spec: Mapping[str, Any]) -> None:
        self.kubectl("patch", "tj", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def job(self, name: str) -> dict[str, Any]:
        return self._get("/apis/elastic-ps.dev/v1alpha1", f"trainingjobs/{name}")

    def progress(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (self.job(name).get("status") or {}).get("progress") or {}
        return found

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        items = self._get("/api/v1", "pods", labelSelector=f"elastic-ps.dev/job={name}")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def identities(self, name: str) -> dict[str, tuple[str, int]]:
        """uid and restart count of each pod that is not on its way out."""
        return {
            pod: (
                item["metadata"]["uid"],
                sum(c["restartCount"] for c in item["status"].get("containerStatuses") or []),
            )
            for pod, item in self.pods(name).items()
            if "deletionTimestamp" not in item["metadata"]
        }

    def wait_replaced(
        self, name: str, pod: str, before: Mapping[str, tuple[str, int]], *, timeout: timedelta = LIMIT
    ) -> None:
        """Wait until there is another pod of that name than in `before`, which `identities` gave."""
        old = before[pod]
        wait_for(
            lambda: self.identities(name).get(pod, old)[0] != old[0],
            what=f"{pod} is replaced",
            timeout=timeout,
            explain=lambda: str(self.job(name).get("status")),
        )

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.job(name).get("status", {}).get("conditions", [])
        found: dict[str, Any] = next((c for c in conditions if c["type"] == kind), {})
        return found

    def events(self, name: str) -> dict[str, str]:
        selector = f"involvedObject.name={name},involvedObject.kind=TrainingJob"
        items = self._get("/api/v1", "events", fieldSelector=selector)["items"]
        return {item["reason"]: item["message"] for item in items}

    def wait_status(self, name: str, *, timeout: timedelta = LIMIT, **wanted: object) -> None:
        """Wait until fields of the status are as given: `phase="Running"`, `workers="2/2"`.

        Fails at once when the job ends before.
        """

        def reached() -> bool:
            status = self.job(name).get("status") or {}
            seen = {"phase": status.get("phase"), "workers": status.get("summary", {}).get("workers")}
            if all(seen[key] == value for key, value in wanted.items()):
                return True
            assert seen["phase"] not in ("Succeeded", "Failed") or seen["phase"] == wanted.get("phase"), (
                status
            )
            return False

        def explain() -> str:
            return str(self.job(name).get("status"))

        wait_for(reached, what=f"{name} gets {wanted}", timeout=timeout, explain=explain)

    def wait_version(self, name: str, beyond: int) -> None:
        """Wait until the model's version is above `beyond`."""
        wait_for(
            lambda: self.progress(name).get("version", 0) > beyond,
            what=f"the version of {name} rises above {beyond}",
            timeout=timedelta(minutes=10),
            explain=lambda: str(self.job(name).get("status")),
        )

    def wait_condition(self, name: str, kind: str, reason: str, *, timeout: timedelta = LIMIT) -> str:
        """Wait until the condition is True for that reason; its message then. It may be over soon after."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal found
            found = self.condition(name, kind)
            return (found.get("status"), found.get("reason")) == ("True", reason)

        wait_for(
            reached,
            what=f"{name} is {kind} for {reason}",
            timeout=timeout,
            explain=lambda: str(self.job(name).get("status")),
        )
        return str(found["message"])

    def wait_gone(self, *names: str, timeout: timedelta = LIMIT) -> None:
        """Wait until nothing of these jobs exists any more."""

        def gone() -> bool:
            kinds = ("pods", "services", "secrets", "persistentvolumeclaims")
            return not any(
                self._get("/api/v1", kind, labelSelector=f"elastic-ps.dev/job={name}")["items"]
                for name in names
                for kind in kinds
            )

        wait_for(gone, what=f"everything of {names} is gone", timeout=timeout)
