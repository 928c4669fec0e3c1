"""Machines that come and go, for `benchmarks.goodput`: what runs on one dies at once, and it is away then.

A machine here is a process with all that it has started. `Machines` starts its program again when it is back.
The workers of elastic-ps are started by the launcher, at once. There, `python -m benchmarks.goodput_machines
DIRECTORY` stands in the place of a worker's program: it waits until its machine is back and becomes the
worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from elastic_ps.contract.env import PREFIX

ROOT = Path(__file__).resolve().parents[1]


def variables(**more: str) -> dict[str, str]:
    """The environment of a process that imports the benchmarks, and packages from where this one does."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **more}


def put(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    part = path.with_suffix(f".part-{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def numbers_in(path: Path) -> list[int]:
    """The numbers in a file; none if there is no file."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for word in path.read_text().split()]
    return []


def signal_to(pid: int, number: signal.Signals) -> bool:
    """Returns whether there is such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def kill_all_of(directory: Path) -> None:
    """SIGKILL to each process whose command names the directory, until there is none. Blocks for up to 10 s.

    A process may be started by one that is being killed.
    """
    deadline = time.monotonic() + 10.0
    while (found := list(_commands_with(str(directory)))) and time.monotonic() < deadline:
        for pid in found:
            signal_to(pid, signal.SIGKILL)
        time.sleep(0.05)


def _commands_with(text: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in path.read_text(errors="replace"):
                yield int(path.parent.name)


def kill_with_descendants(pid: int) -> bool:
    """SIGKILL to a process and to all that it and they have started; returns whether there is such a process.

    They are stopped first, so that none of them starts another one meanwhile, or says that one has died.
    """
    stopped: set[int] = set()
    found = {pid}
    while new := found - stopped:
        there = [each for each in new if signal_to(each, signal.SIGSTOP)]
        if pid in new and pid not in there:
            return False
        stopped |= new
        with contextlib.suppress(psutil.NoSuchProcess):
            found = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    for each in stopped:
        signal_to(each, signal.SIGKILL)
    return True


class Machines:
    """Each has one program, which is started again when it has ended, or `gone` seconds after `kill`.

    Args:
        count: how many; they are numbered from 0.
        start: starts the program of a machine. Called on a thread of this object.
        gone: seconds that a machine is away.

    Attributes:
        ended: how often a program has ended by itself.
    """

    def __init__(self, count: int, start: Callable[[int], subprocess.Popen[bytes]], gone: float) -> None:
        self._count, self._start, self._gone = count, start, gone
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._away: dict[int, float] = {}
        self._over = threading.Event()
        self.ended = 0
        self._thread = threading.Thread(target=self._supervise, name="machines")
        self._thread.start()

    def _supervise(self) -> None:
        while not self._over.wait(0.1):
            for machine in range(self._count):
                self._look_after(machine, time.monotonic())

    def _look_after(self, machine: int, now: float) -> None:
        running = self._processes.get(machine)
        if running is not None and running.poll() is None:
            return
        back = self._away.get(machine)
        if back is not None and now < back:
            return
        self._away.pop(machine, None)
        self.ended += running is not None and back is None
        self._processes[machine] = self._start(machine)

    def pid(self, machine: int) -> int | None:
        """Of the machine's program; None while the machine is away, or the program is started again."""
        running = self._processes.get(machine)
        return None if running is None or machine in self._away or running.poll() is not None else running.pid

    def kill(self, machine: int) -> bool:
        """Kill all that runs on a machine; returns whether it was there."""
        pid = self.pid(machine)
        if pid is None:
            return False
        self._away[machine] = time.monotonic() + self._gone  # first: what ends now has not ended by itself
        return kill_with_descendants(pid)

    def close(self) -> None:
        """Kill all that runs on all of them. Blocks until that has ended."""
        self._over.set()
        self._thread.join()
        for process in self._processes.values():
            if process.poll() is None:
                kill_with_descendants(process.pid)
            process.wait()


# --- the machines of elastic-ps's workers


def program(directory: Path) -> tuple[str, ...]:
    """The program of workers that are on machines; `directory` has the files which say who is away."""
    return (sys.executable, "-m", "benchmarks.goodput_machines", str(directory))


def send_away(directory: Path, worker: int, seconds: float) -> None:
    """Let the machine of a worker be away from now on. What runs on it is for the caller to kill."""
    put(_away_file(directory, worker), str(time.monotonic() + seconds))


def seconds_away(directory: Path, worker: int) -> float:
    """How long the machine of a worker will be away yet; 0 if it is there."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, float(_away_file(directory, worker).read_text()) - time.monotonic())
    return 0.0


def _away_file(directory: Path, worker: int) -> Path:
    """The file that says until when, by the monotonic clock of the host."""
    return directory / f"away-{worker}"


def main(directory: Path, arguments: list[str]) -> None:
    """Wait until the worker's machine is there, and become the worker."""
    if not arguments:  # else it only looks whether the job is right
        time.sleep(seconds_away(directory, int(os.environ[f"{PREFIX}INDEX"])))
    os.execv(sys.executable, [sys.executable, "-m", "elastic_ps.worker", *arguments])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("this is a machine of `python -m benchmarks.goodput --machines`; see its --help")
    main(Path(sys.argv[1]), sys.argv[2:])
