"""Decides when certificates are issued, and builds the Secrets that hold them. Pure.

A Secret holds the certificates of the processes of one role, as `0.crt`, `0.key`, `1.crt`, ...; a pod mounts
its own, under the names that `contract.identity` gives. Spare certificates let a job grow without new ones.
The job's status says when they were issued and when they expire: the operator neither reads a job's Secrets
nor needs the permission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from elastic_operator import names
from elastic_operator.desired import Desired
from elastic_operator.manifests import Manifest, metadata
from elastic_operator.plan import Certify, Observed, Options, stamp
from elastic_operator.pods import parse_time
from elastic_ps.api.status import CertificatesStatus, TrainingJobStatus
from elastic_ps.contract.env import Role
from elastic_ps.contract.identity import CA_FILE
from elastic_ps.contract.words import amount

REFUSED = "CertificatesRefused"
"""The reason of the problem that no new certificates could be issued."""


@dataclass(frozen=True, repr=False)
class Issued:
    """A certificate with its chain, its key and the authorities to trust, in PEM, and its end."""

    certificate: bytes
    key: bytes
    authorities: bytes
    until: datetime


def due(
    desired: Desired, status: TrainingJobStatus, observed: Observed, now: datetime, options: Options
) -> Certify | None:
    """The certificates to issue now; None if the job has enough and they last."""
    if not desired.secured:
        return None
    spec, known, workers = desired.spec, status.certificates, desired.workers(observed)[-1] + 1
    renewal = _renewal(known, options)
    if known is None or renewal is None:
        reason = "the job's processes use TLS"
    elif renewal <= now:
        reason = f"the certificates expire at {known.expires}"
    elif known.workers < workers:
        reason = f"there are certificates for only {amount(known.workers, 'worker')}"
    elif name := _without(observed, parse_time(known.issued or None), now, options):
        reason = f"{name} does not start; its Secret may be missing"
    else:
        return None
    processes: dict[Role, int] = {"ps": spec.parameter_server.replicas, "worker": room(workers)}
    if spec.parameter_server.durability == "standby":
        processes["standby"] = spec.parameter_server.replicas
    if spec.evaluator is not None:
        processes["evaluator"] = 1
    first = known is None or not known.issued
    return Certify(processes, options.certificate_lifetime, reason, first=first)


def _renewal(known: CertificatesStatus | None, options: Options) -> datetime | None:
    """When new certificates are issued: in the last third of the old ones' lifetime. None if that is unknown.

    They may expire earlier than the operator asks for, with the authority that signs them.
    """
    expires = parse_time(known.expires or None) if known is not None else None
    issued = parse_time(known.issued or None) if known is not None else None
    if expires is None:
        return None
    lasts = expires - issued if issued is not None and issued < expires else options.certificate_lifetime
    return expires - lasts / 3


def renewed(
    status: TrainingJobStatus, certify: Certify | None, observed: Observed, now: datetime
) -> TrainingJobStatus:
    """The status after `certify`.

    If the certificates or the Service were refused, an empty entry records that the job uses TLS.
    """
    if certify is None:
        return status
    if observed.keeping_back and observed.certified is None:
        return status.model_copy(update={"certificates": status.certificates or CertificatesStatus()})
    until = observed.certified or now + certify.lifetime
    workers = certify.processes["worker"]
    known = CertificatesStatus(issued=stamp(now), expires=stamp(until), workers=workers)
    return status.model_copy(update={"certificates": known})


def next_look(status: TrainingJobStatus, now: datetime, options: Options) -> list[timedelta]:
    """The time until new certificates are due, in a list; empty if that is unknown."""
    renewal = _renewal(status.certificates, options)
    return [] if renewal is None else [max(timedelta(0), renewal - now)]


def room(workers: int) -> int:
    """The number of workers to issue certificates for, with room for the job to grow."""
    return -(-workers // 64) * 64 if workers > 32 else max(4, 1 << (workers - 1).bit_length())


def _without(observed: Observed, issued: datetime | None, now: datetime, options: Options) -> str:
    """The pod that does not start, for which to issue certificates once more; "" if there is none.

    Somebody may have deleted its Secret.
    """
    for pod in observed.pods:
        waits = pod.unstarted(now)
        if waits is not None and waits >= options.start_limit and issued and issued < now - waits:
            return pod.name
    return ""


def secrets(
    job: Mapping[str, Any], certify: Certify, issued: Mapping[tuple[Role, int], Issued]
) -> Iterator[Manifest]:
    """The Secrets, with the certificates `issued` for (role, index)."""
    name = job["metadata"]["name"]
    for role, count in certify.processes.items():
        for first in range(0, count, names.PART):
            data: dict[str, str] = {}
            for index in range(first, min(count, first + names.PART)):
                one = issued[role, index]
                data[CA_FILE] = one.authorities.decode()
                data[f"{index}.crt"], data[f"{index}.key"] = one.certificate.decode(), one.key.decode()
            labels = names.labels(name) | {names.ROLE_LABEL: role}
            yield {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": names.SECRET_TYPE,
                "metadata": metadata(job, names.certificates(name, role, first), labels),
                "stringData": data,
            }
