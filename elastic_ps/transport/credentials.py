"""The certificate of this process and the authorities that it trusts: the files of `contract.identity`.

The files are checked for each new connection, and read again when they have changed, so certificates and
authorities can be replaced without an interruption. Both ends check the chain, the validity and the job of
the other's certificate; a client also checks that the other end is a server (`identity.server_name`).
"""

from __future__ import annotations

import errno
import logging
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from elastic_ps.contract import env
from elastic_ps.contract.certificates import identity_of, validity_of
from elastic_ps.contract.identity import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    SERVING,
    Identity,
    from_names,
    server_name,
)
from elastic_ps.errors import UsageError

logger = logging.getLogger(__name__)

_FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)

_TRIES = 5
"""The number of attempts to read the files while they change."""


class UntrustedError(ConnectionError):
    """One side does not accept the other's certificate."""


_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, repr=False)
class Loaded:
    """A consistent state of the files.

    Attributes:
        identity: the identity of this process.
        until: the end of the certificate.
        ca, certificate, key: PEM.
        client: the context for sockets that connect.
        server: the context for sockets that accept; None if the process is not a server.
    """

    identity: Identity
    until: datetime
    ca: bytes
    certificate: bytes
    key: bytes
    client: ssl.SSLContext
    server: ssl.SSLContext | None


class Credentials:
    """The files in a directory. Thread-safe.

    Raises:
        UsageError: they are missing, or do not fit together.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._unusable: _Stamp | None = None
        self._ended: Loaded | None = None
        self._identity: Identity | None = None
        try:
            self._stamp, self._loaded = self._read()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot use the certificates in {directory}: {_words(error)}. Expected "
                f"{', '.join(_FILES)}, as docs/guides/security.md describes them"
            ) from error
        self._identity = self._loaded.identity  # new files must have the same identity

    def current(self) -> Loaded:
        """The present state of the files; the previous one while they cannot be used."""
        with self._lock:
            stamp = self._stat()
            if stamp not in (self._stamp, self._unusable):
                try:
                    self._stamp, self._loaded = self._read()
                    logger.info("the certificate was replaced; this process is %s", self._loaded.identity)
                except (OSError, ValueError) as error:
                    text = "the new certificate in %s cannot be used, so the old one stays in use: %s"
                    logger.warning(text, self._directory, _words(error))
                    if not _may_pass(error):
                        self._unusable = stamp
            if datetime.now(UTC) > self._loaded.until and self._ended is not self._loaded:
                self._ended = self._loaded
                text = "the certificate in %s expired at %s, so nobody accepts it; put a new one there"
                logger.warning(text, self._directory, self._loaded.until)
            return self._loaded

    def accepting(self) -> ssl.SSLContext:
        """The context for an accepted socket.

        Raises:
            UsageError: this process's certificate is not that of a server.
        """
        context = self.current().server
        if context is None:
            raise UsageError(
                f"the certificate in {self._directory} belongs to {self.identity}, but this process is a "
                f"server. Expected one of {' or '.join(SERVING)}"
            )
        return context

    @property
    def identity(self) -> Identity:
        """The identity of this process."""
        return self._loaded.identity

    @property
    def server_name(self) -> str:
        """The name that the certificate of every server of this job must have."""
        return server_name(self.identity.job)

    def accept(self, names: Iterable[str]) -> Identity | None:
        """The identity in a certificate with these URIs, whose chain was checked; None if of another job."""
        found = from_names(names)
        return found if found is not None and found.job == self.identity.job else None

    def _stat(self) -> _Stamp:
        return tuple(_stat(self._directory / name) for name in _FILES)

    def _read(self) -> tuple[_Stamp, Loaded]:
        """Raises OSError, ValueError."""
        for left in reversed(range(_TRIES)):
            before = self._stat()
            try:
                loaded = self._load()
            except (OSError, ValueError):
                if not left or self._stat() == before:
                    raise
                continue
            if not left or self._stat() == before:
                break
        return before, loaded

    def _load(self) -> Loaded:
        ca, certificate, key = (self._directory / name for name in _FILES)
        chain = certificate.read_bytes()
        identity = identity_of(chain)
        if identity is None:
            raise ValueError(f"{certificate} names no identity (elastic-ps://JOB/ROLE/INDEX)")
        if self._identity not in (None, identity):
            raise ValueError(f"it belongs to another process, {identity.uri}")
        client = _context(ssl.PROTOCOL_TLS_CLIENT, self._directory)
        server = None
        if identity.role in SERVING:
            server = _context(ssl.PROTOCOL_TLS_SERVER, self._directory)
            server.verify_mode = ssl.CERT_REQUIRED
            # A ticket would let a client come back after its certificate has expired. It would also arrive
            # unasked, and a client that still sends takes everything that arrives for an answer.
            server.num_tickets = 0
        _, until = validity_of(chain)
        return Loaded(identity, until, ca.read_bytes(), chain, key.read_bytes(), client, server)


def of_process(environment: env.ProcessEnvironment) -> Credentials | None:
    """The credentials of this process; None if it was started without.

    Raises:
        UsageError: they cannot be used, or belong to another process of the job.
    """
    if environment.tls is None:
        return None
    credentials = Credentials(environment.tls)
    role = env.IDENTITIES[environment.role]
    expected = Identity(credentials.identity.job, role, environment.index)
    if credentials.identity != expected:
        raise UsageError(
            f"the certificate in {environment.tls} belongs to {credentials.identity}, but this process is "
            f"{expected}. Give each process its own"
        )
    return credentials


def _context(protocol: int, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(directory / CA_FILE)
    context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    return context


def _stat(path: Path) -> tuple[int, int, int]:
    """A stamp that changes when the file does."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _may_pass(error: Exception) -> bool:
    """Whether the files may be readable the next time. An SSLError has numbers of its own."""
    numbers = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in numbers


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"the certificate, its key and the authority do not fit together ({error.reason or error})"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}"
    return str(error)


def names_of(certificate: object) -> list[str]:
    """The URIs in a result of `ssl.SSLSocket.getpeercert`."""
    if not isinstance(certificate, dict):
        return []
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
