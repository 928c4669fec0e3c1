"""The NetworkPolicy of a job: who may reach its parameter servers and their standbys. Pure.

The data ports are for the job's own pods, and the HTTP port for the operator and whoever else is named. The
kubelet needs no rule: a network policy never keeps a node from the pods on it. Pods of workers listen on no
port of ours, so what a template's side-cars serve stays reachable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator import names
from elastic_operator.manifests import Manifest, metadata
from elastic_ps.env import DEFAULT_DATA_PORT, DEFAULT_HTTP_PORT, DEFAULT_PORT


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
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, names.network_policy(name), names.labels(name)),
        "spec": {
            "podSelector": {"matchLabels": {names.JOB_LABEL: name}, "matchExpressions": [servers]},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}
