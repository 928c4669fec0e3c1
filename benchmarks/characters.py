"""A language model of characters in every mode of `consistency`, and with codecs: how far from `sync`.

`python -m benchmarks.characters` trains a GPT of a million parameters on English text, a byte at a time: the
reference of Python's language and library that `help()` shows, so nothing is downloaded. The script,
optimizer and number of records are the same in every row, and each mode has its defaults. It prints the loss
on held-out text in bits per byte, by how much it is above that of the row that it is compared with, which is
`sync` for most, and the shares of that row's bytes. Its exit status is 1 if a loss is more than `--margin`
percent above.

`--rows codec` trains with codecs instead of in all modes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.convergence import ROOT, Run, make_job, measure
from benchmarks.figures import Figure, write
from elastic_ps.api.consistency import OUTER_RULES

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "sgd without momentum": torch.optim.SGD,
}

CONTEXT = 64
TESTED = 128
"""Pieces of held-out text."""


def english() -> torch.Tensor:
    """What `help()` says of each topic, as bytes: some 0.5 million; which ones depends on the Python."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def train(epochs: int, lr: float, share: float, batch: int, optimizer: str) -> None:
    """What a worker runs, on this share of the text, with one of `OPTIMIZERS`."""
    import elastic_ps
    from elastic_ps.contrib.datasets.text import Text
    from elastic_ps.contrib.models import GPT

    torch.set_num_threads(1)
    text = english()
    held_out = TESTED * CONTEXT + 1
    training = Text(text[: int(share * (len(text) - held_out))], CONTEXT)
    test = Text(text[-held_out:], CONTEXT)
    torch.manual_seed(1)
    model = GPT(context=CONTEXT, width=144)
    session = elastic_ps.connect()
    elastic = session.optimizer(OPTIMIZERS[optimizer](model.parameters(), lr=lr), model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(elastic, len(training) * epochs)
    session.scheduler(cosine, interval="sample")
    for x, y in session.loader(training, batch_size=batch, epochs=epochs):
        elastic.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        session.report(loss=loss)
        elastic.step()
    if session.is_chief:
        pieces = torch.utils.data.DataLoader(test, batch_size=16)
        with torch.no_grad():
            losses = [loss_of(model, x, y).item() for x, y in pieces]
        session.report(test_loss=sum(losses) / len(losses))


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Row(NamedTuple):
    """A training. `against` is the row that it is compared with; `optimizer` replaces the command's."""

    consistency: Mapping[str, Any] = {}
    compression: Mapping[str, Any] = {}
    against: str = "sync"
    optimizer: str | None = None


def rows(workers: int, steps: int, batch: int) -> Mapping[str, Row]:
    """The modes with their defaults, and those with codecs, whose names begin so.

    A row comes after the one that it is compared with.
    """
    local = {"mode": "local", "steps": steps}
    each = {"mode": "local", "steps": 1, "outer": "average"}
    # The next two are to be compared with --optimizer sgd.
    masked = {"codec": "topk", "options": {"momentum": 0.9}}
    both = {**masked, "values": "changed", "lossless": "zstd"}
    warm = {"codec": "topk", "options": {"warmup": 100}}
    warm_masked = {"codec": "topk", "options": {"momentum": 0.9, "warmup": 200}}
    return {
        "sync": Row(),
        "backupWorkers": Row({"backupWorkers": 1}),
        "globalBatchSize": Row({"globalBatchSize": workers * batch, "balance": "speed"}),
        "accumulate": Row({"mode": "accumulate", "gradients": workers}),
        "bounded": Row({"mode": "bounded", "maxStaleness": 4}),
        "async": Row({"mode": "async"}),
        "async, inconsistent": Row({"mode": "async", "reads": "inconsistent"}),
        **{f"local, {outer}": Row({**local, "outer": outer}) for outer in OUTER_RULES},
        "codec int8": Row({}, {"codec": "int8"}),
        "codec topk": Row({}, {"codec": "topk"}),
        "codec none, steps: 1": Row(each),
        "codec topk, steps: 1": Row(each, {"codec": "topk"}),
        "codec topk 5 %, steps: 1": Row(each, {"codec": "topk", "options": {"ratio": 0.05}}),
        "codec topk, steps: 1, warmup": Row(each, warm),
        "codec topk, momentum": Row({}, masked, optimizer="sgd without momentum"),
        "codec topk, momentum, warmup": Row({}, warm_masked, optimizer="sgd without momentum"),
        "codec topk, momentum, values changed": Row({}, both, optimizer="sgd without momentum"),
        "codec int4, diloco": Row(local, {"codec": "int4"}, against="local, diloco"),
    }


def chosen(all_rows: Mapping[str, Row], wanted: Sequence[str]) -> list[str]:
    """The names that begin with a wanted one, and those that they are compared with; modes by default."""
    named = [
        name
        for name in all_rows
        if (any(map(name.startswith, wanted)) if wanted else not name.startswith("codec"))
    ]
    needed = {"sync", *named, *(all_rows[name].against for name in named)}
    return [name for name in all_rows if name in needed]


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the text")
    parser.add_argument("--batch", type=int, default=4, help="pieces of 64 bytes for each step of a worker")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    parser.add_argument("--lr", type=float, default=3e-4, help="1e-3 is too much for stale steps")
    parser.add_argument("--steps", type=int, default=20, help="of mode local")
    parser.add_argument("--rows", nargs="*", default=[], help="those that begin so; all modes by default")
    parser.add_argument("--margin", type=float, default=3.0, help="percent")
    parser.add_argument("--seed", type=int, default=0, help="of the records' order")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    arguments = {name: getattr(parsed, name) for name in ("epochs", "lr", "share", "batch", "optimizer")}
    all_rows = rows(parsed.workers, parsed.steps, parsed.batch)
    runs: dict[str, Run] = {}
    print(
        f"{'':36} seconds  versions  bits per byte  compared with   above  most stale  bytes pushed  pulled"
    )
    for name in chosen(all_rows, parsed.rows):
        row = all_rows[name]
        settings: dict[str, Any] = {**arguments, "optimizer": row.optimizer or parsed.optimizer}
        job = make_job(
            parsed.workers,
            row.consistency,
            settings,
            entrypoint="benchmarks.characters:train",
            compression=dict(row.compression),
            data={"seed": parsed.seed},
        )
        run = runs[name] = measure(job, score="test_loss", limit=timedelta(hours=1))
        other = runs[row.against]
        print(
            f"{name:36} {run.seconds:7.0f} {run.versions:9} {run.score / math.log(2):14.3f} "
            f"{row.against:>14} {above(run, other):+6.1f} % {run.stale:11} {run.pushed / other.pushed:13.2%} "
            f"{run.pulled / other.pulled:7.2%}",
            flush=True,
        )
    figures = [
        Figure(name, run.score / math.log(2), runs[against].score / math.log(2), "bits", against)
        for name, run in runs.items()
        if (against := all_rows[name].against) != name
    ]
    write(parsed.json, figures)
    too_far = [name for name, run in runs.items() if above(run, runs[all_rows[name].against]) > parsed.margin]
    for name in too_far:
        print(f"{name} is more than {parsed.margin:g} % above {all_rows[name].against}")
    return 1 if too_far else 0


def above(run: Run, other: Run) -> float:
    """By how many percent its loss is above the other one's."""
    return 100 * (run.score / other.score - 1)


if __name__ == "__main__":
    sys.exit(main())
