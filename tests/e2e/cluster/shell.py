"""Running programs, telling the user what goes on, and waiting: the few habits that every module here shares.

Commands are lists, never shell strings. A failure always shows the end of what the program said, because a
person who reads "returned 1" in a CI log has no other way to learn more.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from .errors import ClusterError, CommandError

TAIL_LINES = 40


def say(message: str) -> None:
    """Print one line of progress to stderr (stdout belongs to results such as `export KUBECONFIG`)."""
    print(f"[cluster {time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def tail(text: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def tail_of(log: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log file, or a note that there is none."""
    if not log.is_file():
        return f"({log} does not exist)"
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 64 * 1024))
        return tail(stream.read().decode(errors="replace"), lines)


def run(
    command: Sequence[str | Path],
    *,
    timeout: timedelta = timedelta(minutes=2),
    check: bool = True,
    stdin: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output as text.

    `env` is added to the environment. Raises CommandError on a non-zero code (unless `check` is off), and
    ClusterError when the program is missing or takes longer than `timeout`.
    """
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout.total_seconds(),
            cwd=cwd,
            env={**os.environ, **(env or {})},
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"`{argv[0]}` is not installed (or {cwd} does not exist)") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{shlex.join(argv)}` took longer than {timeout}") from error
    if check and done.returncode != 0:
        raise CommandError(shlex.join(argv), done.returncode, tail(done.stdout + done.stderr))
    return done


def run_logged(
    command: Sequence[str | Path],
    *,
    log: Path,
    timeout: timedelta,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    heartbeat: timedelta = timedelta(seconds=30),
) -> None:
    """Run a long program with its output in `log`, and say every `heartbeat` what it last printed.

    Raises CommandError with the end of the log. The program is killed when it runs past `timeout` and when
    the caller is interrupted.
    """
    argv = [str(part) for part in command]
    started = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(argv)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )
        try:
            while True:
                try:
                    process.wait(timeout=heartbeat.total_seconds())
                    break
                except subprocess.TimeoutExpired:
                    spent = time.monotonic() - started
                    say(f"  ... {spent:.0f} s: {tail_of(log, 1)[:160]}")
                    if spent > timeout.total_seconds():
                        raise ClusterError(
                            f"`{shlex.join(argv)}` took longer than {timeout}; log:\n{tail_of(log)}"
                        ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise CommandError(shlex.join(argv), process.returncode, f"{tail_of(log)}\n(whole log: {log})")


def wait_for(
    check: Callable[[], bool],
    *,
    what: str,
    timeout: timedelta,
    interval: timedelta = timedelta(milliseconds=100),
    explain: Callable[[], str] = lambda: "",
) -> None:
    """Poll until `check` returns True; raise ClusterError that says what was waited for and `explain()`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not check():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout.total_seconds():.0f} s. {explain()}".rstrip())
        time.sleep(interval.total_seconds())


def cache_dir() -> Path:
    """Where built things are kept between runs: `${XDG_CACHE_HOME:-~/.cache}/elastic-ps`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "elastic-ps"


def take_long() -> None:
    """Do not hold the test that runs here to the time that a test may take (pytest's `faulthandler_timeout`).

    To be called before what has limits of its own, such as a build, or the wait for another test's.
    """
    if threading.current_thread() is threading.main_thread():
        faulthandler.cancel_dump_traceback_later()


def lock(stream: TextIO, mode: int, otherwise: Callable[[], None] = lambda: None) -> None:
    """Lock an open file, in fcntl's mode. Blocks; `otherwise` is called if it has to."""
    try:
        fcntl.flock(stream, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        otherwise()
        take_long()
        fcntl.flock(stream, mode)


@contextmanager
def locked(path: Path, action: str) -> Iterator[None]:
    """Let one process at a time do something; the others wait, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        lock(stream, fcntl.LOCK_EX, lambda: say(f"another process is {action}; waiting for it"))
        yield
