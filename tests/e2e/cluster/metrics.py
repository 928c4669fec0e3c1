"""The metrics server, which tells what pods use: its process, and what leads the API server to it."""

from __future__ import annotations

from typing import Any

from .build import Binaries
from .layout import GATEWAY, Layout

NAME = "metrics-server"
API = "v1beta1.metrics.k8s.io"
NAMESPACE = "kube-system"


def command(layout: Layout, binaries: Binaries) -> list[str]:
    """The argv; it asks the kubelet every ten seconds, which is as often as it can."""
    kubeconfig = layout.kubeconfig_of(NAME)
    return [
        str(binaries[NAME]),
        *(f"--{flag}kubeconfig={kubeconfig}" for flag in ("", "authentication-", "authorization-")),
        f"--bind-address={GATEWAY}",
        f"--secure-port={layout.ports[NAME]}",
        f"--tls-cert-file={layout.pki / f'{NAME}.crt'}",
        f"--tls-private-key-file={layout.pki / f'{NAME}.key'}",
        f"--client-ca-file={layout.pki / 'ca.crt'}",
        "--metric-resolution=10s",
        "--kubelet-request-timeout=5s",
        "--kubelet-preferred-address-types=InternalIP",
        "--kubelet-use-node-status-port",
        # The kubelet signs its certificate itself.
        "--kubelet-insecure-tls",
        f"--kubelet-client-certificate={layout.pki / 'client.crt'}",
        f"--kubelet-client-key={layout.pki / 'client.key'}",
    ]


def service(layout: Layout) -> tuple[dict[str, Any], ...]:
    """A Service that leads to the process."""
    return (
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"ports": [{"name": "https", "port": 443}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": NAME, "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [GATEWAY], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": layout.ports[NAME]}],
        },
    )


def api_service(name: str, namespace: str) -> dict[str, Any]:
    """What makes the API server pass requests for metrics on to a Service."""
    version, _, group = API.partition(".")
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API},
        "spec": {
            "group": group,
            "version": version,
            "service": {"name": name, "namespace": namespace, "port": 443},
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
