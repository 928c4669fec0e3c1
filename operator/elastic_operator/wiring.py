"""The Service of a job, the names of its servers, and their certificates' mounts. Pure.

A job has one headless Service. The name of a server, `digits-ps-0.digits-servers`, resolves to its pod's
current address. A server needs no cluster IP and no rule of kube-proxy, and the bytes of a step pass no
proxy.
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
    """The host name of a server in the job's namespace."""
    return f"{names.pod(job, role, shard)}.{names.service(job)}"


def certified(job: str, namespace: str, role: Role, index: int) -> tuple[str, ...]:
    """The names in a server's certificate; empty for other roles, to which nobody connects."""
    if role not in ("ps", "standby"):
        return ()
    name = host(job, role, index)
    return (name, f"{name}.{namespace}.svc")


def mount_certificate(pod_spec: Manifest, job: str, role: Role, index: int) -> None:
    """Mount the process's own certificate in the first container of a pod."""
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
    """The job's Service. `secured`: mark that the job uses TLS.

    It publishes servers before they are ready, since workers have to initialise their model.
    """
    name = job["metadata"]["name"]
    annotations = {names.TLS_ANNOTATION: "true"} if secured else {}
    labels = names.labels(name) | names.SERVER_LABEL
    ports = [{"name": port, "port": number, "targetPort": number} for port, number in _PORTS.items()]
    for port in ports:
        if port["name"] != "http":  # Istio would take TLS on a port named grpc for HTTP/2
            port["appProtocol"] = "tcp"
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
