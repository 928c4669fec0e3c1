"""What certificates of a job say, and what an authority refuses to issue."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic_ps.contract.certificates import SKEW, KeyPair, identity_of, issue, make_authority, validity_of
from elastic_ps.contract.identity import Identity, from_names, server_name
from elastic_ps.errors import UsageError

JOB = "7d1f0c2e-9f3b-4a52-8a0c-2f1d4a5e6b7c"
NOW = datetime(2026, 5, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
AUTHORITY = make_authority(JOB, now=NOW, lifetime=10 * HOUR)


def root_of(
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    *,
    until: datetime,
    password: bytes = b"",
    identifier: bytes = b"",
) -> KeyPair:
    """A root as a platform's issuer makes it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - timedelta(days=3650))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    if identifier:
        builder = builder.add_extension(x509.SubjectKeyIdentifier(identifier), critical=False)
    made = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
    )
    return KeyPair(made.public_bytes(serialization.Encoding.PEM), text)


@pytest.mark.parametrize(
    "identity", [Identity(JOB, "worker", 12), Identity("a", "operator"), Identity(JOB, "standby", 3)]
)
def test_a_certificate_says_whose_it_is(identity: Identity) -> None:
    made = issue(AUTHORITY, identity, now=NOW, lifetime=HOUR)
    assert identity_of(made.certificate) == identity
    assert validity_of(made.certificate) == (NOW - SKEW, NOW + HOUR)
    ca = x509.load_pem_x509_certificate(AUTHORITY.certificate)
    x509.load_pem_x509_certificate(made.certificate).verify_directly_issued_by(ca)


def test_only_servers_have_names_and_may_serve() -> None:
    names = ["job-ps-0.ns.svc", "10.0.0.7", "[::1]"]
    server = issue(AUTHORITY, Identity(JOB, "server"), now=NOW, lifetime=HOUR, names=names)
    worker = issue(AUTHORITY, Identity(JOB, "worker"), now=NOW, lifetime=HOUR)
    found = []
    for made in (server, worker):
        extensions = x509.load_pem_x509_certificate(made.certificate).extensions
        san = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert ExtendedKeyUsageOID.CLIENT_AUTH in usages
        addresses = san.get_values_for_type(x509.IPAddress)
        serves = ExtendedKeyUsageOID.SERVER_AUTH in usages
        found.append((san.get_values_for_type(x509.DNSName), addresses, serves))
    here = [ipaddress.ip_address("10.0.0.7"), ipaddress.ip_address("::1")]
    assert found == [([server_name(JOB), names[0]], here, True), ([], [], False)]
    with pytest.raises(UsageError, match="is not a server"):
        issue(AUTHORITY, Identity(JOB, "worker"), now=NOW, lifetime=HOUR, names=names)


def test_nothing_outlives_its_authority() -> None:
    made = issue(AUTHORITY, Identity(JOB, "worker"), now=NOW, lifetime=100 * HOUR)
    assert validity_of(made.certificate)[1] == NOW + 10 * HOUR
    for late in (10 * HOUR, 12 * HOUR):
        with pytest.raises(UsageError, match="the authority expired at 2026-05-01T10:00:00Z"):
            issue(AUTHORITY, Identity(JOB, "worker"), now=NOW + late, lifetime=HOUR)


def test_an_authority_that_is_none() -> None:
    other = make_authority(JOB, now=NOW, lifetime=HOUR)
    for certificate, key in ((AUTHORITY.certificate, other.key), (b"text", other.key)):
        wrong = type(other)(certificate, key)
        with pytest.raises(UsageError, match="authority"):
            issue(wrong, Identity(JOB, "worker"), now=NOW, lifetime=HOUR)


def test_the_key_of_an_authority_may_be_of_another_kind() -> None:
    until = NOW + 10 * HOUR
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        root = root_of(key, until=until)
        made = issue(root, Identity(JOB, "server"), now=NOW, lifetime=HOUR)
        ca = x509.load_pem_x509_certificate(root.certificate)
        x509.load_pem_x509_certificate(made.certificate).verify_directly_issued_by(ca)
    for authority, words in (
        (root_of(ed25519.Ed25519PrivateKey.generate(), until=until), "expected ECDSA or RSA"),
        (root_of(ec.generate_private_key(ec.SECP256R1()), until=until, password=b"x"), "cannot be read"),
    ):
        with pytest.raises(UsageError, match=words):
            issue(authority, Identity(JOB, "server"), now=NOW, lifetime=HOUR)


@pytest.mark.parametrize("identifier", [b"", b"a hash of Go's"])
def test_a_certificate_names_its_authoritys_key_as_the_authority_does(identifier: bytes) -> None:
    """OpenSSL finds no way to the root otherwise."""
    key = ec.generate_private_key(ec.SECP256R1())
    root = root_of(key, until=NOW + 10 * HOUR, identifier=identifier)
    made = issue(root, Identity(JOB, "server"), now=NOW, lifetime=HOUR)
    extensions = x509.load_pem_x509_certificate(made.certificate).extensions
    named = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    usual = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest
    assert named.key_identifier == (identifier or usual)


def test_a_key_is_not_printed() -> None:
    assert "KEY" not in f"{AUTHORITY} {AUTHORITY!r}"


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://example.org"],
        [f"elastic-ps://{JOB}/worker"],
        [f"elastic-ps://{JOB}/worker/1/2"],
        [f"elastic-ps://{JOB}/worker/-1"],
        [f"elastic-ps://{JOB}/worker/01"],
        [f"elastic-ps://{JOB}/worker/*"],
        [f"elastic-ps://{JOB}/root/1"],
        ["elastic-ps://A_b/worker/1"],
        ["elastic-ps:///worker/1"],
        [f"elastic-ps://{JOB}/worker/1", f"elastic-ps://{JOB}/worker/2"],
    ],
)
def test_names_that_are_no_identity(uris: list[str]) -> None:
    assert from_names(uris) is None


@pytest.mark.parametrize("identity", [("UPPER", 0), ("", 0), ("a" * 64, 0), ("a.b", 0), ("a", -1)])
def test_identities_that_no_certificate_can_hold(identity: tuple[str, int]) -> None:
    with pytest.raises(UsageError, match="is not a valid identity"):
        Identity(identity[0], "worker", identity[1])
