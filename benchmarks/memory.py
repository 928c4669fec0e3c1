"""How much memory a parameter server takes while it writes checkpoints, beside a rank of DDP.

`python -m benchmarks.memory` trains 26.2 million parameters (100 MiB) with Adam and two processes that
compute: as a job of elastic-ps that writes a checkpoint every two seconds, without and with a standby, and
with DistributedDataParallel (gloo) under `torchrun`, which writes none. It prints the largest memory of the
parameter server and of a rank, beside what neither can do without: values, Adam's state and one gradient.

Memory is the proportional share (PSS) that Linux tells of a process, but for what it shares with workers of
the same host: the values, which they read, count wholly, and their gradients, which it reads, not at all.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.figures import Figure, write
from benchmarks.recovery import ROOT, torchrun, until

WIDTH, LAYERS, BATCH, RECORDS = 1024, 25, 2, 1_000_000
MIB = 1 << 20
NEEDED = 4 * 4 * WIDTH * WIDTH * LAYERS
"""Bytes of values, Adam's two averages, and one gradient, in float32."""
OWN = 150 * MIB
"""What a process may take besides: Python, torch and its libraries."""


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


class Records(torch.utils.data.Dataset[torch.Tensor]):
    """Records of which it does not matter here what is in them."""

    def __init__(self) -> None:
        self.x = torch.randn(WIDTH)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def train_with_parameter_server() -> None:
    """What a worker of the job runs."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_model()
    optimizer = session.optimizer(make_optimizer(model), model)
    for x in session.loader(Records(), BATCH):
        train(model, optimizer, x)


def train_with_ddp(directory: Path) -> None:
    """What `torchrun` runs in each rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer, x = make_optimizer(model), torch.randn(BATCH, WIDTH)
    train(model, optimizer, x)
    (directory / f"rank-{torch.distributed.get_rank()}.pid").write_text(str(os.getpid()))
    while True:
        train(model, optimizer, x)


def memory_of(pid: int) -> int:
    """Bytes of a process; see above."""
    total, counts = 0, "Pss"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, value, *_ = line.split(maxsplit=2)
        if not name.endswith(":"):  # the next mapping
            shared, others = value.endswith("s"), "w" not in value
            counts = "Pss" if not shared else "" if others else "Rss"
        elif name[:-1] == counts:
            total += int(value) * 1024
    return total


def peaks(pids: Sequence[int], seconds: float, look: Callable[[], None] = lambda: None) -> list[int]:
    """The largest memory of each process in this time, in bytes."""
    found, end = [0] * len(pids), time.monotonic() + seconds
    while time.monotonic() < end:
        found = [max(before, memory_of(pid)) for before, pid in zip(found, pids, strict=True)]
        look()
        time.sleep(0.02)
    return found


def measure_parameter_server(seconds: float, interval: float, durability: str) -> tuple[int, int, int, int]:
    """The peak of the parameter server and of its standby in bytes, versions, and checkpoints."""
    from elastic_ps.api.job import parse_job
    from elastic_ps.local import Launcher, Options
    from elastic_ps.local.poller import fetch_status

    checkpoint = {"interval": f"{round(interval * 1000)}ms"}
    spec = {
        "entrypoint": "benchmarks.memory:train_with_parameter_server",
        "worker": {"replicas": 2},
        "parameterServer": {"checkpoint": checkpoint, "durability": durability},
        "data": {"shuffle": False},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    job = parse_job({**document, "metadata": {"name": "benchmark"}, "spec": spec}, source="benchmark")
    with tempfile.TemporaryDirectory() as root, Launcher(job, Options(root=Path(root))) as launcher:
        launcher.start()

        def version() -> int:
            status = fetch_status(launcher.status().http[0]) if launcher.status().http else None
            follows = status is not None and all(status.standbys)
            return status.progress.version if status is not None and follows else 0

        until(lambda: version() >= 3, "three versions are made, and the standby follows")
        pids = [p.pid for role in ("ps", "standby") for p in launcher.status().processes if p.role == role]
        first, durable, last = version(), set[int](), 0.0

        def look() -> None:
            nonlocal last
            if time.monotonic() > last + 0.5:
                last = time.monotonic()
                status = fetch_status(launcher.status().http[0])
                if status is not None and status.progress.durable_version is not None:
                    durable.add(status.progress.durable_version)

        found = peaks(pids, seconds, look)
        versions = version() - first
        launcher.stop("measured", at_once=True)
        launcher.wait(timedelta(seconds=30))
    return found[0], max(found[1:], default=0), versions, len(durable)


def measure_ddp(seconds: float) -> int:
    """The peak of a rank in bytes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with torchrun(directory, 2, __file__):
            until(lambda: len(list(directory.glob("rank-*.pid"))) == 2, "two ranks train")
            time.sleep(1)
            pids = [int(path.read_text()) for path in directory.glob("rank-*.pid")]
            return max(peaks(pids, seconds))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="for how long memory is looked at")
    parser.add_argument("--interval", type=float, default=2, help="seconds between checkpoints")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp is not None:
        train_with_ddp(parsed.ddp)
        return
    os.chdir(ROOT)
    theirs, figures = measure_ddp(min(parsed.seconds, 10)), []
    for durability in ("checkpoint", "standby"):
        ours, follower, versions, durable = measure_parameter_server(
            parsed.seconds, parsed.interval, durability
        )
        print(f"durability {durability}: {versions} versions, {durable} checkpoints in {parsed.seconds:g} s")
        each = {"parameter server": ours, "standby": follower}
        for what, peak in {what: peak for what, peak in each.items() if peak}.items():
            print(
                f"  {what:16} {peak / MIB:6.0f} MiB, {peak / NEEDED:.2f} times values, state and sum; "
                f"{(peak - OWN) / NEEDED:.2f} without {OWN // MIB} MiB of its own"
            )
        name = f"parameter server, durability {durability}"
        figures.append(Figure(name, ours / MIB, theirs / MIB, "MiB", "a rank of DDP"))
    own = (theirs - OWN) / NEEDED
    print(f"a rank of DDP      {theirs / MIB:6.0f} MiB, {theirs / NEEDED:.2f} times; {own:.2f}")
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
