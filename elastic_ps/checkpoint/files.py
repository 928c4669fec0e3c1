"""Files in a directory that others can write to: links are not followed, sizes are not trusted.

A file in a checkpoint directory may be damaged, or come from somebody else. So a file is opened without
following a symbolic link, must be a regular file, and is read no further than its size; a new file gets an
unused name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from elastic_ps.errors import CheckpointCorrupt, CheckpointError, StorageUnavailable

NEVER = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""Errors that are permanent. Others (EIO, EACCES, ENOSPC) may pass. Without locks, flock raises ENOSYS."""

WRONG = NEVER | {errno.ENOENT, errno.ENXIO}
"""Permanent errors of a file that has to exist."""


_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The flags. Without O_NONBLOCK, opening a pipe would wait for a writer."""


def failure(error: OSError, text: str) -> CheckpointError:
    """The exception for a failure, whose type tells whether to try again."""
    return (CheckpointError if error.errno in NEVER else StorageUnavailable)(f"{text}: {error}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading `path`: StorageUnavailable if they may pass, else CheckpointCorrupt."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG:
            raise StorageUnavailable(f"{path} cannot be read at the moment: {error}") from error
        link = " (it is a symbolic link, which is not followed)" if path.is_symlink() else ""
        raise CheckpointCorrupt(f"{path} cannot be read: {error}{link}") from error


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file, unbuffered. Raises CheckpointCorrupt if it is something else; see `reading`."""
    with reading(path):
        file = open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, _TO_READ))  # noqa: SIM115
        try:
            _require_ordinary(path, os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        return file


def _require_ordinary(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointCorrupt(f"{path} is not a regular file")


def read_text(path: Path, *, limit: int) -> str:
    """A small file's text. Raises CheckpointCorrupt if it has more than `limit` bytes or is not UTF-8."""
    with reading(path):
        return _text_of(path, limit)


def read_text_if_any(path: Path, *, limit: int) -> str | None:
    """Like `read_text`; None if the file does not exist."""
    with reading(path):
        try:
            return _text_of(path, limit)
        except FileNotFoundError:
            return None


class Looked:
    """A small file that is read often, also while no file descriptor is left if it is unchanged."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self._path, self._limit = path, limit
        self._seen: tuple[tuple[int, ...], str] | None = None

    def text(self) -> str | None:
        """Like `read_text_if_any`."""
        found = None
        try:
            with reading(self._path), suppress(FileNotFoundError):
                found = _read(self._path, self._limit)
        except StorageUnavailable as error:
            cause, found = error.__cause__, self._seen
            exhausted = isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
            if not exhausted or found is None or found[0] != _version_at(self._path):
                raise
        self._seen = found
        return None if found is None else found[1]


def _version_at(path: Path) -> tuple[int, ...]:
    try:
        return _version_of(path.lstat())
    except OSError:
        return ()


def _version_of(found: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and times of a file; a write or a replacement changes them."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _text_of(path: Path, limit: int) -> str:
    return _read(path, limit)[1]


def _read(path: Path, limit: int) -> tuple[tuple[int, ...], str]:
    """A file's version and text.

    Without Python's slow file objects: a parameter server reads a small file for each version.
    """
    fd = os.open(path, _TO_READ)
    try:
        found = os.fstat(fd)
        _require_ordinary(path, found)
        if found.st_size > limit:
            raise CheckpointCorrupt(f"{path} has {found.st_size} bytes; expected at most {limit}")
        piece = min(
            found.st_size + 1, 1 << 20
        )  # memory is allocated for all of it, however short the file is
        data = b"".join(iter(lambda: os.read(fd, piece), b""))
    finally:
        os.close(fd)
    try:
        return _version_of(found), data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{path} is not in UTF-8: {error}") from error


def create(path: Path) -> BinaryIO:
    """Open a new file to write. An existing one is deleted, never written to. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))


def write_text(path: Path, text: str) -> None:
    """Write and flush a small file atomically. Raises OSError."""
    temporary = path.with_suffix(".partial")
    with create(temporary) as file:
        file.write(text.encode())
    flush(temporary)
    temporary.rename(path)
    flush(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory in a trusted one if it is missing. Raises OSError, also for a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not is_directory(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def is_directory(path: Path) -> bool:
    """Whether there is a directory, and not a link to one. Raises OSError if that is unknown."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Delete a directory with its content, a file or a link, as far as possible."""
    try:
        if is_directory(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        pass


def begin_to_flush(file: BinaryIO, start: int, end: int) -> None:
    """Have the disk begin to write these bytes of a new file, so that `flush` waits for less later."""
    file.flush()
    if hasattr(
        os, "posix_fadvise"
    ):  # Linux begins to write what is not needed any more, and keeps it until then
        os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def flush(path: Path) -> None:
    """Flush a file or directory to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if missing. Blocks until nobody else holds it."""
    file = _to_lock(path, create=True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        unlock(file)


def unlock(file: TextIO) -> None:
    """Release a lock. Closing the file is not enough: a later fork may have it open."""
    with file:
        fcntl.flock(file, fcntl.LOCK_UN)


def try_lock(path: Path, *, create: bool = True) -> TextIO | None:
    """Take the lock of a file, until `unlock`; None if somebody else holds it. Raises OSError."""
    file = _to_lock(path, create=create)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


def _to_lock(path: Path, *, create: bool) -> TextIO:
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    return open(path, "a", opener=lambda name, _: os.open(name, flags, 0o666))
