"""Issues the certificates of jobs, with an authority for each job that is stored nowhere.

The operator has one Secret, in its own namespace: a seed, from which the key of each job's authority follows.
Or it has the certificate and key of a platform's issuer, which then signs for all jobs; a certificate names
its job in any case. So the operator reads this Secret, by its name, and no Secret of a job.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from elastic_operator.api import Api, ApiError
from elastic_operator.certificates import Issued
from elastic_ps.contract.certificates import KeyPair, issue, make_authority, trusts_itself, validity_of
from elastic_ps.contract.env import IDENTITIES, Role
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity
from elastic_ps.errors import UsageError

SEED = "seed"
_SEED_BYTES = 32
_LASTS = timedelta(days=3650)
_KNOWN_FOR = 300.0
"""Seconds; an issuer's Secret may be replaced."""


class Authority:
    """Signs for jobs. Blocking; thread-safe. `secret`: (namespace, name) of what it signs with."""

    def __init__(self, api: Api, secret: tuple[str, str]) -> None:
        self._api = api
        self._namespace, self._name = secret
        self._lock = threading.Lock()
        self._data: dict[str, bytes] = {}
        self._read = float("-inf")

    def issue(
        self,
        job: str,
        processes: Mapping[tuple[Role, int], tuple[str, ...]],
        *,
        now: datetime,
        lifetime: timedelta,
    ) -> dict[tuple[Role, int], Issued]:
        """New certificates for (role, index) of the job with that uid. Values: the names of each server.

        Raises:
            UsageError: the Secret is missing, or not what it should be, or its authority has ended.
            ApiError, ConnectionLost: it cannot be read.
        """
        signer = self._signer(job, now)
        found = {}
        for (role, index), names in processes.items():
            identity = Identity(job, IDENTITIES[role], index)
            pair = issue(signer.authority, identity, now=now, lifetime=lifetime, names=names)
            until = validity_of(pair.certificate)[1]
            found[role, index] = Issued(pair.certificate + signer.chain, pair.key, signer.trusted, until)
        return found

    def _signer(self, job: str, now: datetime) -> _Signer:
        data = self._secret()
        if SEED in data:
            if len(data[SEED]) < _SEED_BYTES:
                raise UsageError(f"{self}: {SEED} has fewer than {_SEED_BYTES} bytes")
            made = make_authority(job, now=now, lifetime=_LASTS, seed=data[SEED])
            return _Signer(made, made.certificate, b"")
        certificate, key = data.get(CERTIFICATE_FILE), data.get(KEY_FILE)
        if not certificate or not key:
            raise UsageError(f"{self} has neither {SEED} nor {CERTIFICATE_FILE} and {KEY_FILE}")
        if trusts_itself(certificate):
            return _Signer(KeyPair(certificate, key), certificate, b"")
        if not (root := data.get(CA_FILE)):
            raise UsageError(f"{self}: {CERTIFICATE_FILE} is not a root, so {CA_FILE} has to have that")
        return _Signer(KeyPair(certificate, key), root, certificate)

    def _secret(self) -> dict[str, bytes]:
        with self._lock:
            if time.monotonic() - self._read > _KNOWN_FOR:
                self._data, self._read = self._fetch(), time.monotonic()
            return self._data

    def _fetch(self) -> dict[str, bytes]:
        path = f"/api/v1/namespaces/{self._namespace}/secrets"
        try:
            found = self._api.request("get", "secrets", f"{path}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            found = self._make(path)
        try:
            return {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
        except (binascii.Error, ValueError, TypeError) as error:
            raise UsageError(f"{self} cannot be read: {error}") from error

    def _make(self, path: str) -> dict[str, object]:
        """The first operator of a cluster makes the seed; another one may have been quicker."""
        data = {SEED: base64.b64encode(secrets.token_bytes(_SEED_BYTES)).decode()}
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        try:
            return self._api.request("create", "secrets", path, body=body)
        except ApiError as error:
            if error.status == 403:
                raise UsageError(f"{self} is missing, and may not be made: {error.message}") from error
            if error.reason != "AlreadyExists":
                raise
        return self._api.request("get", "secrets", f"{path}/{self._name}")

    def __str__(self) -> str:
        return f"the Secret {self._namespace}/{self._name}"


@dataclass(frozen=True, repr=False)
class _Signer:
    """`trusted`: what the processes trust; `chain`: what leads there from what `authority` signs."""

    authority: KeyPair
    trusted: bytes
    chain: bytes
