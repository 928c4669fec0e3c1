"""Specs of templates: some hold what is not permitted by default, the others only what is."""

from __future__ import annotations

from typing import Any


def own(**fields: Any) -> dict[str, Any]:
    """A template's spec with these fields of the worker's own container."""
    return {"containers": [{"name": "worker", **fields}]}


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}]}


def projected(**source: Any) -> dict[str, Any]:
    return volume(projected={"sources": [{"configMap": {"name": "c"}}, source]})


def secured(**fields: Any) -> dict[str, Any]:
    return own(securityContext=fields)


IN_OWN = "spec.containers[worker]"
FORBIDDEN: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (volume(hostPath={"path": "/data/a"}), "spec.volumes[v].hostPath", {"hostPaths": ["/data"]}),
    (volume(hostPath={}), "spec.volumes[v].hostPath", {"hostPaths": ["/"]}),
    (volume(nfs={"server": "s", "path": "/"}), "spec.volumes[v].nfs", {"volumes": ["nfs"]}),
    (volume(csi={"driver": "secrets"}), "spec.volumes[v].csi", {"volumes": ["*"]}),
    (volume(secret={"secretName": "s"}), "spec.volumes[v].secret", {"secrets": ["s"]}),
    (projected(secret={"name": "s"}), "spec.volumes[v].projected.sources[1].secret", {"secrets": ["s*"]}),
    (
        projected(serviceAccountToken={"path": "t"}),
        "spec.volumes[v].projected.sources[1].serviceAccountToken",
        {"serviceAccounts": ["default"]},
    ),
    (own(envFrom=[{"secretRef": {"name": "s"}}]), f"{IN_OWN}.envFrom[0]", {"secrets": ["s"]}),
    (
        own(env=[{"name": "E", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        f"{IN_OWN}.env[E]",
        {"secrets": ["s"]},
    ),
    ({"hostNetwork": True}, "spec.hostNetwork", {"hostNamespaces": True}),
    ({"hostPID": True}, "spec.hostPID", {"hostNamespaces": True}),
    ({"hostIPC": True}, "spec.hostIPC", {"hostNamespaces": True}),
    (
        own(ports=[{"containerPort": 1, "hostPort": 1}]),
        f"{IN_OWN}.ports[1].hostPort",
        {"hostNamespaces": True},
    ),
    (
        own(livenessProbe={"httpGet": {"port": 80, "host": "169.254.169.254"}}),
        f"{IN_OWN}.livenessProbe.httpGet.host",
        {"hostNamespaces": True},
    ),
    (
        own(lifecycle={"preStop": {"tcpSocket": {"port": 1, "host": "h"}}}),
        f"{IN_OWN}.preStop.tcpSocket.host",
        {"hostNamespaces": True},
    ),
    ({"serviceAccountName": "admin"}, "spec.serviceAccountName", {"serviceAccounts": ["admin"]}),
    ({"serviceAccount": "admin"}, "spec.serviceAccount", {"serviceAccounts": ["*"]}),
    (
        {"automountServiceAccountToken": True},
        "spec.automountServiceAccountToken",
        {"serviceAccounts": ["default"]},
    ),
    ({"nodeName": "n"}, "spec.nodeName", {"nodeNames": True}),
    ({"priorityClassName": "default"}, "spec.priorityClassName", {"priorityClasses": ["*"]}),
    ({"priorityClassName": "high"}, "spec.priorityClassName", {"priorityClasses": ["high"]}),
    (
        secured(capabilities={"add": ["CHOWN", "SYS_ADMIN"]}),
        f"{IN_OWN}.securityContext.capabilities.add[SYS_ADMIN]",
        {"capabilities": ["SYS_ADMIN"]},
    ),
    *(
        (secured(**fields), f"{IN_OWN}.securityContext.{path}", {"privileged": True})
        for fields, path in (
            ({"privileged": True}, "privileged"),
            ({"procMount": "Unmasked"}, "procMount"),
            ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile.type"),
            ({"appArmorProfile": {"type": "Unconfined"}}, "appArmorProfile.type"),
            ({"seLinuxOptions": {"type": "spc_t"}}, "seLinuxOptions.type"),
            ({"seLinuxOptions": {"user": "u"}}, "seLinuxOptions.user"),
            ({"seLinuxOptions": {"role": "r"}}, "seLinuxOptions.role"),
            ({"windowsOptions": {"hostProcess": True}}, "windowsOptions.hostProcess"),
        )
    ),
    (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "spec.securityContext.sysctls[kernel.msgmax]",
        {"privileged": True},
    ),
    (
        {"initContainers": [{"name": "i", "image": "i", "securityContext": {"privileged": True}}]},
        "spec.initContainers[i].securityContext.privileged",
        {"privileged": True},
    ),
    (
        {"containers": [{"name": "side", "image": "i", "envFrom": [{"secretRef": {"name": "s"}}]}]},
        "spec.containers[side].envFrom[0]",
        {"secrets": ["s"]},
    ),
]
"""A template's spec, the path of what is forbidden in it, and what permits it."""

PERMITTED: list[dict[str, Any]] = [
    {"imagePullSecrets": [{"name": "registry"}]},
    {"serviceAccountName": "default"},
    {"nodeSelector": {"gpu": "yes"}, "runtimeClassName": "gvisor"},
    volume(persistentVolumeClaim={"claimName": "data"}),
    volume(configMap={"name": "c"}),
    volume(ephemeral={"volumeClaimTemplate": {}}),
    projected(downwardAPI={"items": []}),
    own(env=[{"name": "E", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]),
    secured(runAsUser=0, runAsNonRoot=False, capabilities={"add": ["NET_BIND_SERVICE"]}),
    {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}},
]
"""Templates' specs that need no permission."""
