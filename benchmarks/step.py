"""How fast training goes while nothing happens: a job of elastic-ps beside DistributedDataParallel.

`python -m benchmarks.step` trains the model of `benchmarks/recovery.py` twice, with as many processes that
compute: with one parameter server in `sync` mode, and with DistributedDataParallel (gloo) under `torchrun`.
It prints samples per second, read from outside while all workers train. The two take turns. elastic-ps loads
its batches record by record; the competitor computes on one that stays in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from benchmarks import recovery
from benchmarks.figures import Figure, write
from benchmarks.recovery import BATCH, LIMIT, ROOT, make_job, torchrun
from elastic_ps.local import Launcher, Options
from elastic_ps.local.poller import fetch_status

WARM = 50
"""Steps before the measurement."""
NEVER = 3600.0
"""Seconds between checkpoints."""

Read = Callable[[], int]
"""How many samples were trained; 0 as long as not everybody trains."""


def rate(read: Read, seconds: float) -> float:
    """Samples per second over about `seconds`."""
    before, began = trained(read)
    time.sleep(seconds)
    after, ended = trained(read)
    return (after - before) / (ended - began)


def trained(read: Read) -> tuple[int, float]:
    """(samples, when that was), as soon as everybody trains."""
    deadline = time.monotonic() + LIMIT
    while (samples := read()) == 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not everybody trains within {LIMIT:.0f} s")
        time.sleep(0.05)
    return samples, time.monotonic()


def measure_parameter_server(workers: int, seconds: float) -> float:
    """Samples per second."""
    with (
        tempfile.TemporaryDirectory() as root,
        Launcher(make_job(workers, NEVER), Options(root=Path(root))) as launcher,
    ):
        launcher.start()

        def samples() -> int:
            http = launcher.status().http
            status = fetch_status(http[0]) if http else None
            if status is None or status.progress.version < WARM:
                return 0
            everybody = sum(member.state == "training" for member in status.members) == workers
            return status.progress.records_applied if everybody else 0

        measured = rate(samples, seconds)
        launcher.stop("measured", at_once=True)
        launcher.wait(timedelta(seconds=30))
    return measured


def measure_ddp(workers: int, seconds: float) -> float:
    """Samples per second."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def samples() -> int:
            with contextlib.suppress(OSError, ValueError):
                _, step = (int(part) for part in (directory / "step").read_text().split())
                return step * workers * BATCH if step >= WARM else 0
            return 0

        with torchrun(directory, workers, recovery.__file__, "--interval", str(NEVER)):
            return rate(samples, seconds)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of training that are measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    ours, theirs = [], []
    for number in range(parsed.rounds):
        ours.append(measure_parameter_server(parsed.workers, parsed.seconds))
        theirs.append(measure_ddp(parsed.workers, parsed.seconds))
        print(
            f"round {number + 1}: elastic-ps {ours[-1]:.0f}, torchrun {theirs[-1]:.0f} samples/s", flush=True
        )
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"{parsed.workers} workers, batches of {BATCH}, {parsed.rounds} rounds (median)")
    print(f"elastic-ps, 1 parameter server  {a:8.0f} samples/s")
    print(f"torchrun DDP (gloo)             {b:8.0f} samples/s")
    print(f"ratio elastic-ps / torchrun     {a / b:8.2f}")
    what = f"{parsed.workers} workers, batches of {BATCH}"
    write(parsed.json, [Figure(what, a, b, "samples/s", "DDP", more=True)])


if __name__ == "__main__":
    main()
