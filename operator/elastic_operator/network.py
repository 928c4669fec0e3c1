"""The NetworkPolicies of a job: who may reach its parameter servers, their standbys, and its workers. Pure.

The job's own pods may reach the data ports; the operator and other named peers may reach the HTTP port. The
kubelet needs no rule, since a policy never keeps a node from its pods. Workers usually listen on no port, so
ports of side-cars stay reachable. With `strategy: all-reduce` they listen on ports that the system chooses,
and only the job's other workers may reach their ports.

Most network plugins take a pod with `hostNetwork` for its node, which no selector of pods finds. So if a job
has such pods, everybody may reach its data ports if certificates say there who is who.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator import names
from elastic_operator.builders import SERVERS, template
from elastic_operator.manifests import Manifest, metadata
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract.env import CONTAINER, DEFAULT_DATA_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT


def policies(
    job: Mapping[str, Any],
    spec: TrainingJobSpec,
    http_from: Sequence[Mapping[str, Any]],
    *,
    secured: bool = False,
) -> dict[str, Manifest]:
    """All NetworkPolicies of the job, by name. `secured`: whether its processes use mutual TLS."""
    name = job["metadata"]["name"]
    found = {names.network_policy(name): policy(job, http_from)}
    if spec.all_reduce:
        found[names.worker_network_policy(name)] = among_workers(job)
    if secured and any((template(spec, role).get("spec") or {}).get("hostNetwork") for role in CONTAINER):
        manifest = _manifest(job, names.host_network_policy(name), _servers(name), [{"ports": _DATA_PORTS}])
        found[names.host_network_policy(name)] = manifest
    return found


def policy(job: Mapping[str, Any], http_from: Sequence[Mapping[str, Any]]) -> Manifest:
    """The policy of the servers. `http_from`: the NetworkPolicyPeers that may read status and metrics."""
    name = job["metadata"]["name"]
    ingress = [
        {
            "from": [{"podSelector": {"matchLabels": {names.JOB_LABEL: name}}}],
            "ports": _DATA_PORTS,
        }
    ]
    if http_from:  # an empty list would admit everybody
        ingress.append({"from": [dict(peer) for peer in http_from], "ports": [_port(DEFAULT_HTTP_PORT)]})
    return _manifest(job, names.network_policy(name), _servers(name), ingress)


def among_workers(job: Mapping[str, Any]) -> Manifest:
    """The policy of the workers: only they reach each other, at all ports."""
    name = job["metadata"]["name"]
    workers = {"matchLabels": {names.JOB_LABEL: name, names.ROLE_LABEL: "worker"}}
    return _manifest(job, names.worker_network_policy(name), workers, [{"from": [{"podSelector": workers}]}])


def _servers(name: str) -> Manifest:
    servers = {"key": names.ROLE_LABEL, "operator": "In", "values": [*SERVERS]}
    return {"matchLabels": {names.JOB_LABEL: name}, "matchExpressions": [servers]}


def _manifest(job: Mapping[str, Any], name: str, selector: Manifest, ingress: Sequence[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name, names.labels(job["metadata"]["name"])),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(ingress)},
    }


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}


_DATA_PORTS = [_port(DEFAULT_PORT), _port(DEFAULT_DATA_PORT)]
