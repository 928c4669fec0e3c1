"""How the processes of a job find and know each other: its Service, and the names of its servers. Pure.

A job has one headless Service. The name of a server, `digits-ps-0.digits-servers`, is looked up and leads to
its pod, whatever address that has by now. No address of the cluster and no rule of kube-proxy is needed for
a server, and the bytes of a step pass no proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_operator import names
from elastic_operator.manifests import Manifest, metadata
from elastic_ps.contract.env import DEFAULT_DATA_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT, Role
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

_VOLUME = "elastic-ps-tls"
_PORTS = {"grpc": DEFAULT_PORT, "data": DEFAULT_DATA_PORT, "http": DEFAULT_HTTP_PORT}


def host(job: str, role: Role, shard: int) -> str:
    """The name by which a server is reached from the job's namespace."""
    return f"{names.pod(job, role, shard)}.{names.service(job)}"


def certified(job: str, namespace: str, role: Role, index: int) -> tuple[str, ...]:
    """What a server is called by those who reach it, for its certificate; nobody connects to others."""
    if role not in ("ps", "standby"):
        return ()
    name = host(job, role, index)
    return (name, f"{name}.{namespace}.svc")


def mount_certificate(pod_spec: Manifest, job: str, role: Role, index: int) -> None:
    """Let the first container of a pod read its process's own certificate."""
    files = {CA_FILE: CA_FILE, f"{index}.crt": CERTIFICATE_FILE, f"{index}.key": KEY_FILE}
    source = {
        "secretName": names.certificates(job, role, index),
        "defaultMode": 0o400,  # for the owner; the kubelet adds the pod's group
        "items": [{"key": key, "path": path} for key, path in files.items()],
    }
    pod_spec["volumes"].append({"name": _VOLUME, "secret": source})
    mounted = {"name": _VOLUME, "mountPath": names.TLS_DIRECTORY, "readOnly": True}
    pod_spec["containers"][0]["volumeMounts"].append(mounted)


def service(job: Mapping[str, Any], *, secured: bool = False) -> Manifest:
    """The job's Service. `secured`: it says that the processes talk to each other over TLS.

    Workers initialise the model, so a server is found before it is ready.
    """
    name = job["metadata"]["name"]
    annotations = {names.TLS_ANNOTATION: "true"} if secured else {}
    labels = names.labels(name) | names.SERVER_LABEL
    ports = [{"name": port, "port": number, "targetPort": number} for port, number in _PORTS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, names.service(name), labels) | {"annotations": annotations},
        "spec": {
            "selector": {names.JOB_LABEL: name} | names.SERVER_LABEL,
            "publishNotReadyAddresses": True,
            "ports": ports,
            "clusterIP": "None",
        },
    }
