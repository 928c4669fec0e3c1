"""Checks before anything is started or written, so that bad input costs nothing."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from elastic_ps.api.job import TrainingJob
from elastic_ps.checkpoint.owner import running
from elastic_ps.contract import exits
from elastic_ps.contract.deaths import describe_exit
from elastic_ps.contract.env import inherited
from elastic_ps.contract.schemes import Scheme
from elastic_ps.errors import StorageUnavailable, UserError
from elastic_ps.local.forks import ForkServer
from elastic_ps.local.plan import ScaleAt
from elastic_ps.local.processes import Programs
from elastic_ps.local.state import newest_checkpoint

CHECK_TIMEOUT = timedelta(minutes=2)

LOOK = 0.01
"""The seconds between two looks for the end of the check."""


def check_workers(job: TrainingJob, schedule: Sequence[ScaleAt]) -> None:
    """Raise UserError if a number of workers is out of the job's bounds."""
    for what, workers in [
        ("--workers", job.spec.worker.replicas),
        *((f"--scale {at.version}:{at.workers}", at.workers) for at in schedule),
    ]:
        try:
            job.spec.check_replicas(workers)
        except ValueError as error:
            raise UserError(f"{what}: {error}") from error
    versions = [at.version for at in schedule]
    for version in versions:
        if versions.count(version) > 1:
            raise UserError(
                f"--scale names version {version} twice; give one number of workers for each version"
            )


def check_transport(job: TrainingJob, transport: Scheme | None, *, ranks: bool) -> None:
    """Raise UserError if the processes cannot use the requested transport.

    Args:
        ranks: whether other ranks of an `mpirun` start the workers.
    """
    if transport != "mpi":
        return
    if not ranks:
        raise UserError(
            "--transport mpi needs other ranks, which relay the calls. Start the job with mpirun and at "
            "least two ranks, as in `mpirun -n 2 elastic-ps run ...`, or choose another transport"
        )
    if job.spec.all_reduce:
        raise UserError(
            "--transport mpi: with strategy all-reduce, workers add up gradients among themselves, which MPI "
            "does not carry here. Choose the strategy parameter-server, or leave --transport out"
        )


def check_checkpoints(job: TrainingJob, resume: Path | None) -> None:
    """Raise UserError if the directory of checkpoints does not fit the request."""
    if resume is not None:
        if not resume.exists():
            raise UserError(f"--resume {resume}: there is no such directory")
        if not resume.is_dir():
            raise UserError(f"--resume {resume}: this is a file; expected a job's directory of checkpoints")
        if newest_checkpoint(resume) is None:
            text = "it has no complete checkpoint (a directory version-* with a manifest.json)"
            if (resume / "manifest.json").is_file():
                text = f"this is one checkpoint; name the directory of all, {resume.resolve().parent}"
            raise UserError(f"--resume {resume}: {text}")
        prepare_directory(resume, option="--resume")
        _refuse_running(resume, option="--resume")
        return
    path = job.spec.parameter_server.checkpoint.path
    if path is not None:
        prepare_directory(Path(path), option="spec.parameterServer.checkpoint.path")
        _refuse_running(Path(path), option="spec.parameterServer.checkpoint.path")
    if path is not None and any(Path(path).glob("version-*")):
        raise UserError(
            f"the directory {path} (spec.parameterServer.checkpoint.path) holds checkpoints already: "
            f"continue from them with --resume {shlex.quote(path)}, or name an empty directory, or remove "
            "them"
        )


def _refuse_running(path: Path, *, option: str) -> None:
    """Raise UserError if another job writes its checkpoints there."""
    try:
        owner = running(path)
    except StorageUnavailable as error:
        raise UserError(f"{option} {path}: {error}") from error
    if owner is not None:
        raise UserError(
            f"{option} {path} belongs to {owner}, which is running; stop it first, or name another directory"
        )


def check_report(report: Path | None) -> None:
    """Raise UserError if the report's picture cannot be drawn."""
    if report is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--report needs matplotlib, which is not installed: pip install 'elastic-ps[report]'")


def prepare_directory(path: Path, *, option: str) -> None:
    """Create a directory, and try to write to it.

    Raises:
        UserError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{option}: cannot write into {path}: {reason}") from error


def prepare_file(path: Path, *, option: str) -> None:
    """Like `prepare_directory`, for a file. An existing one is not changed."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; give the name of a file")
    prepare_directory(path.parent, option=option)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write {path}: permission denied")


def check_entrypoint(job: TrainingJob, programs: Programs, forks: ForkServer | None = None) -> None:
    """Import the entrypoint and the codecs in a process like a worker's. Blocks for as long as that takes.

    Args:
        forks: starts that process if possible.

    Raises:
        UserError: one cannot be imported (with the script's traceback), or does not take its arguments.
    """
    entrypoint = job.spec.entrypoint
    argv = programs.check(job.spec)
    try:
        done = (_run_forked(argv, forks) if forks is not None else None) or subprocess.run(
            argv,
            env=inherited(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_TIMEOUT.total_seconds(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        minutes = CHECK_TIMEOUT.total_seconds() / 60
        raise UserError(
            f"importing the entrypoint {entrypoint} takes more than {minutes:g} min. Move what its module "
            "does on import into the function"
        ) from error
    if done.returncode == exits.INVALID:
        raise UserError(
            done.stderr.strip().removeprefix("error: ") or f"the entrypoint {entrypoint} cannot be used"
        )
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()
        how = f" ({describe_exit(done.returncode)})" if done.returncode != 1 else ""
        raise UserError(f"the entrypoint {entrypoint} cannot be imported{how}:\n{output}")


def _run_forked(argv: Sequence[str], forks: ForkServer) -> subprocess.CompletedProcess[str] | None:
    """Like `subprocess.run`; None if the fork server cannot start the process. Raises TimeoutExpired."""
    # In memory: the disk may be full.
    with os.fdopen(os.memfd_create("out"), "w+b") as out, os.fdopen(os.memfd_create("err"), "w+b") as err:
        descriptors = {out.fileno(): (1,), err.fileno(): (2,)}
        pid = forks.start(argv, variables=inherited(), descriptors=descriptors, name="check")
        if pid is None:
            return None
        deadline = time.monotonic() + CHECK_TIMEOUT.total_seconds()
        try:
            while (status := forks.status(pid)) is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(argv, CHECK_TIMEOUT.total_seconds())
                time.sleep(LOOK)
        except BaseException:
            forks.signal(pid, signal.SIGKILL, group=True)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(argv, status, *texts)
