"""What remains of the speed while processes are killed, frozen and slowed: samples that count per second.

`python -m benchmarks.goodput` trains the same model for some minutes with elastic-ps in several modes, with
DistributedDataParallel under torchrun's elastic agent, and with torchft if that is installed (`pip install
torchft`). Faults strike all of them in the same way, at moments that follow from a seed: a worker is killed,
frozen, or computes more slowly for a while. Of elastic-ps the parameter server is killed, too; the others
have none. A sample counts if what it has changed is in the model at the end: what is trained again, because
the model went back to a checkpoint, counts once.

Each rate is shown beside the same system's without faults, and beside torchrun's, with what a fault of each
kind has cost. Of elastic-ps the recorded histories are checked afterwards: no record may be lost, or be in
the model twice. Of torchrun's it is shown how many samples were computed again. Ctrl-C ends the measurement,
and what was found until then is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeAlias, get_args

from benchmarks.figures import Figure, write
from benchmarks.goodput_systems import (
    CLEAN,
    ROOT,
    Kind,
    System,
    modes,
    parameter_server,
    put,
    signal_to,
    slow_file,
    torchrun,
)
from benchmarks.goodput_torchft import torchft

LASTING = (1.0, 8.0)
"""Seconds that a worker is frozen or slow."""
LIMIT = 120.0
"""Seconds within which training must have begun, or go on."""
TORCHRUN = "torchrun DDP"

Open: TypeAlias = Callable[[Path], AbstractContextManager[System]]
"""Starts a system in a directory, and ends it."""


class Fault(NamedTuple):
    """What happens to a worker, or to the parameter server, at some seconds from the beginning."""

    at: float
    kind: Kind
    worker: int
    lasting: float


def schedule(seed: int, seconds: float, workers: int, every: float) -> list[Fault]:
    """Faults that follow from a seed, `every` so many seconds on average; none in the last tenth."""
    chance = random.Random(seed)
    found: list[Fault] = []
    at = chance.expovariate(1 / every)
    while at < 0.9 * seconds:
        kind: Kind = chance.choice(get_args(Kind))
        found.append(Fault(at, kind, chance.randrange(workers), chance.uniform(*LASTING)))
        at += chance.expovariate(1 / every)
    return found


class Measured(NamedTuple):
    """What became of one system.

    Attributes:
        rate: samples that count per second.
        seconds: for how long it was measured; fewer than asked for if that was interrupted.
        struck: how many faults found somebody to strike.
        between: for each fault that struck, its kind, the seconds until the next one, and the samples that
            came to count in these.
        audit: what is to be said of the records.
    """

    rate: float
    seconds: float
    struck: int
    between: Sequence[tuple[Kind, float, int]]
    audit: str


def measure(open_: Open, seconds: float, faults: Sequence[Fault], interrupted: Event) -> Measured:
    """Train for some seconds, from when the first samples count; or until that is `interrupted`."""
    directory = Path(tempfile.mkdtemp(prefix="elastic-ps-goodput-"))
    try:
        with open_(directory) as system:
            first = _await(system, interrupted)
            began = time.monotonic()
            marks = _strike(directory, system, faults, began + seconds, interrupted)
            last = _await(system, interrupted)
            took = time.monotonic() - began
            marks.append(Mark(None, began + took, last))
            between = [
                (mark.kind, after.at - mark.at, after.samples - mark.samples)
                for mark, after in pairwise(marks)
                if mark.kind is not None
            ]
            return Measured((last - first) / took, took, len(marks) - 1, between, system.finish())
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {_last_words(directory)}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _last_words(directory: Path) -> str:
    """The last line of the log that was written to last."""
    logs = [path for path in directory.rglob("*log*") if path.is_file() and path.stat().st_size]
    if not logs:
        return "there is no log"
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return f"{newest.name} ends with: {newest.read_text(errors='replace').splitlines()[-1]}"


def _await(system: System, interrupted: Event) -> int:
    """How many samples count, when there are some; 0 if it is `interrupted` before."""
    deadline = time.monotonic() + LIMIT
    while not (samples := system.samples()):
        if interrupted.is_set():
            return 0
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody says how many samples count, for {LIMIT:.0f} s")
        time.sleep(0.05)
    return samples


class Mark(NamedTuple):
    """How many samples counted at some moment, when a fault struck."""

    kind: Kind | None
    at: float
    samples: int


def _strike(
    directory: Path, system: System, faults: Sequence[Fault], end: float, interrupted: Event
) -> list[Mark]:
    """Bring the faults about; returns those that found somebody to strike. Blocks until `end`."""
    marks, frozen, samples = list[Mark](), dict[int, float](), 0
    began, due = time.monotonic(), list(faults)
    while (now := time.monotonic()) < end and not interrupted.is_set():
        for thawed in [pid for pid, until in frozen.items() if now >= until]:
            del frozen[thawed]
            signal_to(thawed, signal.SIGCONT)
        if due and now - began >= due[0].at:
            fault = due.pop(0)
            samples = system.samples() or samples
            pid = system.pid(fault.kind, fault.worker)
            struck = fault.kind == "slow"
            if fault.kind == "slow":
                put(slow_file(directory, fault.worker), str(now + fault.lasting))
            elif pid is not None and fault.kind == "freeze":
                frozen[pid] = now + fault.lasting
                struck = signal_to(pid, signal.SIGSTOP)
            elif pid is not None:
                struck = signal_to(pid, signal.SIGKILL)
            if struck:
                marks.append(Mark(fault.kind, now, samples))
        time.sleep(0.02)
    for thawed in frozen:
        signal_to(thawed, signal.SIGCONT)
    return marks


def costs(quiet: Measured, disturbed: Measured) -> dict[Kind, float]:
    """How many seconds of undisturbed training a fault of each kind has cost, on average.

    What one fault costs after the next one has struck is put down to that one.
    """
    lost: dict[Kind, list[float]] = defaultdict(list)
    for kind, seconds, samples in disturbed.between:
        lost[kind].append(seconds - samples / quiet.rate)
    return {kind: sum(lost[kind]) / len(lost[kind]) for kind in get_args(Kind) if kind in lost}


def systems(workers: int) -> Mapping[str, Open]:
    """What can be measured, torchrun first."""
    found: dict[str, Open] = {TORCHRUN: lambda directory: torchrun(directory, workers)}
    if importlib.util.find_spec("torchft"):
        found["torchft DDP"] = lambda directory: torchft(directory, workers)
    for name, consistency in modes(workers).items():
        found[name] = lambda directory, c=consistency: parameter_server(directory, workers, c)  # type: ignore[misc]
    return found


def chosen(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of the known names that begin as a wanted one does, in their order; all if nothing is wanted.

    Raises:
        ValueError: none begins so.
    """
    for each in wanted:
        if not any(name.startswith(each) for name in known):
            raise ValueError(f"there is no system that begins with {each!r}; there are {'; '.join(known)}")
    return [name for name in known if not wanted or name.startswith(tuple(wanted))]


def row(name: str, quiet: Measured, disturbed: Measured, torchrun: float | None) -> str:
    """What was measured of a system, in a line; and what its faults have cost, in another one."""
    ratio = "" if torchrun is None else f"{disturbed.rate / max(torchrun, 1e-9):.2f}"
    line = (
        f"{name:20} {quiet.rate:11.0f} {disturbed.rate:12.0f} {disturbed.rate / max(quiet.rate, 1e-9):6.2f} "
        f"{ratio:>12} {disturbed.struck:7}  {disturbed.audit}"
    )
    each = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in costs(quiet, disturbed).items())
    return f"{line}\n{'':20} a fault has cost: {each}" if each else line


def main() -> int:
    """The command; returns its exit status: 1 if records were lost, came twice, or a system did not train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, for each system")
    parser.add_argument("--quiet", type=float, default=1.0, help="minutes without faults, for each system")
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--systems", default="", help="those that begin so, as in local,bounded,torchrun; all by default"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    parsed = parser.parse_args()
    known = systems(parsed.workers)
    try:
        names = chosen([each.strip() for each in parsed.systems.split(",") if each.strip()], list(known))
    except ValueError as error:
        parser.error(f"--systems: {error}")
    os.chdir(ROOT)
    faults = schedule(parsed.seed, 60 * parsed.minutes, parsed.workers, parsed.every)
    kinds = ", ".join(f"{sum(f.kind == kind for f in faults)} {kind}" for kind in get_args(Kind))
    print(
        f"{parsed.workers} workers, seed {parsed.seed}, {len(faults)} faults in "
        f"{parsed.minutes:g} minutes: {kinds}"
    )
    if not importlib.util.find_spec("torchft"):
        print("torchft is not installed, so it is left out; pip install torchft")
    print(f"{'samples that count':20} undisturbed  with faults  share  to torchrun  struck", flush=True)
    found: dict[str, tuple[Measured, Measured]] = {}
    failed: list[str] = []
    with _interruptible() as interrupted:
        for name in names:
            try:
                quiet = measure(known[name], 60 * parsed.quiet, [], interrupted)
                if interrupted.is_set():
                    break
                disturbed = measure(known[name], 60 * parsed.minutes, faults, interrupted)
            except TimeoutError as error:
                print(f"{name:20} was not measured: {error}", flush=True)
                failed.append(name)
                continue
            found[name] = quiet, disturbed
            theirs = found[TORCHRUN][1].rate if TORCHRUN in found else None
            print(row(name, quiet, disturbed, theirs), flush=True)
            if interrupted.is_set():
                print(f"interrupted: {name} had {disturbed.seconds:.0f} s of faults")
                break
    ours = {name: each for name, each in found.items() if name in modes(parsed.workers)}
    if TORCHRUN in found:
        theirs = found[TORCHRUN][1].rate
        figures = [
            Figure(name, disturbed.rate, theirs, "samples/s", "torchrun", more=True)
            for name, (_, disturbed) in ours.items()
        ]
        write(parsed.json, figures)
    clean = all(each.audit.endswith(CLEAN) for pair in ours.values() for each in pair)
    return 0 if clean and not failed else 1


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Set by the first Ctrl-C or SIGTERM, so that what was measured is told; the next one ends it at once."""
    interrupted = Event()

    def interrupt(number: int, _frame: object) -> None:
        interrupted.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
