"""What remains of the speed while processes are killed, frozen and slowed: samples that count per second.

`python -m benchmarks.goodput` trains the same model for some minutes with elastic-ps in several modes, with
DistributedDataParallel under torchrun's elastic agent, and with torchft if that is installed (`pip install
torchft`). Faults strike all of them in the same way, at moments that follow from a seed: a worker is killed,
frozen, or computes more slowly for a while. Of elastic-ps the parameter server is killed, too; the others
have none. A sample counts if what it has changed is in the model at the end: what is trained again, because
the model went back to a checkpoint, counts once.

Each rate is shown beside the same system's without faults, and beside torchrun's. Of elastic-ps the recorded
histories are checked afterwards: no record may be lost, or be in the model twice. Of torchrun's it is shown
how many samples were computed again.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, get_args

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
    """Samples that count per second, how many faults struck, and what is to be said of the records."""

    rate: float
    struck: int
    audit: str


def measure(
    open_: Callable[[Path], AbstractContextManager[System]], seconds: float, faults: Sequence[Fault]
) -> Measured:
    """Train for some seconds, from when the first samples count."""
    directory = Path(tempfile.mkdtemp(prefix="elastic-ps-goodput-"))
    try:
        with open_(directory) as system:
            first = _await(system)
            began = time.monotonic()
            struck = _strike(directory, system, faults, began, began + seconds)
            last = _await(system)
            rate = (last - first) / (time.monotonic() - began)
            return Measured(rate, struck, system.finish())
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _await(system: System) -> int:
    """How many samples count, when there are some."""
    deadline = time.monotonic() + LIMIT
    while not (samples := system.samples()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody says how many samples count, for {LIMIT:.0f} s")
        time.sleep(0.05)
    return samples


def _strike(directory: Path, system: System, faults: Sequence[Fault], began: float, end: float) -> int:
    """Bring the faults about; returns how many found somebody to strike. Blocks until `end`."""
    struck, frozen = 0, dict[int, float]()
    due = list(faults)
    while (now := time.monotonic()) < end:
        for thawed in [pid for pid, until in frozen.items() if now >= until]:
            del frozen[thawed]
            signal_to(thawed, signal.SIGCONT)
        if due and now - began >= due[0].at:
            fault = due.pop(0)
            pid = system.pid(fault.kind, fault.worker)
            if fault.kind == "slow":
                put(slow_file(directory, fault.worker), str(now + fault.lasting))
                struck += 1
            elif pid is not None and fault.kind == "freeze":
                frozen[pid] = now + fault.lasting
                struck += signal_to(pid, signal.SIGSTOP)
            elif pid is not None:
                struck += signal_to(pid, signal.SIGKILL)
        time.sleep(0.02)
    for thawed in frozen:
        signal_to(thawed, signal.SIGCONT)
    return struck


def systems(workers: int) -> Mapping[str, Callable[[Path], AbstractContextManager[System]]]:
    """What is measured, torchrun first."""
    found: dict[str, Callable[[Path], AbstractContextManager[System]]] = {
        "torchrun DDP (gloo)": lambda directory: torchrun(directory, workers)
    }
    if importlib.util.find_spec("torchft"):
        found["torchft DDP (gloo)"] = lambda directory: torchft(directory, workers)
    for name, consistency in modes(workers).items():
        found[name] = lambda directory, c=consistency: parameter_server(directory, workers, c)  # type: ignore[misc]
    return found


def main() -> int:
    """The command; returns its exit status: 1 if records were lost, or came twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, for each system")
    parser.add_argument("--quiet", type=float, default=1.0, help="minutes without faults, for each system")
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--modes", nargs="*", default=[""], help="those that begin so, beside torchrun; all by default"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    faults = schedule(parsed.seed, 60 * parsed.minutes, parsed.workers, parsed.every)
    kinds = ", ".join(f"{sum(f.kind == kind for f in faults)} {kind}" for kind in get_args(Kind))
    print(
        f"{parsed.workers} workers, seed {parsed.seed}, {len(faults)} faults in "
        f"{parsed.minutes:g} minutes: {kinds}"
    )
    if not importlib.util.find_spec("torchft"):
        print("torchft is not installed, so it is left out; pip install torchft")
    print(f"{'':28} undisturbed  with faults  share  to torchrun  struck")
    found: dict[str, tuple[Measured, Measured]] = {}
    for name, open_ in systems(parsed.workers).items():
        if not (name.startswith("torchrun") or any(name.startswith(wanted) for wanted in parsed.modes)):
            continue
        quiet = measure(open_, 60 * parsed.quiet, [])
        disturbed = measure(open_, 60 * parsed.minutes, faults)
        found[name] = quiet, disturbed
        theirs = found["torchrun DDP (gloo)"][1].rate
        print(
            f"{name:28} {quiet.rate:11.0f} {disturbed.rate:12.0f} {disturbed.rate / quiet.rate:6.2f} "
            f"{disturbed.rate / max(theirs, 1e-9):12.2f} {disturbed.struck:7}  {disturbed.audit}",
            flush=True,
        )
    theirs = found["torchrun DDP (gloo)"][1].rate
    ours = {name: each for name, each in found.items() if name in modes(parsed.workers)}
    figures = [
        Figure(name, disturbed.rate, theirs, "samples/s", "torchrun", more=True)
        for name, (_, disturbed) in ours.items()
    ]
    write(parsed.json, figures)
    return 0 if all(each.audit.endswith(CLEAN) for pair in ours.values() for each in pair) else 1


if __name__ == "__main__":
    sys.exit(main())
