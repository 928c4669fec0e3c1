"""Directories of certificates for tests, as the launcher and the operator make them."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from elastic_ps.contract.certificates import SKEW, KeyPair, issue, make_authority
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity, Role
from elastic_ps.transport.credentials import Credentials

JOB = "job-1"
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
"""Longer than a night of tests, which share certificates."""


def authority(job: str = JOB) -> KeyPair:
    """A new one."""
    return make_authority(job, now=datetime.now(UTC), lifetime=DAY)


def write(
    directory: Path,
    ca: KeyPair,
    role: Role,
    index: int = 0,
    *,
    job: str = JOB,
    lifetime: timedelta = DAY,
    trusts: Sequence[KeyPair] = (),
) -> Path:
    """A certificate in `directory`, which is returned; what was there is replaced in one step, as in a pod.

    Args:
        lifetime: negative: it has ended so long ago.
        trusts: the authorities of `ca.crt`; default: `ca`.
    """
    now = datetime.now(UTC)
    began = now if lifetime > -SKEW else now - HOUR
    made = issue(ca, Identity(job, role, index), now=began, lifetime=now + lifetime - began)
    directory.mkdir(exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=directory, prefix="data-"))
    content = {
        CA_FILE: b"".join(each.certificate for each in trusts or (ca,)),
        CERTIFICATE_FILE: made.certificate,
        KEY_FILE: made.key,
    }
    for name, text in content.items():
        (fresh / name).write_bytes(text)
    _link(directory / "data", Path(fresh.name))
    for name in content:
        if not (directory / name).is_symlink():
            _link(directory / name, Path("data") / name)
    return directory


def _link(place: Path, target: Path) -> None:
    """A symbolic link, in place of what is there."""
    link = place.with_name(f"{place.name}.new")
    link.symlink_to(target)
    link.replace(place)


@functools.cache
def _root() -> Path:
    return Path(tempfile.mkdtemp(prefix="elastic-ps-test-"))


@functools.cache
def pair() -> tuple[Credentials, Credentials]:
    """A server's and a worker's, which last until `remove_pair`."""
    root, ca = _root(), authority()
    server, worker = write(root / "server", ca, "server"), write(root / "worker", ca, "worker")
    return Credentials(server), Credentials(worker)


def remove_pair() -> None:
    """Delete the files of `pair`, if there are any."""
    if pair.cache_info().currsize:
        shutil.rmtree(_root())
        _root.cache_clear()
        pair.cache_clear()
