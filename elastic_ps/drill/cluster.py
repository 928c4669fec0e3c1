"""A drill of a TrainingJob on a Kubernetes cluster, through `kubectl`.

The job's processes write their histories to a volume claim that all of its pods mount. At the end a small pod
packs them, and they are checked here like those of a local job. The clocks of several nodes differ. So a
drill on such a cluster may report a false violation ("stale term", "stale incarnation").
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elastic_ps.api.job import TrainingJob
from elastic_ps.api.status import ServerStatus, TrainingJobStatus
from elastic_ps.contract.env import (
    CONTAINER,
    DEFAULT_HTTP_PORT,
    INDEX_LABEL,
    JOB_LABEL,
    PREFIX,
    ROLE_LABEL,
    Role,
)
from elastic_ps.drill.faults import Fault
from elastic_ps.drill.recorded import read
from elastic_ps.drill.runner import LIMIT, Drill, judge, limit_of, train
from elastic_ps.drill.target import Result, Target, Unavailable
from elastic_ps.errors import UserError
from elastic_ps.process.retrying import retry

MOUNT = "/var/lib/elastic-ps-histories"
TEMPLATES: Mapping[str, Role] = {"parameterServer": "ps", "worker": "worker"}
"""The fields of a spec with a template, and the containers of each."""

CALL_TIMEOUT = timedelta(seconds=30)
FETCH_TIMEOUT = timedelta(minutes=2)
LOOK = timedelta(milliseconds=300)


class Kubectl:
    """Runs kubectl in one namespace."""

    def __init__(self, namespace: str | None) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise UserError("a drill on a cluster needs kubectl, which is not on the PATH")
        self._command = [program, *(["--namespace", namespace] if namespace else [])]

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """Run it with these arguments; returns its output.

        Raises:
            UserError: it failed, with its own message.
        """
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=given,
                capture_output=True,
                text=True,
                timeout=CALL_TIMEOUT.total_seconds(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            seconds = CALL_TIMEOUT.total_seconds()
            raise UserError(f"kubectl {arguments[0]} did not answer within {seconds:g} s") from error
        if done.returncode:
            raise UserError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self("get", "-o", "json", *arguments))
        return answer


def with_histories(document: Mapping[str, Any], *, claim: str, run: str) -> dict[str, Any]:
    """The document with processes that write their histories to directory `run` of the claim; pure."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for field, role in TEMPLATES.items():
        pod = _part(_part(_part(changed["spec"], field), "template"), "spec")
        _named(pod.setdefault("volumes", []), "histories")["persistentVolumeClaim"] = {"claimName": claim}
        process = _named(pod.setdefault("containers", []), CONTAINER[role])
        _named(process.setdefault("env", []), f"{PREFIX}HISTORY")["value"] = f"{MOUNT}/{run}"
        _named(process.setdefault("volumeMounts", []), "histories")["mountPath"] = MOUNT
    return changed


def _part(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The value of a key, which may be missing or null."""
    document[key] = part = document.get(key) or {}
    return part


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The item with this name in a list, which is added if missing."""
    for item in items:
        if item.get("name") == name:
            return item
    items.append({"name": name})
    return items[-1]


class ClusterTarget(Target):
    """A TrainingJob on a cluster."""

    def __init__(self, kubectl: Kubectl, job: str, *, limit: timedelta) -> None:
        super().__init__(limit=limit)
        self._kubectl = kubectl
        self._job = job
        self._namespace = self._read()["metadata"]["namespace"]
        self._began = time.monotonic()
        self._why = ""

    @property
    def workers(self) -> int:
        return int(self._read()["spec"].get("worker", {}).get("replicas", 1))

    def server(self) -> ServerStatus | None:
        pod = f"{self._job}-ps-0:{DEFAULT_HTTP_PORT}"
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}/proxy/status"
        try:
            status = ServerStatus.model_validate_json(self._kubectl("get", "--raw", path))
        except (UserError, ValidationError):
            return None
        return status if status.begun else None

    def process(self, role: Role, index: int) -> str:
        """The pod's name, uid and restarts."""
        return self.until(lambda: self._running(role, index), f"{role} {index} runs")

    def _running(self, role: Role, index: int) -> str | None:
        selector = f"{JOB_LABEL}={self._job},{ROLE_LABEL}={role},{INDEX_LABEL}={index}"
        for pod in self._get("pods", "-l", selector)["items"]:
            statuses = pod.get("status", {}).get("containerStatuses") or [{}]
            if "running" in statuses[0].get("state", {}) and "deletionTimestamp" not in pod["metadata"]:
                metadata = pod["metadata"]
                return f"{metadata['name']} {metadata['uid']} {statuses[0].get('restartCount', 0)}"
        return None

    def kill(self, role: Role, index: int) -> None:
        """Delete the pod at once, without a grace period, as if its node was lost."""
        name = self.process(role, index).partition(" ")[0]
        self._kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")

    def scale(self, workers: int) -> None:
        try:
            self._kubectl("scale", f"trainingjobs/{self._job}", f"--replicas={workers}")
        except UserError as error:
            raise Unavailable(str(error)) from error

    def over(self, wait: timedelta = timedelta(0)) -> bool:
        if wait:
            time.sleep(max(wait, LOOK).total_seconds())
        return self._status().phase in ("Succeeded", "Failed", "Suspended")

    def stop(self, why: str) -> None:
        self._why = why
        patch = json.dumps({"spec": {"runPolicy": {"suspend": True}}})
        self._kubectl("patch", f"trainingjobs/{self._job}", "--type=merge", "-p", patch)

    def result(self) -> Result:
        status = self._status()
        elapsed = timedelta(seconds=time.monotonic() - self._began)
        ended = [c for c in status.conditions if c.type == status.phase and c.status == "True"]
        reason, message = (ended[0].reason, ended[0].message) if ended else ("", "")
        return Result(
            self._job,
            status.phase,
            reason,
            self._why or message,
            elapsed,
            status.worker.failures,
            status.progress,
        )

    def _read(self) -> dict[str, Any]:
        return self._get(f"trainingjobs/{self._job}")

    def _get(self, *arguments: str) -> dict[str, Any]:
        """What the cluster has. The drill survives an outage of the API server, as the job does."""
        return retry(partial(self._kubectl.json, *arguments), UserError, patience=LIMIT, pause=LOOK)

    def _status(self) -> TrainingJobStatus:
        return TrainingJobStatus.model_validate(self._read().get("status") or {})


def run_on_cluster(
    job: TrainingJob,
    document: Mapping[str, Any],
    faults: Sequence[Fault],
    *,
    namespace: str | None,
    claim: str,
    history: Path,
    tell: Callable[[str], None],
) -> Drill:
    """Apply the job, run it to its end with these faults, and check its histories. Blocks.

    The job stays on the cluster.

    Args:
        document: the job's document.
        claim: an existing volume claim that all pods may mount, for the histories.
        history: the local directory to copy them to.

    Raises:
        UserError: kubectl fails, or there is a job of that name already.
    """
    kubectl = Kubectl(namespace)
    if kubectl("get", f"trainingjobs/{job.name}", "--ignore-not-found", "-o", "name").strip():
        raise UserError(
            f"there is a TrainingJob {job.name!r} already; delete it, or choose another metadata.name"
        )
    kubectl("get", f"persistentvolumeclaims/{claim}", "-o", "name")
    run = f"{job.name}-{secrets.token_hex(4)}"
    kubectl("apply", "-f", "-", given=json.dumps(with_histories(document, claim=claim, run=run)))
    target = ClusterTarget(kubectl, job.name, limit=limit_of(job))
    injections = train(target, faults, tell)
    result = target.result()
    _fetch(kubectl, job.spec.image or "", claim=claim, run=run, into=history)
    return judge(job, result, injections, read(history))


def _fetch(kubectl: Kubectl, image: str, *, claim: str, run: str, into: Path) -> None:
    """Copy the histories: a pod of the job's image prints them, packed. Raises UserError."""
    name = f"{run}-histories"
    kubectl("apply", "-f", "-", given=json.dumps(packer(name, image, claim=claim, run=run)))
    try:
        deadline = time.monotonic() + FETCH_TIMEOUT.total_seconds()
        while (phase := kubectl.json(f"pods/{name}")["status"].get("phase")) != "Succeeded":
            if phase == "Failed" or time.monotonic() > deadline:
                why = kubectl("logs", name) if phase == "Failed" else f"it is {phase}"
                raise UserError(f"pod {name} could not read the histories: {why}")
            time.sleep(LOOK.total_seconds())
        shutil.rmtree(into, ignore_errors=True)
        unpack(kubectl("logs", name), into)
    finally:
        kubectl("delete", "pod", name, "--wait=false", "--ignore-not-found")


def packer(name: str, image: str, *, claim: str, run: str) -> dict[str, Any]:
    """A pod that prints directory `run` of the claim as an archive in text form; pure."""
    container = {
        "name": "packer",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", f"tar -C {MOUNT}/{run} -czf - . | base64"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "histories", "mountPath": MOUNT}],
    }
    user = 65532
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "histories", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


def unpack(text: str, into: Path) -> None:
    """Write the files of an archive that `packer` has printed. Raises UserError if it is invalid."""
    try:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:gz") as archive:
            archive.extractall(into, filter="data")
    except (tarfile.TarError, binascii.Error, EOFError, OSError) as error:
        raise UserError(f"the histories could not be unpacked: {error}") from error
