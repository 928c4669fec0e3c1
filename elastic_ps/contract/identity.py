"""The identity of a job's process in its certificate.

A process that takes part in mutual TLS has a directory with three files, named as in a Kubernetes Secret of
type `kubernetes.io/tls`: `tls.crt` (its certificate), `tls.key` (its key) and `ca.crt` (the job's
authority; two of them while the authority is replaced). The certificate holds the identity as a URI::

    elastic-ps://7d1f0c2e-9f3b-4a52-8a0c-2f1d4a5e6b7c/worker/3

Certificates are made in `certificates`; what an identity may do is in `server.calls.service`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from elastic_ps.errors import UsageError

CA_FILE = "ca.crt"
CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"

Role = Literal["worker", "server", "standby", "evaluator", "operator"]
"""`server`: a shard. `operator`: the starter of the processes, which reports their ends."""

SERVING: tuple[Role, ...] = ("server", "standby")
"""The roles that others connect to."""

_SCHEME = "elastic-ps://"
_JOB = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Identity:
    """One process of one job.

    Attributes:
        job: a unique name of the job, such as its uid in Kubernetes; a DNS label.
        role: what the process does in the job.
        index: the index of the shard, of its standby too, or of the worker; otherwise 0.

    Raises:
        UsageError: the job is not a DNS label, or the index is negative.
    """

    job: str
    role: Role
    index: int = 0

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job) or self.index < 0:
            raise UsageError(
                f"job {self.job!r} with index {self.index} is not a valid identity. Expected a DNS label "
                "(lower-case letters, digits and dashes, 63 at most), such as the uid of the job, and an "
                "index from 0"
            )

    @property
    def uri(self) -> str:
        """The subject alternative name of the identity."""
        return f"{_SCHEME}{self.job}/{self.role}/{self.index}"

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


def server_name(job: str) -> str:
    """The DNS name that is in the certificates of the job's servers and standbys, and in no other.

    Clients check it instead of the name or address that they have connected to. So a server is also trusted
    behind a relay, a forwarded port or a new Service, and no worker passes for a server.
    """
    return f"server.{job}.elastic-ps"


def from_names(uris: Iterable[str]) -> Identity | None:
    """The identity among the names of a certificate; None if there is not exactly one."""
    found = [uri for uri in uris if uri.startswith(_SCHEME)]
    if len(found) != 1:
        return None
    parts = found[0].removeprefix(_SCHEME).split("/")
    if len(parts) != 3:
        return None
    job, role, index = parts
    if not (_JOB.fullmatch(job) and role in get_args(Role) and _INDEX.fullmatch(index)):
        return None
    return Identity(job, cast(Role, role), int(index))
