"""The certificates of a run: what stands in their place already is not trusted."""

from __future__ import annotations

from pathlib import Path

from elastic_ps.contract.certificates import identity_of
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity
from elastic_ps.local.issuer import Issuer, read
from elastic_ps.transport.credentials import Credentials

FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)


def test_what_an_earlier_run_has_left_is_replaced(tmp_path: Path) -> None:
    """It could not be deleted, say."""
    left = Issuer("earlier", tmp_path / "tls").of("worker", 0)
    (tmp_path / "tls").chmod(0o755)
    left.chmod(0o755)
    for name in FILES:
        (left / name).chmod(0o644)
    issuer = Issuer("now", tmp_path / "tls")
    assert issuer.of("worker", 0) == left
    assert Credentials(left).identity == Identity("now", "worker", 0)
    assert [path.stat().st_mode & 0o777 for path in (left.parent, left)] == [0o700] * 2
    assert [(left / name).stat().st_mode & 0o777 for name in FILES] == [0o600] * 3


def test_a_process_that_is_started_again_has_the_same_certificate_unless_it_is_lost(tmp_path: Path) -> None:
    issuer = Issuer("now", tmp_path / "tls")
    directory = issuer.of("ps", 1)
    first = read(directory)
    assert read(issuer.of("ps", 1)) == first
    (directory / KEY_FILE).unlink()
    again = read(issuer.of("ps", 1))
    assert again[CA_FILE] == first[CA_FILE]
    assert identity_of(again[CERTIFICATE_FILE]) == Identity("now", "server", 1)
    assert Credentials(directory).identity == Identity("now", "server", 1)
