"""Limits what a job's templates may hold, so that nobody gains rights through the operator. Pure.

Users who may create TrainingJobs make the operator create pods. By default, a template may hold nothing that
Kubernetes' Pod Security standard "baseline" refuses, and nothing that gives a pod another identity, Secrets,
a node or a priority. The administrator may permit more, by namespace. The pod is checked after the template
has been merged. `admission` has the same rules in CEL.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, ValidationError

from elastic_ps.api.fields import CamelModel
from elastic_ps.errors import UsageError

EVERYWHERE = "*"
"""Stands for all namespaces."""

VOLUMES = {
    "configMap",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Volume sources that stay within the namespace. Their Secrets and tokens have rules of their own."""

CAPABILITIES = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
HOOKS = ("postStart", "preStop")
DEFAULT_ACCOUNT = "default"
"""The service account of a pod that names none."""

TOKENS = ("serviceAccountToken", "podCertificate")
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
APPARMOR_PROFILES = ("runtime/default", "localhost/")


class Permissions(CamelModel):
    """Permissions beyond the defaults. Names may be shell patterns: `team-*`, `*`."""

    host_paths: list[str] = Field(default_factory=list)
    """Folders of the node, with everything below them."""
    host_namespaces: bool = False
    """The node's network, processes and IPC: hostNetwork, hostPID, hostIPC, hostPort, and host in probes."""
    privileged: bool = False
    """Privileged containers, and other options that weaken the isolation from the node."""
    capabilities: list[str] = Field(default_factory=list)
    """Capabilities beyond the Pod Security standard baseline; `ALL` stands only for itself."""
    service_accounts: list[str] = Field(default_factory=list)
    """Service accounts to run as or to mount the token of. A pod that names none has `default`."""
    node_names: bool = False
    """`nodeName`, which bypasses the scheduler."""
    priority_classes: list[str] = Field(default_factory=list)
    """Priority classes, whose pods may preempt others."""
    secrets: list[str] = Field(default_factory=list)
    """Secrets of the namespace to mount or read. Pull secrets need none: only the kubelet reads them."""
    volumes: list[str] = Field(default_factory=list)
    """Other volume sources: `nfs`, `csi`, ..."""

    def joined(self, other: Permissions) -> Permissions:
        """The permissions of both."""
        mine, theirs = self.model_dump(), other.model_dump()
        # Booleans are joined by "or", lists are concatenated.
        either = {key: value or theirs[key] for key, value in mine.items() if isinstance(value, bool)}
        both = {key: value + theirs[key] for key, value in mine.items() if isinstance(value, list)}
        return Permissions.model_validate(either | both)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Permissions by namespace; those of `EVERYWHERE` apply to all."""

    permitted: Mapping[str, Permissions] = dataclasses.field(default_factory=dict)

    def of(self, namespace: str) -> Permissions:
        """The permissions of a namespace."""
        nothing = Permissions()
        everywhere = self.permitted.get(EVERYWHERE, nothing)
        return everywhere.joined(self.permitted.get(namespace, nothing))


def read_policy(text: str) -> Policy:
    """Read a policy from JSON: an object of namespaces, each with fields of `Permissions`.

    Raises:
        UsageError: it is something else.
    """
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("it is not an object")
        return Policy({name: Permissions.model_validate(value or {}) for name, value in document.items()})
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(field.alias or name for name, field in Permissions.model_fields.items())
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"template permissions: {place}: {first['msg']}; known fields: {known}") from None
    except ValueError as error:
        raise UsageError(
            f"template permissions: {text!r} is not a JSON object of namespaces: {error}; "
            'expected something like {"team-a": {"hostPaths": ["/data"]}}'
        ) from None


def violations(pod: Mapping[str, Any], permitted: Permissions) -> Iterator[tuple[str, str]]:
    """The parts of a pod that are not permitted: (path within the pod, the value that permits it).

    Raises:
        TypeError, KeyError, ValueError, AttributeError: the pod is malformed.
    """
    spec = pod["spec"]
    yield from _of_annotations(pod["metadata"].get("annotations") or {}, permitted)
    yield from _of_pod(spec, permitted)
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or DEFAULT_ACCOUNT
    for volume in spec.get("volumes") or []:
        yield from _of_volume(volume, f"spec.volumes[{volume['name']}]", account, permitted)
    for kind in CONTAINERS:
        for container in spec.get(kind) or []:
            yield from _of_container(container, f"spec.{kind}[{container['name']}]", permitted)


def refusal(forbidden: Iterable[tuple[str, str]], where: str, namespace: str) -> str:
    """The message for the `violations` in the template `where`, with a line for each."""
    return "\n".join(
        f"{where}.{path} is not permitted in the namespace {namespace}: leave it out, or ask the "
        "administrator to permit it in the chart's values, with templatePermissions: "
        f"{{{namespace}: {{{needs}}}}}"
        for path, needs in forbidden
    )


def _of_annotations(annotations: Mapping[str, Any], permitted: Permissions) -> Iterator[tuple[str, str]]:
    for key, value in annotations.items():
        weak = key.startswith(APPARMOR) and not str(value).startswith(APPARMOR_PROFILES)
        if weak and not permitted.privileged:
            yield f"metadata.annotations[{key}]", "privileged: true"


def _of_pod(spec: Mapping[str, Any], permitted: Permissions) -> Iterator[tuple[str, str]]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field) and not permitted.host_namespaces:
            yield f"spec.{field}", "hostNamespaces: true"
    if spec.get("nodeName") and not permitted.node_names:
        yield "spec.nodeName", "nodeNames: true"
    for field in ("serviceAccountName", "serviceAccount"):
        name = spec.get(field) or DEFAULT_ACCOUNT
        if name != DEFAULT_ACCOUNT and not _fits(name, permitted.service_accounts):
            yield f"spec.{field}", f"serviceAccounts: [{name}]"
    priority = spec.get("priorityClassName")
    if priority and not _fits(priority, permitted.priority_classes):
        yield "spec.priorityClassName", f"priorityClasses: [{priority}]"
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or DEFAULT_ACCOUNT
    if spec.get("automountServiceAccountToken") and not _fits(account, permitted.service_accounts):
        yield "spec.automountServiceAccountToken", f"serviceAccounts: [{account}]"
    yield from _of_security(spec.get("securityContext") or {}, "spec.securityContext", permitted)


def _of_security(context: Mapping[str, Any], where: str, permitted: Permissions) -> Iterator[tuple[str, str]]:
    """Check the securityContext of a pod or a container."""
    for capability in (context.get("capabilities") or {}).get("add") or []:
        if capability not in CAPABILITIES and not _fits(capability, permitted.capabilities):
            yield f"{where}.capabilities.add[{capability}]", f"capabilities: [{capability}]"
    selinux = context.get("seLinuxOptions") or {}
    weak = {
        "privileged": context.get("privileged"),
        "procMount": context.get("procMount") not in (None, "", "Default"),
        "windowsOptions.hostProcess": (context.get("windowsOptions") or {}).get("hostProcess"),
        "seccompProfile.type": (context.get("seccompProfile") or {}).get("type") == "Unconfined",
        "appArmorProfile.type": (context.get("appArmorProfile") or {}).get("type") == "Unconfined",
        "seLinuxOptions.type": (selinux.get("type") or "") not in SELINUX_TYPES,
        "seLinuxOptions.user": selinux.get("user"),
        "seLinuxOptions.role": selinux.get("role"),
        **{f"sysctls[{item['name']}]": item["name"] not in SYSCTLS for item in context.get("sysctls") or []},
    }
    if not permitted.privileged:
        yield from ((f"{where}.{field}", "privileged: true") for field, found in weak.items() if found)


def _of_volume(
    volume: Mapping[str, Any], where: str, account: str, permitted: Permissions
) -> Iterator[tuple[str, str]]:
    for kind in (key for key, value in volume.items() if key != "name" and value is not None):
        source, path = volume[kind], f"{where}.{kind}"
        if kind == "hostPath":
            folder = str(source.get("path") or "/")
            if not _below(folder, permitted.host_paths):
                yield path, f"hostPaths: [{folder}]"
        elif kind not in VOLUMES:
            if not _fits(kind, permitted.volumes):
                yield path, f"volumes: [{kind}]"
        elif kind == "secret":
            yield from _of_secret(source.get("secretName"), path, permitted)
        elif kind == "projected":
            yield from _of_projection(source.get("sources") or [], path, account, permitted)


def _of_projection(
    sources: Iterable[Mapping[str, Any]], where: str, account: str, permitted: Permissions
) -> Iterator[tuple[str, str]]:
    for number, source in enumerate(sources):
        path = f"{where}.sources[{number}]"
        if source.get("secret") is not None:
            yield from _of_secret(source["secret"].get("name"), f"{path}.secret", permitted)
        for token in TOKENS:
            if source.get(token) is not None and not _fits(account, permitted.service_accounts):
                yield f"{path}.{token}", f"serviceAccounts: [{account}]"


def _of_container(
    container: Mapping[str, Any], where: str, permitted: Permissions
) -> Iterator[tuple[str, str]]:
    yield from _of_security(container.get("securityContext") or {}, f"{where}.securityContext", permitted)
    for port in container.get("ports") or []:
        if port.get("hostPort") and not permitted.host_namespaces:
            yield f"{where}.ports[{port.get('containerPort')}].hostPort", "hostNamespaces: true"
    handlers = {**container, **(container.get("lifecycle") or {})}
    for field in (*PROBES, *HOOKS):
        for kind in ("httpGet", "tcpSocket"):
            # The kubelet connects from the node.
            if ((handlers.get(field) or {}).get(kind) or {}).get("host") and not permitted.host_namespaces:
                yield f"{where}.{field}.{kind}.host", "hostNamespaces: true"
    for variable in container.get("env") or []:
        secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if secret is not None:
            yield from _of_secret(secret.get("name"), f"{where}.env[{variable['name']}]", permitted)
    for number, source in enumerate(container.get("envFrom") or []):
        if source.get("secretRef") is not None:
            yield from _of_secret(source["secretRef"].get("name"), f"{where}.envFrom[{number}]", permitted)


def _of_secret(name: object, where: str, permitted: Permissions) -> Iterator[tuple[str, str]]:
    if not _fits(name, permitted.secrets):
        yield where, f"secrets: [{name}]"


def _fits(name: object, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(str(name), pattern) for pattern in patterns)


def _below(folder: str, roots: Iterable[str]) -> bool:
    """Whether a folder is one of `roots` or below. With `..` it never is, since links may lead elsewhere."""
    if ".." in folder.split("/"):
        return False
    normal = [part for part in folder.split("/") if part]
    wanted = ([part for part in posixpath.normpath(root).split("/") if part] for root in roots)
    return any(normal[: len(root)] == root for root in wanted)
