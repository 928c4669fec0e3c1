"""Rows that a table looks up and updates in a second, beside torch.nn.EmbeddingBag and a dictionary of rows.

`python -m benchmarks.rows` fills a table with a million rows of 16 values, and looks up and updates rows
of batches whose ids follow Zipf's law, as in click logs, in one process with one thread.
torch.nn.EmbeddingBag on the same rows is the limit: it has no hash table, and its ids are row numbers. A
dictionary of numpy rows is what a plain Python server has. The three take turns. Times are of the
processor. A batch has 26 ids of each of 2,048 records; look-ups get each id once, and so do updates, as the
layers ask.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Figure, write
from elastic_ps.embedding import Adagrad, Table, TableSpec, uniform
from elastic_ps.embedding.init import Ids, mixed

DIM = 16
BATCH = 26 * 2048
LR = 0.05


def id_of(ranks: Ids) -> Ids:
    """Ids that are spread over int64, as hashes of strings are."""
    return mixed(ranks.astype(np.uint64)).view(np.int64)


def batch(generator: np.random.Generator, rows: int) -> Ids:
    """The ranks of the rows of a batch, each once: Zipf's law with the exponent 1.05."""
    drawn = generator.random(BATCH) ** (-1 / 0.05)
    return np.unique(np.minimum(drawn, 2.0**62).astype(np.int64) % rows)


class Ours:
    """A table."""

    def __init__(self, rows: int) -> None:
        spec = TableSpec(name="a", dim=DIM, init=uniform(-0.1, 0.1), optimizer=Adagrad(lr=LR))
        self.table = Table(spec)
        for start in range(0, rows, BATCH):
            self.update(np.arange(start, min(start + BATCH, rows)))

    def look_up(self, ranks: Ids) -> None:
        self.table.lookup(id_of(ranks))

    def update(self, ranks: Ids) -> None:
        counts = np.ones(len(ranks), dtype=np.int64)
        self.table.update(id_of(ranks), torch.ones(len(ranks), DIM), counts, self.table.version + 1)


class Torch:
    """torch.nn.EmbeddingBag with sparse gradients, and torch.optim.Adagrad. The ids are row numbers."""

    def __init__(self, rows: int) -> None:
        self.bag = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=LR)

    def look_up(self, ranks: Ids) -> None:
        with torch.no_grad():
            self.bag(torch.from_numpy(ranks), torch.arange(len(ranks)))

    def update(self, ranks: Ids) -> None:
        where, values = torch.from_numpy(ranks)[None], torch.ones(len(ranks), DIM)
        size = tuple(self.bag.weight.shape)
        self.bag.weight.grad = torch.sparse_coo_tensor(
            where, values, size, is_coalesced=True, check_invariants=False
        )
        self.optimizer.step()


class Dictionary:
    """A dictionary of rows and sums of squares, which numpy computes with when they are gathered."""

    def __init__(self, rows: int) -> None:
        ids = id_of(np.arange(rows)).tolist()
        values = np.zeros((rows, 2, DIM), dtype=np.float32)
        self.rows = dict(zip(ids, values, strict=True))

    def look_up(self, ranks: Ids) -> None:
        rows = self.rows
        np.stack([rows[id_][0] for id_ in id_of(ranks).tolist()])

    def update(self, ranks: Ids) -> None:
        rows = [self.rows[id_] for id_ in id_of(ranks).tolist()]
        gathered = np.stack(rows)
        gathered[:, 1] += 1
        gathered[:, 0] -= LR / (np.sqrt(gathered[:, 1]) + 1e-10)
        for row, changed in zip(rows, gathered, strict=True):
            row[:] = changed


def time_of(call: Callable[[Ids], None], ranks: Ids) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    call(ranks)
    return time.process_time() - began


def memory(rows: int) -> tuple[float, float]:
    """Bytes of a row beside values and slots, as the table counts them, and GB that this process grows."""
    before = resident()
    ours = Ours(rows)
    overhead = ours.table.nbytes / len(ours.table) - DIM * 4 * 2
    return overhead, (resident() - before) / 1e9


def resident() -> int:
    """The memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="in each of the three")
    parser.add_argument("--rounds", type=int, default=20, help="batches")
    parser.add_argument("--large", type=int, default=0, help="fill a table with so many rows, for its memory")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    if parsed.large:
        overhead, gigabytes = memory(parsed.large)
        print(f"{parsed.large} rows: {gigabytes:.2f} GB, {overhead:.1f} bytes a row beside values and slots")
        figures.append(Figure("bytes of a row beside values and slots", overhead, 24, "B", "target"))
        least = parsed.large * DIM * 4 * 2 / 1e9
        figures.append(Figure(f"{parsed.large:,} rows", gigabytes, least, "GB", "their values and slots"))
    ours, dictionary, theirs = Ours(parsed.rows), Dictionary(parsed.rows), Torch(parsed.rows)
    generator = np.random.default_rng(0)
    for name, calls in (
        ("look-up", (ours.look_up, theirs.look_up, dictionary.look_up)),
        ("update", (ours.update, theirs.update, dictionary.update)),
    ):
        speeds: list[list[float]] = []
        for _ in range(parsed.rounds):
            ranks = batch(generator, parsed.rows)
            speeds.append([len(ranks) / time_of(call, ranks) for call in calls])
        rates = [statistics.median(column) / 1e6 for column in zip(*speeds, strict=True)]
        print("{:8} table {:.2f} M rows/s, EmbeddingBag {:.2f}, dictionary {:.2f}".format(name, *rates))
        for rate, competitor in zip(rates[1:], ("torch.nn.EmbeddingBag", "a dictionary"), strict=True):
            figures.append(Figure(name, rates[0], rate, "M rows/s", competitor, more=True))
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
