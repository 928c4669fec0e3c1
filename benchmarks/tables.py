"""A step of a large embedding: elastic-ps with sparse gradients, beside DDP with dense ones and one process.

`python -m benchmarks.tables` trains a table of a million rows of 16 float32. Records look up 26 rows each, by
a Zipf distribution. It prints the median step of

- a job of elastic-ps with one parameter server in mode `sync`, with `sparse=True`;
- DistributedDataParallel (gloo) with `sparse=False`, since it fails on sparse gradients;
- one process with `sparse=True`, which sends nothing;

and that of elastic-ps with a table four times as large. They take turns. Loading records is not measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure, write
from elastic_ps.api.job import parse_job
from elastic_ps.local import Launcher, Options

ROOT = Path(__file__).resolve().parent.parent
FIELDS, WIDTH = 26, 16
WARM, STEPS = 20, 100
"""Steps before the measurement, and in all."""
LIMIT = timedelta(minutes=10)


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers of so many records."""

    def __init__(self, records: int) -> None:
        self._records = records

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> int:
        return index


class Model(torch.nn.Module):
    """The rows of a record's fields, and a small network on them."""

    def __init__(self, rows: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, WIDTH, sparse=sparse)
        self.rest = torch.nn.Sequential(
            torch.nn.Linear(FIELDS * WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.table(ids).flatten(1))
        return out


def zipf(records: int, rows: int) -> torch.Tensor:
    """The ids of records: rank r is looked up about in proportion to 1 / r, and ranks are scattered."""
    random = torch.Generator().manual_seed(0)
    ranks = torch.exp(
        torch.rand(records, FIELDS, generator=random, dtype=torch.float64) * torch.tensor(rows).log()
    )
    return (ranks.long() * 2_654_435_761) % rows


def run(model: Any, optimizer: Any, batches: Iterable[torch.Tensor], rows: int) -> float:
    """Train on batches of the numbers of records; returns the median step in milliseconds."""
    ids, seconds = zipf(1 << 16, rows), []
    for numbers in batches:
        looked_up = ids[numbers % len(ids)]
        began = time.perf_counter()
        optimizer.zero_grad()
        model(looked_up).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:]) * 1e3


def train(path: str, rows: int, batch: int, workers: int) -> None:
    """What a worker of elastic-ps runs."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = Model(rows, sparse=True)
    optimizer = session.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01), model)
    median = run(model, optimizer, session.loader(Numbers(STEPS * batch * workers), batch), rows)
    if session.worker == 0:
        Path(path).write_text(str(median))


def train_without(path: str, rows: int, batch: int, *, ddp: bool) -> None:
    """What one process runs, or each rank of DistributedDataParallel."""
    torch.set_num_threads(1)
    model: torch.nn.Module = Model(rows, sparse=not ddp)
    if ddp:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Numbers(STEPS * batch), batch)
    median = run(model, optimizer, loader, rows)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(path).write_text(str(median))
    if ddp:
        torch.distributed.destroy_process_group()


def elastic(rows: int, batch: int, workers: int) -> float:
    """The median step of elastic-ps, in milliseconds."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "median"
        spec = {
            "entrypoint": "benchmarks.tables:train",
            "arguments": {"path": str(path), "rows": rows, "batch": batch, "workers": workers},
            "worker": {"replicas": workers},
            "parameterServer": {"checkpoint": {"interval": "1h"}},
            "data": {"shuffle": False},
        }
        job = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "spec": spec}
        parsed = parse_job({**job, "metadata": {"name": "benchmark"}}, source="benchmark")
        with Launcher(parsed, Options(root=Path(root))) as launcher:
            launcher.start()
            launcher.wait(LIMIT)
        return float(path.read_text())


def without(rows: int, batch: int, workers: int) -> float:
    """The median step of DistributedDataParallel, or with one worker of one process, in milliseconds."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "median"
        command = [sys.executable]
        if workers > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command += [__file__, "--train", str(path), "--rows", str(rows), "--batch", str(batch)]
        command += ["--workers", str(workers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, timeout=LIMIT.total_seconds())
        return float(path.read_text())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512, help="records of a worker's batch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    rows, batch, workers = parsed.rows, parsed.batch, parsed.workers
    if parsed.train:
        train_without(parsed.train, rows, batch, ddp=workers > 1)
        return
    os.chdir(ROOT)
    found: dict[str, list[float]] = {"elastic-ps": [], "DDP": [], "one process": [], "a larger table": []}
    for number in range(parsed.rounds):
        found["elastic-ps"].append(elastic(rows, batch, workers))
        found["DDP"].append(without(rows, batch, workers))
        found["one process"].append(without(rows, batch, 1))
        found["a larger table"].append(elastic(4 * rows, batch, workers))
        steps = ", ".join(f"{name} {values[-1]:.1f}" for name, values in found.items())
        print(f"round {number + 1}: {steps} ms", flush=True)
    median = {name: statistics.median(values) for name, values in found.items()}
    ours = median["elastic-ps"]
    print(f"{workers} workers, batches of {batch}, {FIELDS} ids each, {rows:,} rows of {WIDTH} float32")
    for name, value in median.items():
        print(f"{name:16}{value:10.2f} ms    elastic-ps / this {ours / value:6.2f}")
    what = f"{rows:,} rows, {workers} workers, batches of {batch}"
    write(
        parsed.json,
        [Figure(what, ours, median[name], "ms", name) for name in ("DDP", "one process", "a larger table")],
    )


if __name__ == "__main__":
    main()
