"""A language model of characters in every mode of `consistency`: how far from `sync` each ends.

`python -m benchmarks.characters` trains a GPT of a million parameters on English text, a byte at a time: the
reference of Python's language and library that `help()` shows, so nothing is downloaded. The script,
optimizer and number of epochs are the same in every mode. It prints the loss on held-out text in bits per
byte, and by how much it is above that of `sync`. Its exit status is 1 if that is more than `--margin` in any
mode.

`--compression '{"codec": "int8"}'` trains with a codec.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from benchmarks.convergence import ROOT, Run, make_job, measure

BATCH, CONTEXT = 16, 64
TESTED = 128
"""Pieces of held-out text."""


def english() -> torch.Tensor:
    """What `help()` says of each topic, as bytes: some 0.5 million; which ones depends on the Python."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def train(epochs: int, lr: float, share: float) -> None:
    """What a worker runs, on this share of the text."""
    import elastic_ps
    from elastic_ps.datasets.text import Text
    from elastic_ps.models import GPT

    torch.set_num_threads(1)
    text = english()
    held_out = TESTED * CONTEXT + 1
    training = Text(text[: int(share * (len(text) - held_out))], CONTEXT)
    test = Text(text[-held_out:], CONTEXT)
    torch.manual_seed(1)
    model = GPT(context=CONTEXT, width=144)
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)
    for x, y in session.loader(training, batch_size=BATCH, epochs=epochs):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
    if session.is_chief:
        pieces = torch.utils.data.DataLoader(test, batch_size=BATCH)
        with torch.no_grad():
            losses = [loss_of(model, x, y).item() for x, y in pieces]
        session.report(test_loss=sum(losses) / len(losses))


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def modes(workers: int, steps: int) -> Mapping[str, Mapping[str, Any]]:
    """The modes as they are to be set for this model."""
    local = {"mode": "local", "steps": steps}
    return {
        "sync": {},
        "backupWorkers": {"backupWorkers": 1},
        "globalBatchSize": {"globalBatchSize": workers * BATCH, "balance": "speed"},
        "accumulate": {"mode": "accumulate", "gradients": workers},
        "bounded": {"mode": "bounded", "maxStaleness": 4},
        "async": {"mode": "async", "stalenessScale": "inverse"},
        "local, diloco": {**local, "outer": "diloco", "outerMomentum": 0.9 if steps >= 100 else 0.6},
        "local, average": {**local, "outer": "average"},
        "local, easgd": {**local, "outer": "easgd"},
        "local, downpour": {**local, "outer": "downpour", "outerLearningRate": 1 / workers},
    }


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.3, help="of the text")
    parser.add_argument("--lr", type=float, default=3e-4, help="1e-3 is too much for stale steps")
    parser.add_argument("--steps", type=int, default=20, help="of mode local")
    parser.add_argument(
        "--modes", nargs="*", default=[""], help="those that begin so, beside sync; all by default"
    )
    parser.add_argument("--margin", type=float, default=0.3, help="bits per byte above sync")
    parser.add_argument("--compression", type=json.loads, default={}, help="as in a job, as JSON")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    arguments = {name: getattr(parsed, name) for name in ("epochs", "lr", "share")}
    runs: dict[str, Run] = {}
    print(f"{'mode':20} seconds  samples/s  bits per byte  above sync  most stale  bytes pushed per sample")
    for name, consistency in modes(parsed.workers, parsed.steps).items():
        if name != "sync" and not any(name.startswith(wanted) for wanted in parsed.modes):
            continue
        job = make_job(
            parsed.workers,
            consistency,
            arguments,
            entrypoint="benchmarks.characters:train",
            compression=parsed.compression,
        )
        run = runs[name] = measure(job, score="test_loss", limit=timedelta(hours=1))
        print(
            f"{name:20} {run.seconds:7.1f} {run.samples / max(run.seconds, 1e-9):10.0f} "
            f"{run.score / math.log(2):14.3f} {above(run, runs['sync']):11.3f} {run.stale:11} "
            f"{run.pushed / run.samples:24.1f}",
            flush=True,
        )
    too_far = [name for name, run in runs.items() if above(run, runs["sync"]) > parsed.margin]
    for name in too_far:
        print(f"{name} is more than {parsed.margin:g} bits per byte above sync")
    return 1 if too_far else 0


def above(run: Run, sync: Run) -> float:
    """In bits per byte."""
    return (run.score - sync.score) / math.log(2)


if __name__ == "__main__":
    sys.exit(main())
