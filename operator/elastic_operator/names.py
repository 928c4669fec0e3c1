"""Names, labels and ports of everything that belongs to a job.

Names depend only on the job's name and an index, so that a repeated creation makes no second object.
"""

from __future__ import annotations

from elastic_ps.api.job import GROUP
from elastic_ps.contract.env import CONTAINER as CONTAINER
from elastic_ps.contract.env import INDEX_LABEL as INDEX_LABEL
from elastic_ps.contract.env import JOB_LABEL as JOB_LABEL
from elastic_ps.contract.env import ROLE_LABEL as ROLE_LABEL
from elastic_ps.contract.env import Role

PLURAL = "trainingjobs"
VALID_ANNOTATION = f"{GROUP}/last-valid-spec"
"""On the job's Service: the last valid spec."""

TEMPLATE_ANNOTATION = f"{GROUP}/template-hash"
"""On each pod: the hash of the image and template that it was made from."""

TUNING_ANNOTATION = f"{GROUP}/tuning"
"""On the pod of shard 0, which reads it as a file: the wanted settings that may change in a running job."""

DURABLE_ANNOTATION = f"{GROUP}/durable"
"""On the pod of shard 0, which reads it as a variable at each start: a version that is on disk."""

RESTART_ANNOTATION = f"{GROUP}/restartedAt"
"""A user sets it on a job, to a time: older pods are replaced."""


def restart_command(job: str) -> str:
    """The command that restarts a job."""
    return f"kubectl annotate tj/{job} --overwrite {RESTART_ANNOTATION}=$(date -u +%FT%TZ)"


RUN_ANNOTATION = f"{GROUP}/run"
"""On a volume claim: the job's uid. A claim that outlives its job has no owner reference."""

SERVER_LABEL = {"app.kubernetes.io/component": CONTAINER["ps"]}
"""The label of the pods of parameter servers and standbys, and of no others."""

TLS_ANNOTATION = f"{GROUP}/tls"
"""On the job's Service, with the value `true`: the job's processes use TLS."""

SECRET_TYPE = f"{GROUP}/certificates"
"""The type of the operator's Secrets. Types never change, so it cannot write over a Secret of others."""

PART = 64
"""The processes of a Secret, which Kubernetes refuses above 1 MiB. A certificate and its key take 1.3 KB, and
each certificate of an issuer's chain up to 3 KB more."""

TLS_DIRECTORY = "/etc/elastic-ps/tls"

PATTERN = "^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$"
EXPECTED = (
    "metadata.name must have at most 52 characters of a-z, 0-9 and '-', begin with a letter and not end with "
    "'-', because the job's Services and pods are named after it"
)
"""Valid names of jobs: a Service's name begins with a letter, and has at most 63 characters."""

CHECKPOINT_DIRECTORY = "/var/lib/elastic-ps"
DESIRED_DIRECTORY = "/etc/elastic-ps"
JOINED = "/tmp/elastic-ps-joined"
"""The file that a worker creates in its pod when it has joined."""


def pod(job: str, role: Role, index: int) -> str:
    """`digits-ps-0`, `digits-standby-0`, `digits-worker-3`."""
    return f"{job}-{role}-{index}"


def service(job: str) -> str:
    """The headless Service of the job's servers: `digits-servers`."""
    return f"{job}-servers"


def claim(job: str) -> str:
    """The volume claim that holds the checkpoints; it has the name of the first server that mounts it."""
    return pod(job, "ps", 0)


def certificates(job: str, role: Role, index: int) -> str:
    """The Secret with the certificates of a process and of others of its role."""
    return f"{job}-tls-{role}-{index // PART}"


def network_policy(job: str) -> str:
    """The NetworkPolicy in front of the job's servers."""
    return f"{job}-servers"


def worker_network_policy(job: str) -> str:
    """The NetworkPolicy in front of workers that speak to each other."""
    return f"{job}-workers"


def host_network_policy(job: str) -> str:
    """The NetworkPolicy that lets pods with hostNetwork reach the job's servers."""
    return f"{job}-host-network"


def labels(job: str) -> dict[str, str]:
    """The labels of all objects of the job."""
    return {
        "app.kubernetes.io/name": "elastic-ps",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "elastic-ps-operator",
        JOB_LABEL: job,
    }


def pod_labels(job: str, role: Role, index: int) -> dict[str, str]:
    return labels(job) | {
        "app.kubernetes.io/component": CONTAINER[role],
        ROLE_LABEL: role,
        INDEX_LABEL: str(index),
    }


def worker_selector(job: str) -> str:
    """The selector that the autoscaler reads from status."""
    return f"{JOB_LABEL}={job},{ROLE_LABEL}=worker"
