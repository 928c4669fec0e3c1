"""When the certificates of a job's processes are issued, and what Secrets hold them. Pure.

A Secret holds the certificates of the processes of one role, as `0.crt`, `0.key`, `1.crt`, ...; a pod mounts
its own, under the names that `contract.identity` gives. There are some for workers that do not exist yet,
so that a job can grow without new ones. When they were issued, and until when they are valid, stands in the
job's status: the operator reads no Secret of a job, and needs no right to.
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

REFUSED = "CertificatesRefused"
"""The reason of a problem for which there are no certificates, or only the old ones."""


@dataclass(frozen=True, repr=False)
class Issued:
    """A certificate with its chain, the key of it, and the authorities to trust, PEM; and when it ends."""

    certificate: bytes
    key: bytes
    authorities: bytes
    until: datetime


def due(
    desired: Desired, status: TrainingJobStatus, observed: Observed, now: datetime, options: Options
) -> Certify | None:
    """The certificates to issue now, if the job's processes have none, too few, or old ones."""
    if not desired.secured:
        return None
    spec, known, workers = desired.spec, status.certificates, desired.workers(observed)[-1] + 1
    renewal = _renewal(known, options)
    if known is None or renewal is None:
        reason = "the job's processes talk to each other over TLS"
    elif renewal <= now:
        reason = f"the certificates are valid until {known.expires} only"
    elif known.workers < workers:
        reason = f"there are certificates for {known.workers} workers only"
    elif name := _without(observed, parse_time(known.issued or None), now, options):
        reason = f"{name} does not start, as if its Secret was missing"
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
    """When new ones are issued: in the last third of the old ones' time. None: that is not known.

    They may last for less than the operator asks for, since they end with the authority that signs.
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
    """The status once they have been issued.

    Where they are refused, or what they need is, it says no more than that the job is to have some: a Service
    that would say so may be refused as well.
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
    """When time alone asks for new ones."""
    renewal = _renewal(status.certificates, options)
    return [] if renewal is None else [max(timedelta(0), renewal - now)]


def room(workers: int) -> int:
    """For how many workers certificates are issued, that a job of so many can grow for a while."""
    return -(-workers // 64) * 64 if workers > 32 else max(4, 1 << (workers - 1).bit_length())


def _without(observed: Observed, issued: datetime | None, now: datetime, options: Options) -> str:
    """The name of a pod for which it is worth a try to issue them again, once.

    A person may have deleted its Secret.
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
