"""Plain dicts for the objects that make up a job: pods, volume claims, Events. Pure.

Pods satisfy Pod Security "restricted" by default. A user's template is merged over the default pod
(`merging`). What the operator relies on (owner, labels, restart policy, the contract) is set after the merge.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_operator import names, probes, wiring
from elastic_operator.manifests import Manifest
from elastic_operator.manifests import metadata as metadata_of
from elastic_operator.merging import merge
from elastic_ps.api.job import API_VERSION, KIND, TrainingJobSpec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.policies import RunPolicy
from elastic_ps.contract.env import (
    DEFAULT_DATA_PORT,
    DEFAULT_HTTP_PORT,
    DEFAULT_PORT,
    DURABLE,
    THREAD_VARIABLES,
    ProcessEnvironment,
    Role,
)

USER_ID = 65532
WORKER_GRACE_SECONDS = 60
PS_GRACE_SECONDS = 120
LOST_NODE_SECONDS = 30
"""The time after which the pods of a node that does not answer are deleted."""

_DESIRED_VOLUME: Manifest = {
    "name": "desired",
    "downwardAPI": {
        "items": [
            {
                "path": "tuning.json",
                "fieldRef": {"fieldPath": f"metadata.annotations['{names.TUNING_ANNOTATION}']"},
            }
        ]
    },
}
"""An annotation as a file: the file follows the annotation, without a new pod."""

_LOST_NODE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_CPU = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m?)")
SERVERS: tuple[Role, ...] = ("ps", "standby")


_PROGRAMS = {"worker": "elastic_ps.worker", "evaluator": "elastic_ps.evaluation"}
"""The modules of the processes that are not parameter servers."""


def claim_name(job: str, spec: TrainingJobSpec) -> str | None:
    """The volume claim that the servers of a job mount; None if checkpoints are lost with the pods."""
    checkpoint = spec.parameter_server.checkpoint
    if checkpoint.resume_from is not None:
        earlier = checkpoint.resume_from
        return earlier.claim or names.claim(earlier.job or "")
    return checkpoint.existing_claim or (names.claim(job) if checkpoint.volume_claim is not None else None)


def has_standbys(spec: TrainingJobSpec) -> bool:
    """Whether each shard has a standby."""
    return spec.parameter_server.durability == "standby"


def servers(spec: TrainingJobSpec) -> list[tuple[Role, int]]:
    """Role and index of each server: the shards and their standbys."""
    roles: tuple[Role, ...] = SERVERS if has_standbys(spec) else ("ps",)
    return [(role, shard) for role in roles for shard in range(spec.parameter_server.replicas)]


def share(spec: TrainingJobSpec) -> bool:
    """Whether several servers share the job's checkpoints: each may have to read the parts of all shards."""
    return has_standbys(spec) or spec.parameter_server.replicas > 1


def template(spec: TrainingJobSpec, role: Role) -> Mapping[str, Any]:
    """The user's template for the pods of a role."""
    if role == "evaluator":
        return spec.evaluator.template if spec.evaluator is not None else {}
    return spec.worker.template if role == "worker" else spec.parameter_server.template


def claim(job: Mapping[str, Any], spec: TrainingJobSpec) -> Manifest:
    """The manifest of the volume claim for checkpoints, which all servers of the job mount.

    Raises:
        ValueError: the job asks for no claim.
    """
    wanted = spec.parameter_server.checkpoint.volume_claim
    if wanted is None:
        raise ValueError("the job has no parameterServer.checkpoint.volumeClaim")
    name = job["metadata"]["name"]
    body: Manifest = {
        "accessModes": [wanted.access_mode or "ReadWriteOnce"],
        "resources": {"requests": {"storage": wanted.storage}},
    }
    if wanted.storage_class_name is not None:
        body["storageClassName"] = wanted.storage_class_name
    metadata = metadata_of(job, names.claim(name), names.pod_labels(name, "ps", 0))
    # Also with an owner: a person may remove it later to keep the checkpoints.
    metadata["annotations"] = {names.RUN_ANNOTATION: job["metadata"]["uid"]}
    # Argo CD deletes an object without an owner that has the name of its application here.
    del metadata["labels"]["app.kubernetes.io/instance"]
    if wanted.retain:
        # The garbage collector keeps an object without an owner.
        del metadata["ownerReferences"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": body,
    }


def pod(
    job: Mapping[str, Any],
    spec: TrainingJobSpec,
    role: Role,
    index: int,
    *,
    avoid: Sequence[str] = (),
    secured: bool = False,
    durable: int | None = None,
) -> Manifest:
    """The pod of one shard, standby or worker, or of the evaluator: the user's template over the default.

    `avoid`: nodes that the scheduler uses only if there is no other. `secured`: the job's processes use TLS.
    `durable`: a version that is known to be on disk.
    """
    name = job["metadata"]["name"]
    own = template(spec, role)
    default = _default_pod_spec(name, spec, role, index)
    if secured:
        wiring.mount_certificate(default, name, role, index)
    pod_spec = merge(default, own.get("spec") or {})
    pod_spec["tolerations"] = with_tolerations(pod_spec.get("tolerations") or [])
    if avoid:
        _prefer_others(pod_spec, avoid)
    if pod_spec.get("hostNetwork"):
        pod_spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")  # else Services have no names there
    pod_spec["restartPolicy"] = {"worker": "Never", "evaluator": "OnFailure"}.get(role, "Always")
    more = own.get("metadata")
    extra: Mapping[str, Any] = more if isinstance(more, Mapping) else {}
    metadata = metadata_of(job, names.pod(name, role, index), names.pod_labels(name, role, index))
    metadata["labels"] = {**(extra.get("labels") or {}), **metadata["labels"]}
    metadata["annotations"] = {
        **(extra.get("annotations") or {}),
        names.TEMPLATE_ANNOTATION: template_hash(spec, role),
    }
    if (role, index) == ("ps", 0):
        word = MutableFields.of(spec, generation=generation(job))
        metadata["annotations"][names.TUNING_ANNOTATION] = word.to_json()
        if durable is not None:
            metadata["annotations"] |= durable_annotation(durable)
    for container in pod_spec["containers"]:
        if container["name"] == names.CONTAINER[role]:
            given = with_threads(container.get("env") or [], container.get("resources") or {})
            container["env"] = _contract(job, spec, role, index, given, secured=secured)
            for own_policy in ("restartPolicy", "restartPolicyRules"):  # since Kubernetes 1.35
                container.pop(own_policy, None)
    if role in SERVERS:
        pod_spec["hostname"], pod_spec["subdomain"] = metadata["name"], names.service(name)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}


def durable_annotation(version: int) -> dict[str, str]:
    """The annotation that keeps shard 0 from starting from scratch: `version` is known to be on disk."""
    return {names.DURABLE_ANNOTATION: str(version)}


def generation(job: Mapping[str, Any]) -> int:
    """The metadata.generation of the job."""
    return int(job["metadata"].get("generation") or 0)


def with_tolerations(given: list[Manifest]) -> list[Manifest]:
    """Tolerations, with those for a lost node added if `given` has none. Kubernetes' default is 5 minutes.

    A process behind a broken network is fenced off, so nobody has to wait for its end.
    """
    covered = {
        item.get("key") for item in given if item.get("effect") in (None, "", "NoExecute")
    }  # a toleration without a key covers every key
    missing = [key for key in _LOST_NODE if not covered & {key, None, ""}]
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
    return [*given, *({"key": key, **lost} for key in missing)]


def template_hash(spec: TrainingJobSpec, role: Role) -> str:
    """A hash of the image and the template of a role, which may change while the job runs.

    The built pod is not hashed: a new version of the operator would take every pod for outdated.
    """
    text = json.dumps([spec.image, template(spec, role)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _prefer_others(pod_spec: Manifest, avoid: Sequence[str]) -> None:
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
    affinity = pod_spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    preferred = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    preferred.append({"weight": 100, "preference": {"matchFields": fields}})


def with_threads(variables: list[Manifest], resources: Mapping[str, Any]) -> list[Manifest]:
    """A container's variables, with the number of threads: the whole cores of its CPU limit, else its
    request.

    The number is at least 1. Variables that are set already stay as they are. If OMP_NUM_THREADS is among
    them, or the container has neither a limit nor a request, nothing is added.
    """
    set_already = {item["name"] for item in variables}
    amounts = (str((resources.get(kind) or {}).get("cpu", "")) for kind in ("limits", "requests"))
    cpu = next((match for amount in amounts if (match := _CPU.fullmatch(amount))), None)
    if cpu is None or "OMP_NUM_THREADS" in set_already:
        return variables
    threads = str(max(1, int(float(cpu[1]) / (1000 if cpu[2] else 1))))
    added = [{"name": name, "value": threads} for name in THREAD_VARIABLES if name not in set_already]
    return [*variables, *added]


def event(job: Mapping[str, Any], *, name: str, kind: str, reason: str, message: str, now: str) -> Manifest:
    """A core/v1 Event about the job; `kind` is Normal or Warning."""
    metadata = job["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "elastic-ps-operator"},
        "reportingComponent": "elastic-ps-operator",
        "reportingInstance": "elastic-ps-operator",
    }


def _contract(
    job: Mapping[str, Any],
    spec: TrainingJobSpec,
    role: Role,
    index: int,
    given: list[Any],
    *,
    secured: bool,
) -> list[Manifest]:
    """The container's variables: the user's, then those of the process contract, which win."""
    name = job["metadata"]["name"]
    server = spec.parameter_server.model_copy(update={"template": {}})
    evaluator = spec.evaluator.model_copy(update={"template": {}}) if spec.evaluator is not None else None
    bare = spec.model_copy(
        update={
            "evaluator": None if role == "worker" else evaluator,
            "parameter_server": server,
            "worker": spec.worker.model_copy(update={"template": {}}),
            "run_policy": RunPolicy(),
        }
    )

    def addresses(of: Role) -> tuple[str, ...]:
        shards = range(spec.parameter_server.replicas)
        return tuple(f"{wiring.host(name, of, shard)}:{DEFAULT_PORT}" for shard in shards)

    environment = ProcessEnvironment(
        job=name,
        spec=bare,
        role=role,
        index=index,
        addresses=addresses("ps"),
        standbys=addresses("standby") if role == "ps" and has_standbys(spec) else (),
        checkpoints=Path(names.CHECKPOINT_DIRECTORY) if role in SERVERS else None,
        resume="require" if spec.parameter_server.checkpoint.resume_from is not None else "auto",
        run=job["metadata"]["uid"],
        # `status.member_statuses` finds members by it. A template may give the pod another hostname.
        hostname=names.pod(name, role, index) if role == "worker" else "",
        tls=Path(names.TLS_DIRECTORY) if secured else None,
        joined=Path(names.JOINED) if role == "worker" else None,
        tuning=Path(names.DESIRED_DIRECTORY) / "tuning.json" if (role, index) == ("ps", 0) else None,
    )
    variables = environment.to_variables()
    contract: list[Manifest] = [{"name": name, "value": value} for name, value in variables.items()]
    if (role, index) == ("ps", 0):  # the kubelet reads it at each start of the container
        field = {"fieldPath": f"metadata.annotations['{names.DURABLE_ANNOTATION}']"}
        contract.append({"name": DURABLE, "valueFrom": {"fieldRef": field}})
    own = {item["name"] for item in contract}
    return [*(item for item in given if item["name"] not in own), *contract]


def _default_pod_spec(job: str, spec: TrainingJobSpec, role: Role, index: int) -> Manifest:
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[Manifest] = [{"name": "tmp", "mountPath": "/tmp"}]
    serves = role in SERVERS
    if serves:
        mounts.append({"name": "checkpoints", "mountPath": names.CHECKPOINT_DIRECTORY})
        volumes.append({"name": "checkpoints", **_checkpoint_volume(job, spec)})
        if (role, index) == ("ps", 0):
            mounts.append({"name": "desired", "mountPath": names.DESIRED_DIRECTORY, "readOnly": True})
            volumes.append(_DESIRED_VOLUME)
    else:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    container: Manifest = {
        "name": names.CONTAINER[role],
        "command": ["python", "-m", _PROGRAMS.get(role, "elastic_ps.server")],
        # The user has no entry in /etc/passwd, where libraries would look for its name and home.
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "USER", "value": "elastic-ps"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if spec.image is not None:
        container["image"] = spec.image
    if serves:
        ports = {"grpc": DEFAULT_PORT, "data": DEFAULT_DATA_PORT, "http": DEFAULT_HTTP_PORT}
        container["ports"] = [{"name": port, "containerPort": number} for port, number in ports.items()]
        container |= probes.of_server()
    elif role == "worker":
        container |= probes.of_worker()
    affinity = _affinity(job, spec, role, index) if serves and share(spec) else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PS_GRACE_SECONDS if serves else WORKER_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
        **({"affinity": affinity} if affinity else {}),
    }


def _affinity(job: str, spec: TrainingJobSpec, role: Role, shard: int) -> Manifest:
    """Where servers are scheduled: a standby away from its shard if the volume allows it, else all on one
    node.

    The scheduler does not keep two pods with a ReadWriteOnce volume together; the second would wait for the
    volume for ever. The first server may go to any node, since the term matches itself.
    """
    claim = spec.parameter_server.checkpoint.volume_claim
    hostname = {"topologyKey": "kubernetes.io/hostname"}
    if claim_name(job, spec) is None:
        return {}  # mutant: equal
    if claim is None or claim.access_mode != "ReadWriteMany":
        servers = [{"key": names.ROLE_LABEL, "operator": "In", "values": ["ps", "standby"]}]
        together = {"matchLabels": {names.JOB_LABEL: job}, "matchExpressions": servers}
        terms = [{"labelSelector": together, **hostname}]
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if role == "ps":
        return {}  # mutant: equal
    leader = {names.JOB_LABEL: job, names.ROLE_LABEL: "ps", names.INDEX_LABEL: str(shard)}
    apart = [{"weight": 100, "podAffinityTerm": {"labelSelector": {"matchLabels": leader}, **hostname}}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": apart}}


def _checkpoint_volume(job: str, spec: TrainingJobSpec) -> Manifest:
    name = claim_name(job, spec)
    return {"emptyDir": {}} if name is None else {"persistentVolumeClaim": {"claimName": name}}
