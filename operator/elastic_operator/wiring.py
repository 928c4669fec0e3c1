"""How the processes of a job find and know each other: its Services, and the names of its servers. Pure.

A job has one headless Service. The name of a server, `digits-ps-0.digits-servers`, is looked up and leads to
its pod, whatever address that has by now. No address of the cluster and no rule of kube-proxy is needed for
a server, and the bytes of a step pass no proxy.

Earlier versions gave each server a Service with an address of its own. A job that has such Services keeps
them for life, since its processes were started with their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_operator import names
from elastic_operator.manifests import Manifest, metadata
from elastic_ps.contract.env import DEFAULT_DATA_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT, Role
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

_VOLUME = "elastic-ps-tls"
_PORTS = {"grpc": DEFAULT_PORT, "data": DEFAULT_DATA_PORT, "http": DEFAULT_HTTP_PORT}


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What is decided when a job starts, and kept as long as it lives.

    Attributes:
        headless: one headless Service for all servers; else a Service for each of them.
        secured: whether the processes have certificates, and talk to each other over TLS.
    """

    headless: bool = True
    secured: bool = False

    def host(self, job: str, role: Role, shard: int) -> str:
        """The name by which a server is reached from the job's namespace."""
        pod = names.pod(job, role, shard)
        return f"{pod}.{names.service(job)}" if self.headless else pod

    def names(self, job: str, namespace: str, role: Role, index: int) -> tuple[str, ...]:
        """What a server is called by those who reach it, for its certificate; nobody connects to others."""
        if role not in ("ps", "standby"):
            return ()
        host = self.host(job, role, index)
        return (host, f"{host}.{namespace}.svc")

    def mount(self, pod_spec: Manifest, job: str, role: Role, index: int) -> None:
        """Let the first container of a pod read its process's own certificate, if it has one."""
        if not self.secured:
            return
        files = {CA_FILE: CA_FILE, f"{index}.crt": CERTIFICATE_FILE, f"{index}.key": KEY_FILE}
        source = {
            "secretName": names.certificates(job, role, index),
            "defaultMode": 0o400,  # for the owner; the kubelet adds the pod's group
            "items": [{"key": key, "path": path} for key, path in files.items()],
        }
        pod_spec["volumes"].append({"name": _VOLUME, "secret": source})
        mounted = {"name": _VOLUME, "mountPath": names.TLS_DIRECTORY, "readOnly": True}
        pod_spec["containers"][0]["volumeMounts"].append(mounted)

    def services(
        self, job: Mapping[str, Any], servers: Iterable[tuple[Role, int]], *, revision: str
    ) -> dict[str, Manifest]:
        """The job's Services by name; the first has `revision`. `servers`: (role, shard) of each."""
        name = job["metadata"]["name"]
        if self.headless:
            labels = names.labels(name) | names.SERVER_LABEL
            selector = {names.JOB_LABEL: name} | names.SERVER_LABEL
            made = _service(job, names.service(name), labels, selector, revision, clusterIP="None")
            if self.secured:
                made["metadata"]["annotations"][names.TLS_ANNOTATION] = "true"
            return {names.service(name): made}
        found: dict[str, Manifest] = {}
        for role, shard in servers:
            labels = names.pod_labels(name, role, shard)
            selector = {key: labels[key] for key in (names.JOB_LABEL, names.ROLE_LABEL, names.INDEX_LABEL)}
            address = names.service_of(name, shard, role)
            found[address] = _service(job, address, labels, selector, "" if found else revision)
        return found


HEADLESS = Wiring()
"""That of a new job."""


def of(job: str, services: Collection[str], *, secured: bool) -> Wiring:
    """How the job of that name is wired, which has these Services. One without any has not started."""
    return Wiring(headless=not services or names.service(job) in services, secured=secured)


def _service(
    job: Mapping[str, Any],
    name: str,
    labels: dict[str, str],
    selector: dict[str, str],
    revision: str,
    **more: Any,
) -> Manifest:
    """Workers initialise the model, so a server is found before it is ready."""
    annotations = {names.SPEC_ANNOTATION: revision} if revision else {}
    ports = [{"name": port, "port": number, "targetPort": number} for port, number in _PORTS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, name, labels) | {"annotations": annotations},
        "spec": {"selector": selector, "publishNotReadyAddresses": True, "ports": ports, **more},
    }
