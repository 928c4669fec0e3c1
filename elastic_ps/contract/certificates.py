"""Makes the certificates by which the processes of a job recognise each other.

The starter of a job calls it: the launcher for each run, the operator for each TrainingJob. It does no I/O
and takes times as arguments; only keys come from the system's randomness. Keys are ECDSA on P-256; the key of
a foreign authority may use another curve, or be RSA. Everything is PEM.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic_ps.contract.identity import SERVING, Identity, from_names, server_name
from elastic_ps.errors import UsageError

SKEW = timedelta(hours=1)
"""Certificates are valid from this long before they are made, since clocks differ and may be set."""


_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of P-256 (SEC 2, 2.4.2)."""


@dataclass(frozen=True, repr=False)
class KeyPair:
    """A certificate and its key, PEM. The key is a secret, which `repr` leaves out."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"


def make_authority(job: str, *, now: datetime, lifetime: timedelta, seed: bytes | None = None) -> KeyPair:
    """A new authority for a job, which trusts itself.

    Args:
        job: see `Identity.job`.
        now: with a time zone.
        lifetime: how long it is valid. Its certificates end no later.
        seed: a secret, from which the key is derived together with `job` (HKDF, RFC 5869). The authority need
            not be kept then: the same seed gives the same key. Default: a random key.
    """
    key = ec.generate_private_key(ec.SECP256R1()) if seed is None else _derived(seed, job)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"elastic-ps {job}"[:64])])
    builder = (
        _builder(name, name, key.public_key(), now, now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue(
    authority: KeyPair,
    identity: Identity,
    *,
    now: datetime,
    lifetime: timedelta,
    names: Sequence[str] = (),
) -> KeyPair:
    """A new key and a certificate for it, signed by the job's authority.

    Args:
        now: with a time zone.
        lifetime: how long it is valid, but never longer than the authority.
        names: a server's DNS names and IP addresses besides `server_name`. Processes of the job ignore them;
            they are for tools that check the name that they have connected to.

    Raises:
        UsageError: the authority is invalid or has expired, or `names` are given for a process that is not
            a server.
    """
    serves = identity.role in SERVING
    if names and not serves:
        raise UsageError(
            f"{identity} is not a server, so its certificate takes no names; given: {list(names)}"
        )
    try:
        ca = x509.load_pem_x509_certificate(authority.certificate)
        ca_key = serialization.load_pem_private_key(authority.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key is encrypted
        raise UsageError(f"the authority cannot be read: {error}") from error
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise UsageError(f"the authority's key is of {type(ca_key).__name__}; expected ECDSA or RSA")
    if ca_key.public_key() != ca.public_key():
        raise UsageError("the authority's key is not the key of its certificate")
    if not _may_sign(ca):
        raise UsageError(
            "the authority's certificate may not sign others. Issue one for an authority (CA:TRUE; with "
            "cert-manager, isCA: true)"
        )
    if ca.not_valid_after_utc <= now:
        raise UsageError(f"the authority expired at {ca.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity))])
    until = min(now + lifetime, ca.not_valid_after_utc)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if serves:
        alternatives += [_general(name) for name in (server_name(identity.job), *names)]
    builder = (
        _builder(subject, ca.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_key_identifier(ca, ca_key.public_key()), critical=False)
    )
    return KeyPair(_pem(builder.sign(ca_key, hashes.SHA256())), _key_pem(key))


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def is_issued_by(chain: bytes, roots: bytes) -> bool:
    """Whether one of `roots` has issued the last certificate of `chain`, both PEM texts."""
    last = x509.load_pem_x509_certificates(chain)[-1]
    for root in x509.load_pem_x509_certificates(roots):
        with suppress(ValueError, TypeError, InvalidSignature):
            last.verify_directly_issued_by(root)
            return True
    return False


def trusts_itself(certificate: bytes) -> bool:
    """Whether the first certificate of a PEM text is a root, its own issuer.

    Raises:
        UsageError: it is not a certificate.
    """
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise UsageError(f"the authority cannot be read: {error}") from error
    return parsed.issuer == parsed.subject


def identity_of(certificate: bytes) -> Identity | None:
    """The identity in the first certificate of a PEM text; None if it holds none.

    Raises:
        ValueError: it is not a certificate.
    """
    return from_names(uris_of(certificate))


def uris_of(certificate: bytes) -> list[str]:
    """The subject alternative names of type URI, and of no other, in the first certificate of a PEM text.

    Raises:
        ValueError: it is not a certificate.
    """
    parsed = x509.load_pem_x509_certificate(certificate)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def validity_of(certificate: bytes) -> tuple[datetime, datetime]:
    """From when to when the first certificate of a PEM text is valid.

    Raises:
        ValueError: it is not a certificate.
    """
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc, parsed.not_valid_after_utc


def _derived(seed: bytes, job: str) -> ec.EllipticCurvePrivateKey:
    """A key on P-256 from 48 bytes: its distribution is uniform up to 2^-128 (FIPS 186-5, A.2.1)."""
    information = b"elastic-ps authority " + job.encode()
    material = HKDF(hashes.SHA256(), length=48, salt=None, info=information).derive(seed)
    return ec.derive_private_key(int.from_bytes(material, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(until)
    )


def _key_identifier(
    ca: x509.Certificate, key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey
) -> x509.AuthorityKeyIdentifier:
    """The authority's identifier of its key. It need not be a SHA-1 hash; Go uses another one."""
    try:
        own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
