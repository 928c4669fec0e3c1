"""Issues the certificates of jobs. Each job has an authority of its own, which is stored nowhere.

The operator reads a single Secret, in its own namespace, and no Secret of a job. It holds a seed, from which
the key of each job's authority is derived, or the certificate and key of a platform's issuer, which then
signs for all jobs. Either way, a certificate names its job.
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
from elastic_ps.contract.certificates import (
    KeyPair,
    is_issued_by,
    issue,
    make_authority,
    trusts_itself,
    validity_of,
)
from elastic_ps.contract.env import IDENTITIES, Role
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity
from elastic_ps.errors import UsageError

SEED = "seed"
_SEED_BYTES = 32
_LASTS = timedelta(days=3650)
_KNOWN_FOR = 300.0
"""Seconds until the Secret is read again, since an issuer may replace it."""


class Authority:
    """Signs for jobs. Blocking; thread-safe.

    `secret`: (namespace, name) of the Secret to sign with. `given`: somebody else creates it.
    """

    def __init__(self, api: Api, secret: tuple[str, str], *, given: bool = False) -> None:
        self._api = api
        self._given = given
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
        """New certificates for (role, index) of the job with that uid. Values of `processes`: a server's
        names.

        Raises:
            UsageError: the Secret is missing or incomplete, or its authority has expired.
            ApiError, ConnectionLost: the Secret cannot be read.
        """
        found = {}
        try:
            signer = self._signer(job, now)
            for (role, index), names in processes.items():
                identity = Identity(job, IDENTITIES[role], index)
                pair = issue(signer.authority, identity, now=now, lifetime=lifetime, names=names)
                until = validity_of(pair.certificate)[1]
                found[role, index] = Issued(pair.certificate + signer.chain, pair.key, signer.trusted, until)
        except UsageError:
            with self._lock:
                self._read = float("-inf")  # the next call reads the Secret, which may be corrected by then
            raise
        return found

    def _signer(self, job: str, now: datetime) -> _Signer:
        data = self._secret()
        certificate, key = data.get(CERTIFICATE_FILE), data.get(KEY_FILE)
        # An older operator may have made the Secret before its owner has filled it.
        if SEED in data and not (self._given and certificate and key):
            if len(data[SEED]) < _SEED_BYTES:
                raise UsageError(
                    f"{self}: {SEED} has {len(data[SEED])} bytes; expected at least {_SEED_BYTES}"
                )
            made = make_authority(job, now=now, lifetime=_LASTS, seed=data[SEED])
            return _Signer(made, made.certificate, b"")
        if not certificate or not key:
            raise UsageError(
                f"{self} has neither {SEED} nor {CERTIFICATE_FILE} and {KEY_FILE}; add one or the other"
            )
        if trusts_itself(certificate):
            return _Signer(KeyPair(certificate, key), certificate, b"")
        if not (root := data.get(CA_FILE)):
            raise UsageError(
                f"{self}: {CERTIFICATE_FILE} is not a root certificate; add the root as {CA_FILE}"
            )
        if not is_issued_by(certificate, root):
            raise UsageError(
                f"{self}: no certificate of {CA_FILE} has issued {CERTIFICATE_FILE}; add the root that "
                "has issued it"
            )
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
            if self._given:
                raise UsageError(f"{self} is missing; create it") from error
            found = self._make(path)
        try:
            return {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
        except (binascii.Error, ValueError, TypeError) as error:
            raise UsageError(f"{self} cannot be read: {error}") from error

    def _make(self, path: str) -> dict[str, object]:
        """Create the Secret with a new seed; if another operator was faster, read its Secret."""
        data = {SEED: base64.b64encode(secrets.token_bytes(_SEED_BYTES)).decode()}
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        try:
            return self._api.request("create", "secrets", path, body=body)
        except ApiError as error:
            if error.status == 403:
                raise UsageError(
                    f"{self} is missing, and the operator may not create it: {error.message}"
                ) from error
            if error.reason != "AlreadyExists":
                raise
        return self._api.request("get", "secrets", f"{path}/{self._name}")

    def __str__(self) -> str:
        return f"the Secret {self._namespace}/{self._name}"


@dataclass(frozen=True, repr=False)
class _Signer:
    """`trusted`: the roots that processes trust; `chain`: the certificates from `authority` up to them."""

    authority: KeyPair
    trusted: bytes
    chain: bytes
