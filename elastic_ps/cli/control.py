"""The commands that inspect or change a job from another terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import get_args

from elastic_ps.api.job import load_job
from elastic_ps.cli.tail import Tail
from elastic_ps.contract.env import Role
from elastic_ps.contract.words import amount
from elastic_ps.errors import ElasticPSError, UserError
from elastic_ps.local import script
from elastic_ps.local.state import JobDirectory, LocalStatus, how_to_continue, known_jobs, start_time

STOP_LIMIT = timedelta(seconds=200)
"""Longer than what workers and then parameter servers may take to end (`local.plan.Desired`)."""
AGAIN = "A second `elastic-ps stop` kills all of its processes"


def status(parsed: argparse.Namespace) -> int:
    """Show one job, or list all."""
    if parsed.job is not None:
        found = status_of(directory_of(parsed.job))
        if parsed.json:
            print(found.model_dump_json(by_alias=True, indent=2))
        else:
            _show(found)
        return 0
    states = [state for state in (directory.read_status() for directory in known_jobs()) if state]
    if parsed.json:
        print(json.dumps([state.model_dump(mode="json", by_alias=True) for state in states], indent=2))
    elif states:
        _list(states)
    else:
        print("no job has run on this machine yet; start one with `elastic-ps run JOB`")
    return 0


def scale(parsed: argparse.Namespace) -> int:
    """Change the number of workers of a running job."""
    directory = directory_of(parsed.job)
    status_of(directory)
    if directory.launcher() is None:
        raise UserError(f"job {directory.job!r} is not running; start it with `elastic-ps run`")
    before = directory.scale(parsed.workers)
    if before == parsed.workers:
        print(f"{directory.job} has {amount(before, 'worker')} already")
    else:
        print(f"{directory.job}: from {before} to {parsed.workers} workers")
    return 0


def stop(parsed: argparse.Namespace) -> int:
    """Stop a job, and wait until all of its processes have ended."""
    directory = directory_of(parsed.job)
    found = status_of(directory)
    launcher = directory.launcher()
    if launcher is None:
        print(f"{directory.job} is not running")
        return 0
    if found.launcher_pid == launcher and found.launcher_start_time != start_time(launcher):
        raise UserError(
            f"{directory.job} runs, but not here: its launcher is process {launcher} of another host or "
            "container that shares this home directory. Stop it there"
        )
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(launcher, signal.SIGTERM)
    print(f"waiting until {directory.job} has written a checkpoint and ended. {AGAIN}", file=sys.stderr)
    deadline = time.monotonic() + STOP_LIMIT.total_seconds()
    while directory.launcher() == launcher:
        if time.monotonic() > deadline:
            limit = f"{STOP_LIMIT.total_seconds():g} s"
            raise ElasticPSError(
                f"{directory.job} (launcher pid {launcher}) is still running after {limit}. {AGAIN}"
            )
        time.sleep(0.1)
    found = status_of(directory)
    if found.phase == "Succeeded":
        print(f"{directory.job} succeeded before it was stopped")
        return 0
    print(f"{directory.job} is stopped")
    if how := how_to_continue(found.checkpoints):
        print(how)
    return 0


def logs(parsed: argparse.Namespace) -> int:
    """Print the logs, and with --follow new lines until the job ends."""
    directory = directory_of(parsed.job)
    status_of(directory)
    pattern = "*.log"
    for role in get_args(Role):
        index = getattr(parsed, role)
        if index is not None:
            pattern = f"{role}-{index}.log"
            if not (directory.logs / pattern).exists():
                raise UserError(
                    f"job {directory.job!r} has no log of {role} {index}; without --{role}, all are shown"
                )
    tail = Tail(directory.logs, pattern)
    while True:
        running = parsed.follow and directory.launcher() is not None
        for line in tail.new(last=not running, final=pattern == "*.log"):
            print(line)
        sys.stdout.flush()
        if not running:
            return 0
        time.sleep(0.2)


def directory_of(job: str) -> JobDirectory:
    """The directory of a job, given by its name, YAML file or script.

    Raises:
        UserError: the last job with the script's name was of another file.
    """
    if script.is_script(Path(job)):
        directory, path = JobDirectory(script.name_of(Path(job))), str(Path(job).resolve())
        with contextlib.suppress(FileNotFoundError):  # then there is no job
            known = directory.read_job()
            if path != (other := script.path_of(known) or known.spec.entrypoint):
                raise UserError(
                    f"the job {known.name!r} runs {other}, and not {path}. If you mean this job, give its "
                    f"name: {known.name}"
                )
        return directory
    if job.endswith((".yaml", ".yml")) or Path(job).is_file():
        return JobDirectory(load_job(Path(job)).name)
    return JobDirectory(job)


def status_of(directory: JobDirectory) -> LocalStatus:
    found = directory.read_status()
    if found is None:
        names = ", ".join(known.job for known in known_jobs())
        there = f"known jobs: {names}" if names else "no job has run yet"
        raise UserError(f"there is no job {directory.job!r} on this machine; {there}")
    return found


def _show(found: LocalStatus) -> None:
    from rich.console import Console

    from elastic_ps.cli.view import frame

    console = Console(highlight=False)
    console.print(frame(found, width=console.width))
    if found.message:
        console.print(found.message, markup=False, soft_wrap=True)


def _list(states: list[LocalStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    from elastic_ps.cli import words

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("job", "phase", "workers", "version", "progress", "loss", "time"):
        table.add_column(column)
    for state in states:
        progress = state.server.progress if state.server and not state.server.only_tensors else None
        loss = "" if progress is None or progress.loss is None else f"{progress.loss:.4f}"
        percent, version = (f"{progress.percent} %", str(progress.version)) if progress else ("", "")
        live = sum(process.role == "worker" and process.exit is None for process in state.processes)
        workers = f"{live} of {state.workers}" if state.goes_on else ""
        took = words.duration(state.elapsed)
        table.add_row(state.job, state.phase, workers, version, percent, loss, took)
    Console(highlight=False).print(table)
