"""One worker is several times as slow as the others: how much of their speed remains.

`python -m benchmarks.straggler` counts steps per second of the other workers while one sleeps longer in its
forward pass: with a parameter server in `sync` mode, the same with `backupWorkers: 1`, in `bounded` mode, and
with DistributedDataParallel (gloo) under `torchrun`. Each is shown beside the same without a slow worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks import convergence
from benchmarks.figures import Figure, write
from benchmarks.recovery import BATCH, LIMIT, ROOT, WIDTH, Zeros, make_model, step, torchrun
from elastic_ps.api.job import TrainingJob

WARM = 20
"""Steps before the measurement."""
PAUSE = 0.05
"""Seconds that each step sleeps, in place of a larger model's forward pass."""


def train_with_parameter_server(slowness: float) -> None:
    """What a worker of the job runs; worker 0 sleeps `slowness` times as long."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_model()
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-4, fused=True), model)
    for x, y in session.loader(Zeros(), BATCH, epochs=1000):
        time.sleep(PAUSE * (1.0 if session.worker else slowness))
        step(model, optimizer, x, y)


def train_with_ddp(directory: Path, slowness: float) -> None:
    """What each rank runs; rank 0 sleeps `slowness` times as long."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, 1)
    number = 0
    while True:
        time.sleep(PAUSE * (1.0 if rank else slowness))
        step(model, optimizer, x, y)
        number += 1
        if rank == 0:
            (directory / "partial").write_text(str(number))
            (directory / "partial").rename(directory / "step")


def rate(read: Callable[[], int], seconds: float) -> float:
    """Steps per second, once training is warm; `read` says how many were made."""
    deadline = time.monotonic() + LIMIT
    while read() < WARM:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {WARM} steps within {LIMIT:.0f} s")
        time.sleep(0.05)
    before, began = read(), time.monotonic()
    time.sleep(seconds)
    return (read() - before) / (time.monotonic() - began)


def make_job(workers: int, slowness: float, consistency: Mapping[str, int | str]) -> TrainingJob:
    entrypoint, arguments = "benchmarks.straggler:train_with_parameter_server", {"slowness": slowness}
    data = {"shuffle": False}
    return convergence.make_job(workers, consistency, arguments, entrypoint=entrypoint, data=data)


def measure_parameter_server(job: TrainingJob, seconds: float) -> float:
    from elastic_ps.local import Launcher, Options
    from elastic_ps.local.poller import fetch_status

    with tempfile.TemporaryDirectory() as root, Launcher(job, Options(root=Path(root))) as launcher:
        launcher.start()

        def steps() -> int:
            """What a worker that is not slow has computed, also what came too late to count."""
            http = launcher.status().http
            status = fetch_status(http[0]) if http else None
            return sum(m.steps + m.late for m in status.members if m.worker == 1) if status else 0

        measured = rate(steps, seconds)
        launcher.stop("measured", at_once=True)
        launcher.wait(timedelta(seconds=30))
    return measured


def measure_ddp(workers: int, slowness: float, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def number() -> int:
            with contextlib.suppress(OSError, ValueError):
                return int((directory / "step").read_text())
            return 0

        with torchrun(directory, workers, __file__, "--slowness", str(slowness)):
            return rate(number, seconds)


DDP = "torchrun DDP (gloo)"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--slowness", type=float, default=5.0, help="of one worker's forward pass")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training that are measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp is not None:
        train_with_ddp(parsed.ddp, parsed.slowness)
        return
    os.chdir(ROOT)
    kinds: dict[str, Callable[[float], float]] = {
        "sync": lambda slow: measure_parameter_server(make_job(parsed.workers, slow, {}), parsed.seconds),
        "sync, backupWorkers: 1": lambda slow: measure_parameter_server(
            make_job(parsed.workers, slow, {"backupWorkers": 1}), parsed.seconds
        ),
        "bounded, maxStaleness: 16": lambda slow: measure_parameter_server(
            make_job(parsed.workers, slow, {"mode": "bounded", "maxStaleness": 16}), parsed.seconds
        ),
        DDP: lambda slow: measure_ddp(parsed.workers, slow, parsed.seconds),
    }
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(parsed.rounds):
        for kind, measure in kinds.items():
            found[kind].append((measure(1.0), measure(parsed.slowness)))
    print(
        f"{parsed.workers} workers, one of them with a forward pass that takes {parsed.slowness:g} times as "
        "long; steps per second of each other worker"
    )
    kept = {}
    for kind, pairs in found.items():
        equal, slow = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{kind:25} all equal {equal:6.1f}   one slow {slow:6.1f}   ratio {slow / equal:5.2f}")
        kept[kind] = slow / equal
    theirs = kept.pop(DDP)
    write(parsed.json, [Figure(kind, ours, theirs, "", "DDP", more=True) for kind, ours in kept.items()])


if __name__ == "__main__":
    main()
