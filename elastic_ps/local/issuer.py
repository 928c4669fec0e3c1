"""The certificates of one run on this machine: an authority in memory, and a directory for each process.

The authority is created for the run, and its key is never written. So certificates of earlier runs or other
jobs are invalid.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from elastic_ps.contract.certificates import issue, make_authority
from elastic_ps.contract.env import IDENTITIES, Role
from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Identity

LIFETIME = timedelta(days=3650)
"""Longer than any run, since nobody renews certificates, and they are deleted with the run."""


class Issuer:
    """Issues certificates for the processes of one run. For one thread only.

    Args:
        run: a unique name of the run, see `Identity.job`.
        directory: the parent of the processes' directories, created on demand for this user only.
    """

    def __init__(self, run: str, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._issued: set[Identity] = set()
        self.authority = make_authority(run, now=datetime.now(UTC), lifetime=LIFETIME)

    def own(self) -> Path:
        """The directory of the launcher's own certificate. Raises OSError if it cannot be written."""
        return self._written(Identity(self._run, "operator"))

    def of(self, role: Role, index: int) -> Path:
        """The directory of a process's certificate. Raises OSError if it cannot be written."""
        return self._written(Identity(self._run, IDENTITIES[role], index))

    def _written(self, identity: Identity) -> Path:
        """The same directory for the process that takes the place of another one."""
        directory = self._directory / f"{identity.role}-{identity.index}"
        if identity not in self._issued or not (directory / KEY_FILE).exists():
            made = issue(self.authority, identity, now=datetime.now(UTC), lifetime=LIFETIME)
            files = {
                CA_FILE: self.authority.certificate,
                CERTIFICATE_FILE: made.certificate,
                KEY_FILE: made.key,
            }
            write(directory, files)
            self._issued.add(identity)
        return directory


def read(directory: Path) -> dict[str, bytes]:
    """The files of a process, to write on another host."""
    return {name: (directory / name).read_bytes() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)}


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files that only this user can read, in order. Raises OSError.

    Existing files stay: two hosts may share the directory.
    """
    if all((directory / name).is_file() and (directory / name).read_bytes() == files[name] for name in files):
        return
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.chmod(0o700)
    for name, content in files.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # of a file that was there before, too
            file.write(content)
