"""The state of this machine's jobs on disk, for other terminals.

Each job has a directory below `env.state_directory()`::

    <job>/lock         held by the job's launcher while it lives; contains its pid
    <job>/job.json     the wanted job; `elastic-ps scale` and `set` edit it, and the launcher notices
    <job>/tuning.json  its changeable fields for the parameter server, written by the launcher
    <job>/status.json  the state, written by the launcher about twice a second
    <job>/tls/         a directory for each process of the run: its certificate and key (`local.issuer`)
    <job>/logs/        ps-0.log, worker-0.log, ...: the output of the processes, across restarts
    <job>/checkpoints/ one directory for each run, unless the job names a path; `script` in it is the script
    <job>/drill/       the histories of the last drill, unless it has passed

The lock is the kernel's (flock), so it is released however the launcher ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from elastic_ps.api.job import ObjectMeta, TrainingJob, parse_job
from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.status import Phase, ServerStatus
from elastic_ps.checkpoint import files, owner
from elastic_ps.contract.env import Role, state_directory
from elastic_ps.errors import UserError
from elastic_ps.process import lifecycle

KEEP_RUNS = 3
"""The number of runs whose checkpoints stay in the job's directory."""


class _Model(BaseModel):
    model_config = ConfigDict(populate_by_name=True, alias_generator=to_camel)


class ProcessStatus(_Model):
    """The last process of a job with this role and index."""

    role: Role
    index: int
    pid: int
    start_time: int | None = Field(default=None, description="Clock ticks since boot; with pid, unique.")
    state: str = Field(description="starting, running, leaving or ended")
    exit: int | None = Field(default=None, description="Exit status; negative: the signal.")
    restarts: int = 0


class LocalStatus(_Model):
    """The content of `status.json`."""

    job: str
    phase: Phase = "Pending"
    reason: str = ""
    message: str = ""
    launcher_pid: int
    launcher_start_time: int | None = None
    started: float = Field(description="Seconds since 1970.")
    updated: float = Field(description="Seconds since 1970.")
    elapsed: float = Field(default=0.0, description="Seconds since the start.")
    shards: int = 1
    workers: int = Field(description="How many workers are wanted.")
    failures: int = Field(default=0, description="Failures that count against backoffLimit.")
    addresses: list[str] = Field(default_factory=list)
    http: list[str] = Field(default_factory=list, description="Where each parameter server answers /status.")
    checkpoints: str = ""
    processes: list[ProcessStatus] = Field(default_factory=list)
    server: ServerStatus | None = Field(default=None, description="The last report of shard 0.")

    @property
    def goes_on(self) -> bool:
        """Whether the job has begun and not ended, by its launcher's last report."""
        return self.phase in ("Pending", "Running")


class JobDirectory:
    """The directory of one job on this machine.

    Args:
        script: the full path of the script that the job is made from. Scripts of several directories may
            have one name, and each keeps its own runs.
    """

    def __init__(self, job: str, *, root: Path | None = None, script: str = "") -> None:
        self.job, self._script = job, script
        self.path = (root or state_directory()) / job
        self.logs = self.path / "logs"
        self.tls = self.path / "tls"
        self._job_file = self.path / "job.json"
        self._status_file = self.path / "status.json"
        self._lock_file = self.path / "lock"

    def log(self, role: Role, index: int) -> Path:
        return self.logs / f"{role}-{index}.log"

    def launcher(self) -> int | None:
        """The pid of the launcher that runs this job now, or None if it does not run."""
        try:
            with self._lock_file.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read() or 0)
                files.unlock(file)
        except FileNotFoundError:
            pass
        return None

    def refuse_if_running(self) -> None:
        """Raise UserError if the job runs now."""
        if self.launcher() is not None:
            raise self._runs_already()

    def claim(self) -> TextIO:
        """Take the lock, and remove the remains of an earlier launcher. `files.unlock` releases it.

        Raises:
            UserError: the job runs already, or its directory cannot be written.
        """
        with self.kept(), contextlib.ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)  # arguments and logs are private
            lock = stack.enter_context(self._lock_file.open("a+"))
            if not _take(lock):
                raise self._runs_already()
            self._end_leftovers()
            self._remove_old()
            self.sign(lock)
            stack.pop_all()
        return lock

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Turn errors of reading or writing the directory in the block into UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot keep the state of job {self.job!r} in {self.path}: {error.strerror or error}. "
                "Set XDG_STATE_HOME to a directory that can be written"
            ) from error

    def sign(self, lock: TextIO) -> None:
        """Write this process's pid into the lock, after taking it or after a fork."""
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    def new_checkpoints(self) -> Path:
        """A new directory for the checkpoints of a run."""
        number = 1 + max((int(path.name[4:]) for path in self._runs()), default=0)
        fresh = self._checkpoints / f"run-{number}"
        fresh.mkdir(parents=True)
        self.take_run(fresh)
        return fresh

    def take_run(self, run: Path) -> None:
        """Note that this job trains in the directory of a run now, which another script may have begun."""
        os.utime(run)
        if is_of_run(run):
            write_atomically(run / "script", self._script)

    def remove_old_checkpoints(self) -> Iterator[Path]:
        """Make room for one more run of the script: delete the directories that are unused for the longest.

        Yields each before it is deleted. Runs that have trained nothing are deleted first. A directory in use
        stays; with `--resume` another job may use it.
        """
        ours = (path for path in self._runs() if _script_of(path) == self._script)
        unused = (path for path in ours if not owner.in_use(path))
        runs = sorted(unused, key=lambda path: (bool(newest_checkpoint(path)), _last_written(path)))
        for path in runs[: -KEEP_RUNS + 1]:
            yield path
            shutil.rmtree(path, ignore_errors=True)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _runs(self) -> list[Path]:
        return [path for path in self._checkpoints.glob("run-*") if is_of_run(path)]

    def read_job(self) -> TrainingJob:
        return parse_job(json.loads(self._job_file.read_text(encoding="utf-8")), source=str(self._job_file))

    def write_job(self, job: TrainingJob) -> None:
        document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
        write_atomically(self._job_file, json.dumps(document, indent=2) + "\n")

    def job_stamp(self) -> tuple[int, int]:
        """A stamp that changes with each edit of the wanted state."""
        stat = self._job_file.stat()
        return stat.st_ino, stat.st_mtime_ns

    def scale(self, workers: int) -> int:
        """Change the wanted number of workers; returns the previous one.

        Raises:
            UserError: the number is outside of the job's bounds, or its workers have fixed shares.
        """
        with self._editing():
            job = self.read_job()
            before = job.spec.worker.replicas
            try:
                job.spec.check_replicas(workers)
            except ValueError as error:
                raise UserError(f"cannot scale job {self.job!r}: {error}") from error
            job.spec.worker.replicas = workers
            if workers != before:
                self.write_job(job)
        return before

    def edit(self, change: Callable[[TrainingJob], TrainingJob]) -> tuple[TrainingJob, TrainingJob]:
        """Replace the wanted job; returns the old and the new one. Each change has its own number.

        Args:
            change: makes the new job. If it raises, nothing happens.
        """
        with self._editing():
            before = self.read_job()
            after = change(before)
            if after == before:
                return before, after
            metadata = {**after.metadata.model_dump(), "generation": generation_of(before) + 1}
            after = after.model_copy(update={"metadata": ObjectMeta.model_validate(metadata)})
            self.write_job(after)
        return before, after

    def write_mutable(self, job: TrainingJob) -> Path:
        """Write a job's changeable fields for the parameter server; returns the file."""
        path = self.path / "tuning.json"
        write_atomically(path, MutableFields.of(job.spec, generation=generation_of(job)).to_json() + "\n")
        return path

    def read_status(self) -> LocalStatus | None:
        """The last status; None if the job was never started here.

        If the launcher died without ending the job, its phase is Failed, and dead processes are marked.
        """
        try:
            status = LocalStatus.model_validate_json(self._status_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValidationError):
            return None
        if status.goes_on and self.launcher() is None:
            message = f"the launcher (pid {status.launcher_pid}) is gone"
            if how := how_to_continue(status.checkpoints):
                message += f"; {how}"
            lost = {"phase": "Failed", "reason": "LauncherLost", "message": message}
            return status.model_copy(update={**lost, "processes": list(map(_as_it_is, status.processes))})
        return status

    def write_status(self, status: LocalStatus) -> None:
        write_atomically(self._status_file, status.model_dump_json(by_alias=True, indent=1) + "\n")

    def _runs_already(self) -> UserError:
        return UserError(
            f"job {self.job!r} already runs on this machine (pid {self.launcher()}): "
            f"stop it with `elastic-ps stop {self.job}`, or choose another metadata.name for this one"
        )

    @contextlib.contextmanager
    def _editing(self) -> Iterator[None]:
        with files.locked(self.path / "edit.lock"):
            yield

    def _end_leftovers(self) -> None:
        """Kill processes that a killed launcher may have left, although they end themselves."""
        status = self.read_status()
        for process in status.processes if status else ():
            same = process.start_time is not None and start_time(process.pid) == process.start_time
            if process.exit is None and same:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _remove_old(self) -> None:
        for path in (self._job_file, self._status_file):
            path.unlink(missing_ok=True)
        for path in (self.logs, self.tls, *self.path.glob("trace-*")):
            shutil.rmtree(path, ignore_errors=True)
        self.logs.mkdir(exist_ok=True)  # NFS keeps a log that somebody reads


def generation_of(job: TrainingJob) -> int:
    """The number of edits of the job since its start, counted as in Kubernetes."""
    number = (job.metadata.model_extra or {}).get("generation", 0)
    return number if isinstance(number, int) else 0


def known_jobs() -> list[JobDirectory]:
    """The jobs with a directory on this machine, sorted by name."""
    base = state_directory()
    paths = sorted(base.iterdir()) if base.is_dir() else []
    return [JobDirectory(path.name, root=base) for path in paths if (path / "status.json").is_file()]


def _as_it_is(process: ProcessStatus) -> ProcessStatus:
    """Nobody has seen it end, so its exit status is not known. One on another host has no `start_time`."""
    ended = process.start_time is not None and start_time(process.pid) != process.start_time
    return process.model_copy(update={"state": "ended"}) if ended else process


def is_of_run(checkpoints: Path) -> bool:
    """Whether this directory belongs to one run. A later run may delete such a directory."""
    return checkpoints.parent.name == "checkpoints" and bool(re.fullmatch(r"run-\d+", checkpoints.name))


def _script_of(run: Path) -> str:
    """The script that trained in this directory last; "" if it was none, or is unknown."""
    try:
        return (run / "script").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def newest_checkpoint(directory: Path) -> int | None:
    """The version of the newest complete checkpoint there; None if there is none."""
    whole = directory.glob("version-*/manifest.json")
    numbers = (manifest.parent.name.removeprefix("version-") for manifest in whole)
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def how_to_continue(checkpoints: str) -> str:
    """How to continue from this directory; "" if it has no complete checkpoint."""
    if not checkpoints or newest_checkpoint(Path(checkpoints)) is None:
        return ""
    return (
        f"to continue from the last checkpoint, start the job again with --resume {shlex.quote(checkpoints)}"
    )


def being_written(directory: Path) -> tuple[int, int] | None:
    """The version of the newest checkpoint that is being written there, and its bytes so far."""
    found = [(path, path.name.split("-")) for path in directory.glob("partial-*-*-*")]
    numbered = [([*map(int, parts[1:])], path) for path, parts in found if "".join(parts[1:]).isdecimal()]
    if not numbered:
        return None
    (_, _, version), path = max(numbered)
    with contextlib.suppress(OSError):  # it may be completed at this moment
        return version, sum(file.stat().st_size for file in path.iterdir())
    return None


def start_time(pid: int) -> int | None:
    """The start of a process, in clock ticks since boot; None if it is gone or unreadable."""
    try:
        said = lifecycle.stat(pid)
    except OSError:
        return None
    return None if said[0] in ("Z", "X") else int(said[19])


def _last_written(run: Path) -> float:
    """The time of the last checkpoint, or of the beginning of a run there, in seconds since 1970."""
    times = [0.0]
    for path in (run, *run.glob("version-*")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) keeps a process of this host from running."""
    try:
        return lifecycle.stat(pid)[0] == "T"
    except OSError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically, so that a reader sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text.encode())  # whatever the locale is
    temporary.replace(path)


def _take(lock: TextIO) -> bool:
    """Take the lock. Retry for a while, since `launcher()` holds it for a moment."""
    deadline = time.monotonic() + 0.5
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
