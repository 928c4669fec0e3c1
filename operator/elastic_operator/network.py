"""The NetworkPolicies of a job: who may reach its parameter servers, their standbys, and its workers. Pure.

The data ports are for the job's own pods, and the HTTP port for the operator and whoever else is named. The
kubelet needs no rule: a network policy never keeps a node from the pods on it. Pods of workers listen on no
port of ours, so what a template's side-cars serve stays reachable. But with `strategy: all-reduce` they
listen, on ports that the system chooses, and only the other workers may reach any port of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator import names
from elastic_operator.manifests import Manifest, metadata
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.contract.env import DEFAULT_DATA_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT


def policies(
    job: Mapping[str, Any], spec: TrainingJobSpec, http_from: Sequence[Mapping[str, Any]]
) -> dict[str, Manifest]:
    """All of the job, by name."""
    name = job["metadata"]["name"]
    found = {names.network_policy(name): policy(job, http_from)}
    if spec.all_reduce:
        found[names.worker_network_policy(name)] = among_workers(job)
    return found


def policy(job: Mapping[str, Any], http_from: Sequence[Mapping[str, Any]]) -> Manifest:
    """The policy, owned by the job. `http_from`: the NetworkPolicyPeers that may read status and metrics."""
    name = job["metadata"]["name"]
    ingress = [
        {
            "from": [{"podSelector": {"matchLabels": {names.JOB_LABEL: name}}}],
            "ports": [_port(DEFAULT_PORT), _port(DEFAULT_DATA_PORT)],
        }
    ]
    if http_from:  # an empty list would let everybody in
        ingress.append({"from": [dict(peer) for peer in http_from], "ports": [_port(DEFAULT_HTTP_PORT)]})
    servers = {"key": names.ROLE_LABEL, "operator": "In", "values": ["ps", "standby"]}
    selector = {"matchLabels": {names.JOB_LABEL: name}, "matchExpressions": [servers]}
    return _manifest(job, names.network_policy(name), selector, ingress)


def among_workers(job: Mapping[str, Any]) -> Manifest:
    """Only the job's workers reach each other, at whatever port."""
    name = job["metadata"]["name"]
    workers = {"matchLabels": {names.JOB_LABEL: name, names.ROLE_LABEL: "worker"}}
    return _manifest(job, names.worker_network_policy(name), workers, [{"from": [{"podSelector": workers}]}])


def _manifest(job: Mapping[str, Any], name: str, selector: Manifest, ingress: Sequence[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, name, names.labels(job["metadata"]["name"])),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(ingress)},
    }


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}
