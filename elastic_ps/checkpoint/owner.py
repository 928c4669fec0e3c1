"""The owner of a checkpoint directory: one job at a time.

`job.json` names the job and its run. As long as the run's parameter server lives, it holds the lock of
`job.lock`. Several parameter servers of one run may meet here, if one is taken for dead and replaced: terms,
not this lock, decide which one may write. This module does not import torch, so that a directory can be
checked before anything is started.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from elastic_ps.checkpoint import files
from elastic_ps.errors import CheckpointCorrupt, InvalidJob, StorageUnavailable

LIMIT = 1 << 16
"""The largest `job.json`, in bytes."""


@dataclass(frozen=True)
class Owner:
    """A run of a job, and its last process in the directory.

    Attributes:
        run: a unique name of the run; "" if its starter gives it none.
    """

    job: str
    run: str
    pid: int
    host: str

    def __str__(self) -> str:
        return f"job {self.job!r} (parameter server pid {self.pid} on {self.host})"


def in_use(directory: Path) -> bool:
    """Whether a parameter server holds a directory; also True if that is unknown."""
    try:
        return _is_held(directory)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def running(directory: Path) -> Owner | None:
    """The owner of a directory, if its parameter server lives; also None if that is unknown."""
    try:
        held = _is_held(directory)
    except OSError:
        return None
    return _read(directory / "job.json") if held else None


def _is_held(directory: Path) -> bool:
    """Raises OSError."""
    lock = files.try_lock(directory / "job.lock", create=False)
    if lock is not None:
        files.unlock(lock)
    return lock is None


def used_by(owner: Owner, directory: Path, *, adopt: bool = False) -> InvalidJob:
    """The exception for a job that needs a directory whose owner is `running`, with `adopt` to continue."""
    wait = "To continue from its checkpoints, wait until it has ended. Otherwise name another directory"
    return InvalidJob(f"{directory} belongs to {owner}, which is running. {wait if adopt else WAY_OUT}")


class Claim:
    """A run's claim to a directory. Not thread-safe, except that `hold` may be called from any one thread."""

    def __init__(self, directory: Path, job: str, run: str) -> None:
        self._directory = directory
        self._owner = Owner(job, run, os.getpid(), socket.gethostname())
        self._lock: TextIO | None = None

    def take(self, *, adopt: bool, wait: bool, make_room: Callable[[], object]) -> None:
        """Make the run the owner of the directory; the lock of `Store` is held.

        Args:
            adopt: also take the directory of another job that has ended.
            wait: an earlier run of the same job is about to end.
            make_room: deletes the remains of interrupted writes of earlier runs, which may fill the disk.

        Raises:
            InvalidJob: it belongs to another job, or to another run that goes on.
            StorageUnavailable: an earlier run of the job has not ended yet; try again.
            OSError: it cannot be read or written.
        """
        before = _read(self._directory / "job.json")
        self.hold()
        ours = before is None or (before.job, before.run) == (self._owner.job, self._owner.run)
        if not ours:
            assert before is not None
            try:
                self._require_free(before, adopt=adopt, wait=wait)
            except BaseException:
                self.close()
                raise
        try:
            self._write()
        except OSError:
            make_room()
            self._write()

    def _write(self) -> None:
        files.write_text(self._directory / "job.json", json.dumps(asdict(self._owner)) + "\n")

    def _require_free(self, before: Owner, *, adopt: bool, wait: bool) -> None:
        """Raise if another job has the directory, or had it and this job does not continue from it."""
        same = before.job == self._owner.job
        if self._lock is None and same and wait:
            raise StorageUnavailable(f"{self._directory} is still used by an earlier run of {before}")
        if self._lock is None:
            raise used_by(before, self._directory, adopt=adopt and not same)
        if not same and not adopt:
            raise InvalidJob(
                f"{self._directory} holds the checkpoints of {before}, which has ended. {WAY_OUT}, or delete "
                f"{self._directory / 'job.json'} to let this job continue from them"
            )

    def hold(self) -> None:
        """Take the lock if it is free: a parameter server that was taken for dead may still hold it."""
        if self._lock is None:
            self._lock = files.try_lock(self._directory / "job.lock")

    def close(self) -> None:
        """Release the lock; the job still owns the directory."""
        if self._lock is not None:
            files.unlock(self._lock)
            self._lock = None


WAY_OUT = "Each job needs a checkpoint directory of its own: name another one"


def _read(path: Path) -> Owner | None:
    """Read the owner; None if there is none, or it is unreadable. Raises StorageUnavailable."""
    try:
        text = files.read_text_if_any(path, limit=LIMIT)
        if text is None:
            return None
        data = json.loads(text)
        return Owner(str(data["job"]), str(data["run"]), int(data["pid"]), str(data["host"]))
    except (CheckpointCorrupt, ValueError, KeyError, TypeError, RecursionError):
        return None
