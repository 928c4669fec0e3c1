"""A step of a large embedding: elastic-ps with sparse gradients, beside DDP with dense ones and one process.

`python -m benchmarks.tables` trains a table of a million rows of 16 float32. Records look up 26 rows each, by
a Zipf distribution. It prints the median step of

- a job of elastic-ps with one parameter server in mode `sync`, with `sparse=True`;
- DistributedDataParallel (gloo) with `sparse=False`, since it fails on sparse gradients;
- one process with `sparse=True`, which sends nothing;

and that of elastic-ps with a table four times as large. They take turns. Loading records is not measured.

With `--known 10000000` elastic-ps has a table that grows instead, in which so many rows are made before, and
then the same one while the rows of the next batch are fetched during a step. Two more compare the sizes of
tables: one has a tenth of the rows, and one twice as many, of which as few are looked up as in the small one.
The network is DeepFM's: a factorization machine beside a feed-forward network. With N workers a step has N
times as many records as one of one process, so N of the latter's steps are compared.
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

import elastic_ps
from benchmarks.figures import Figure, write
from elastic_ps.api.job import parse_job
from elastic_ps.contrib.models.tables import interactions
from elastic_ps.embedding import Adagrad
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
    """The rows of a record's fields, their interactions, and a small network on them."""

    def __init__(self, rows: int, *, kind: str) -> None:
        super().__init__()
        self.table: torch.nn.Module
        if kind == "growing":
            self.table = elastic_ps.Embedding("rows", WIDTH, optimizer=Adagrad(lr=0.01))
        else:
            self.table = torch.nn.Embedding(rows, WIDTH, sparse=kind == "sparse")
        self.rest = torch.nn.Sequential(
            torch.nn.Linear(FIELDS * WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.table(ids)
        out: torch.Tensor = self.rest(vectors.flatten(1)).squeeze(1) + interactions(vectors)
        return out


def zipf(records: int, rows: int, ranks: int) -> torch.Tensor:
    """The ids of records: rank r is looked up about in proportion to 1 / r, and ranks are scattered."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.rand(records, FIELDS, generator=random, dtype=torch.float64)
    drawn = torch.exp(drawn * torch.tensor(ranks, dtype=torch.float64).log())
    return (drawn.long() * 2_654_435_761) % rows


class Looked:
    """The ids of records, by their numbers: the first `filling` records have each row once.

    `used`: how many of the rows the others look up.
    """

    def __init__(self, rows: int, used: int, filling: int = 0) -> None:
        self._ids, self._rows, self._filling = zipf(1 << 16, rows, used), rows, filling

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        if int(numbers[0]) < self._filling:
            return (numbers[:, None] * FIELDS + torch.arange(FIELDS)) % self._rows
        return self._ids[numbers % len(self._ids)]


def run(model: Any, optimizer: Any, batches: Iterable[torch.Tensor], look: Looked) -> float:
    """Train on batches of the numbers of records; returns the median step in milliseconds."""
    seconds: list[float] = []
    for numbers in batches:
        looked_up = look(numbers)
        began = time.perf_counter()
        optimizer.zero_grad()
        model(looked_up).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM - STEPS :]) * 1e3


def train(path: str, rows: int, used: int, batch: int, workers: int, kind: str, ahead: bool) -> None:
    """What a worker of elastic-ps runs."""
    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = Model(rows, kind=kind)
    optimizer = session.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01), model)
    together = batch * workers
    filling = -(-rows // (FIELDS * together)) * together if kind == "growing" else 0
    look, records = Looked(rows, used, filling), Numbers(filling + STEPS * together)
    prefetch = (lambda numbers: {"rows": look(numbers)}) if ahead else None
    median = run(model, optimizer, session.loader(records, batch, prefetch=prefetch), look)
    if session.worker == 0:
        Path(path).write_text(str(median))


def train_without(path: str, rows: int, batch: int, *, ddp: bool) -> None:
    """What one process runs, or each rank of DistributedDataParallel."""
    torch.set_num_threads(1)
    model: torch.nn.Module = Model(rows, kind="dense" if ddp else "sparse")
    if ddp:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, fused=ddp)
    loader = torch.utils.data.DataLoader(Numbers(STEPS * batch), batch)
    median = run(model, optimizer, loader, Looked(rows, rows))
    if int(os.environ.get("RANK", "0")) == 0:
        Path(path).write_text(str(median))
    if ddp:
        torch.distributed.destroy_process_group()


def elastic(rows: int, batch: int, workers: int, kind: str, *, used: int = 0, ahead: bool = False) -> float:
    """The median step of elastic-ps, in milliseconds. `used`: how many rows are looked up, if not all."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "median"
        spec = {
            "entrypoint": "benchmarks.tables:train",
            "arguments": {
                "path": str(path),
                "rows": rows,
                "used": used or rows,
                "batch": batch,
                "workers": workers,
                "kind": kind,
                "ahead": ahead,
            },
            "worker": {"replicas": workers},
            "parameterServer": {"checkpoint": {"interval": "1h"}},
            "data": {"shuffle": False},
        }
        job = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "spec": spec}
        parsed = parse_job({**job, "metadata": {"name": "benchmark"}}, source="benchmark")
        with Launcher(parsed, Options(root=Path(root))) as launcher:
            launcher.start()
            launcher.wait(LIMIT)
            server = launcher.status().server
            for table in server.tables if ahead and server else []:
                share = table.used_ahead / max(1, table.used)
                print(f"{share:.0%} of the rows were used as they had been fetched ahead")
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
    parser.add_argument("--known", type=int, default=0, help="rows of a table that grows")
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
    kind, size = ("growing", parsed.known) if parsed.known else ("sparse", rows)
    found: dict[str, list[float]] = {"elastic-ps": [], "DDP": [], "steps of one process": []}
    few = size // 10 if parsed.known else size
    large = (2 if parsed.known else 4) * size
    of_large = f"{few:,} of {large:,} rows"
    found[of_large] = []
    if parsed.known:
        found |= {f"{few:,} rows": [], "fetched ahead": []}
    for number in range(parsed.rounds):
        found["elastic-ps"].append(elastic(size, batch, workers, kind))
        found["DDP"].append(without(rows, batch, workers))
        found["steps of one process"].append(without(rows, batch, 1) * workers)
        found[of_large].append(elastic(large, batch, workers, kind, used=few))
        if parsed.known:
            found[f"{few:,} rows"].append(elastic(few, batch, workers, kind))
            found["fetched ahead"].append(elastic(size, batch, workers, kind, ahead=True))
        steps = ", ".join(f"{name} {values[-1]:.1f}" for name, values in found.items())
        print(f"round {number + 1}: {steps} ms", flush=True)
    median = {name: statistics.median(values) for name, values in found.items()}
    ours = median["elastic-ps"]
    print(f"{workers} workers, batches of {batch}, {FIELDS} ids each, {rows:,} rows of {WIDTH} float32")
    for name, value in median.items():
        print(f"{name:28}{value:10.2f} ms    elastic-ps / this {ours / value:6.2f}")
    what = f"{size:,} rows, {workers} workers, batches of {batch}"
    others = [name for name in ("DDP", "steps of one process", "fetched ahead") if name in found]
    figures = [Figure(what, ours, median[name], "ms", name) for name in others]
    beside = f"{few:,} rows" if parsed.known else "elastic-ps"
    larger = median[of_large]
    what = f"a table of {large:,} rows, of which {few:,} are looked up"
    figures.append(Figure(what, larger, median[beside], "ms", f"a table of {few:,} rows"))
    print(f"{what}: {larger / median[beside]:.2f} of the time of a table of {few:,}")
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
