"""A small separate disk for the checkpoints, which can be filled without other harm."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ps.checkpoint import files

SIZE = 64 * 1024 * 1024
CHUNK = 1024 * 1024


class NoDisk(Exception):
    """A disk cannot be created here; the message says why."""


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A disk of `SIZE` bytes in memory, mounted at `directory` (Linux, root).

    Raises:
        NoDisk: the process may not mount.
    """
    if os.geteuid() != 0:
        raise NoDisk("only root can mount a small disk")
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "tmpfs", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoDisk(f"cannot run mount: {error.strerror}") from error
    if done.returncode:
        raise NoDisk(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], capture_output=True, check=False)


def fill(filler: Path) -> None:
    """Write a file until the disk is full. Removing it makes room again."""
    with filler.open("ab", buffering=0) as file:
        size = CHUNK
        while size:
            try:
                file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def locked(checkpoints: Path) -> bool:
    """Whether a parameter server is completing a checkpoint or beginning a term in this directory."""
    lock = files.try_lock(checkpoints / "lock")
    if lock is not None:
        files.unlock(lock)
    return lock is None


def flip(file: Path, place: float) -> int:
    """Change one byte, at `place` (0 to 1) of the file; returns its position."""
    with file.open("r+b") as opened:
        position = min(int(file.stat().st_size * place), file.stat().st_size - 1)
        opened.seek(position)
        before = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([before ^ 0x40]))
        opened.flush()
        os.fsync(opened.fileno())
    return position
