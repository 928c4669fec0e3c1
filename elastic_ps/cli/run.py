"""`elastic-ps run`: check, start, show, report."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

from rich.console import Console

from elastic_ps.api.job import TrainingJob, load_job, parse_job
from elastic_ps.cli.setting import with_fields
from elastic_ps.cli.tail import Tail
from elastic_ps.cli.view import Display, LiveDisplay, PlainDisplay, print_outcome
from elastic_ps.contract.env import inherited, started_by_mpirun
from elastic_ps.errors import UserError
from elastic_ps.local import (
    JobDirectory,
    Launcher,
    Options,
    Outcome,
    Programs,
    ScaleAt,
    mpi,
    preflight,
    script,
)
from elastic_ps.local.forks import ForkServer
from elastic_ps.local.processes import processes_of, with_threads
from elastic_ps.local.state import newest_checkpoint

REFRESH = timedelta(milliseconds=200)
AT_ONCE = timedelta(milliseconds=100)
"""A signal within this time counts once: `timeout` and `make` pass on one that the job has already got."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(parsed: argparse.Namespace, programs: Programs | None) -> int:
    """Run the job of a file or a script; returns the exit code."""

    def read(ranks: int | None) -> TrainingJob:
        job = _job(parsed.job, parsed.script_arguments)
        if parsed.assignments:
            job = with_fields(job, parsed.assignments)
        workers = ranks if parsed.workers is None else parsed.workers
        if workers is not None:
            job.spec.worker.replicas = workers
        if parsed.ps is not None:
            job.spec.parameter_server.replicas = parsed.ps
            job = _checked(job, f"--ps {parsed.ps}")
        if parsed.processes is not None:
            job.spec.worker.processes = parsed.processes
            job = _checked(job, f"--processes {parsed.processes}")
        return job

    return run_job(read, parsed, programs)


def _checked(job: TrainingJob, source: str) -> TrainingJob:
    """The job, after `source` has changed it. Raises InvalidJob if it may not."""
    given = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return parse_job(given, source=source)


def run_job(
    job: Callable[[int | None], TrainingJob], parsed: argparse.Namespace, programs: Programs | None
) -> int:
    """Run a job; returns the exit code. Under `mpirun`, rank 0 does, and the others start its workers.

    Args:
        job: called once with the number of ranks that start workers; None without `mpirun`.
        parsed: the options of the run.
    """
    if not started_by_mpirun():
        return _run_job(job(None), parsed, programs, None)
    world, relays = mpi.World(), parsed.transport == "mpi"
    if world.size == 1:
        return _run_job(job(None), parsed, programs, None)
    if world.rank:
        mpi.serve(world, relays=relays)
        return 0
    slots = mpi.Slots(world, relays=relays)
    try:
        if parsed.detach:
            raise UserError("--detach is not possible under mpirun; put `mpirun ... &` into the background")
        if parsed.bind:
            raise UserError(
                "--bind is not possible under mpirun: a worker runs on the cores of its rank. Choose these "
                "with mpirun, as in `mpirun --map-by slot:PE=4 --bind-to core`"
            )
        if parsed.trace and len({*world.hosts}) > 1:
            raise UserError("--trace needs all ranks on one host, because clocks and files of hosts differ")
        return _run_job(job(slots.count), parsed, programs, slots)
    finally:
        slots.close()


def _run_job(
    job: TrainingJob, parsed: argparse.Namespace, programs: Programs | None, slots: mpi.Slots | None
) -> int:
    preflight.check_transport(job, parsed.transport, ranks=slots is not None)
    options = Options(
        schedule=tuple(sorted(ScaleAt(version, workers) for version, workers in parsed.scale)),
        trace=parsed.trace.resolve() if parsed.trace else None,
        resume=parsed.resume,
        transport=parsed.transport,
        tls=not parsed.insecure,
        slots=slots,
        bind=parsed.bind,
        host="127.0.0.1" if slots is None or slots.relays else slots.world.address,
        programs=programs or Programs(),
    )
    if not options.programs.forkable:
        return _check_and_run(job, options, parsed)
    with contextlib.closing(ForkServer(with_threads(inherited(), processes=processes_of(job.spec)))) as forks:
        return _check_and_run(job, replace(options, forks=forks), parsed)


def _check_and_run(job: TrainingJob, options: Options, parsed: argparse.Namespace) -> int:
    with signals_end_the_process("nothing was started"):
        _check(job, options, parsed.report)
        launcher = Launcher(job, options)
    with launcher:
        if parsed.detach:
            pid = os.fork()
            if pid:
                if options.forks is not None:
                    options.forks.release()
                return _wait_until_it_runs(pid, launcher.directory)
            _leave_the_terminal(launcher.directory)
        code = _run(launcher, parsed.report, "none" if parsed.detach else parsed.output)
    if parsed.detach:
        sys.stdout.flush()
        os._exit(code)  # the fork's copy of the caller must not return into it
    return code


def _job(path: Path, arguments: Sequence[str]) -> TrainingJob:
    """The job of a YAML file, or one that runs the file as a script."""
    if script.is_script(path):
        return script.job_of(path, arguments)
    if arguments:
        raise UserError(
            f"only a script takes arguments after --, as in `elastic-ps run train.py -- ...`, and {path} is "
            f"not one; put {shlex.join(arguments)} into its spec.arguments"
        )
    return load_job(path)


def _check(job: TrainingJob, options: Options, report: Path | None) -> None:
    """Check everything that can be wrong before anything is started."""
    JobDirectory(job.name, root=options.root).refuse_if_running()
    preflight.check_workers(job, options.schedule)
    preflight.check_checkpoints(job, options.resume)
    preflight.check_report(report)
    preflight.check_entrypoint(job, options.programs, options.forks)
    if report is not None:
        preflight.prepare_directory(report, option="--report")
    if options.trace is not None:
        preflight.prepare_file(options.trace, option="--trace")


def _run(launcher: Launcher, report: Path | None, output: str) -> int:
    """Run the job to its end with a display. `output`: the processes whose output is shown; see `parser`."""
    # Under mpirun, only rank 0 may see a terminal, whatever the output really is.
    console = _Output(highlight=False, force_terminal=False if started_by_mpirun() else None)
    heard: dict[int, float] = {}

    def stop(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        again = now - heard.setdefault(number, now) > AT_ONCE.total_seconds()
        # SIGHUP, or another signal than before, does not ask to hurry: it comes when a session ends.
        at_once = again and number != signal.SIGHUP
        launcher.stop(f"stopped by {signal.Signals(number).name}", at_once=at_once)

    with _handled(stop):
        launcher.start()
        try:
            _show(launcher, console, output)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # the disk with the output is full
                launcher.wait()
        except Exception:  # noqa: BLE001 (what shows a job shall not end it)
            with contextlib.suppress(OSError):
                print("the display has failed, and the job goes on without it:", file=sys.stderr)
                traceback.print_exc()
            launcher.wait()
        if not launcher.wait(timedelta(0)):
            launcher.stop("stopped because its output was closed")
            launcher.wait()
        outcome = launcher.outcome()
        written = _write_report(outcome, report)
        code = _exit_code(outcome, [*heard])
        try:
            print_outcome(console, outcome)
            for path in written:
                console.print(f"  {'report':<14}{path}", style="dim", soft_wrap=True, markup=False)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            _tell_failure(outcome)
    return code


class _Output(Console):
    """Whoever reads it may have enough; that is an OSError, and not the end of this process."""

    def on_broken_pipe(self) -> None:
        """Called where BrokenPipeError is handled."""
        raise


def _show(launcher: Launcher, console: Console, output: str) -> None:
    pattern = {"all": "*.log", "none": ""}.get(output, f"{output}.log")
    tail = Tail(launcher.directory.logs, pattern) if pattern else None
    console.print(f"All output: elastic-ps logs {launcher.job.name} -f", style="dim", soft_wrap=True)
    live = console.is_interactive and sys.stdout.isatty()  # FORCE_COLOR makes any output a terminal
    display: Display = LiveDisplay(console) if live else PlainDisplay()
    told_to_wait = False
    try:
        while not launcher.wait(REFRESH):
            display.show(tail.shown() if tail else [])
            display.update(launcher.status(), launcher.record)
            if launcher.stopping and not told_to_wait:
                told_to_wait = True
                console.print(
                    "Stopping: workers leave, and a checkpoint is written. A second Ctrl-C kills all "
                    "processes."
                )
        display.show(tail.shown(last=True) if tail else [])
        display.update(launcher.status(), launcher.record)
    finally:
        display.close()


def _write_report(outcome: Outcome, report: Path | None) -> list[Path]:
    if report is None:
        return []
    from elastic_ps.local.report import write_report

    try:
        return write_report(outcome, report)
    except Exception as error:  # noqa: BLE001 (what tells of a job shall not make it fail)
        reason = error if isinstance(error, OSError) else repr(error)
        print(f"warning: the report in {report} is not complete: {reason}", file=sys.stderr)
        return []


def _exit_code(outcome: Outcome, signals: list[int]) -> int:
    if outcome.verdict.phase == "Succeeded":
        return 0
    if outcome.verdict.reason == "InvalidJob":
        return 2
    return 128 + signals[0] if signals and outcome.verdict.reason == "Stopped" else 1


def _tell_failure(outcome: Outcome) -> None:
    """Print what went wrong and what to do to stderr."""
    name, verdict, status = outcome.status.job, outcome.verdict, outcome.status
    if verdict.phase == "Failed":
        print(f"error: job {name!r} failed: {verdict.message}", file=sys.stderr)
        print(f"Reason: {verdict.reason}. All output: elastic-ps logs {name}", file=sys.stderr)
    begun = (
        status.server is not None
    )  # otherwise the checkpoints may be another job's, or the reason of the refusal
    newest = newest_checkpoint(Path(status.checkpoints)) if begun else None
    nothing_yet = newest is None or (newest == 0 and verdict.phase == "Failed")
    if verdict.phase != "Succeeded" and not nothing_yet:
        print(
            f"Continue from its last checkpoint with --resume {shlex.quote(status.checkpoints)}",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _handled(handler: signal._HANDLER) -> Iterator[None]:
    """Handle the signals that end a process, and restore their handlers afterwards."""
    # An ignored signal stays ignored: nohup ignores SIGHUP.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wanted = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in wanted:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, before[number])


@contextlib.contextmanager
def signals_end_the_process(so: str) -> Iterator[None]:
    """Let a signal end this process by an exception, so that whatever it has started ends, too.

    Args:
        so: what the message says of the consequence.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        print(f"stopped by {signal.Signals(number).name}: {so}", file=sys.stderr)
        raise SystemExit(128 + number)

    with _handled(end):
        yield


def _leave_the_terminal(directory: JobDirectory) -> None:
    """In the background process: begin a session, and write the output to a file."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(directory.logs / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)


def _wait_until_it_runs(pid: int, directory: JobDirectory) -> int:
    """In the foreground process: wait until the job runs or has failed."""
    name = directory.job

    def stop(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        os.waitpid(pid, 0)
        raise SystemExit(128 + number)

    with _handled(stop):
        while True:
            status = directory.read_status()
            ours = status is not None and status.launcher_pid == pid
            if status is not None and ours and status.phase == "Running":
                break
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                sys.stderr.write((directory.logs / "launcher.log").read_text(errors="replace"))
                return os.waitstatus_to_exitcode(code)
            time.sleep(0.1)
    print(f"{name} runs in the background (launcher pid {pid})")
    print(f"  elastic-ps status {name}               show its progress")
    print(f"  elastic-ps logs {name} -f              show its output")
    print(f"  elastic-ps scale {name} --workers N    change the number of workers")
    print(f"  elastic-ps stop {name}                 stop it")
    return 0
