"""What a parameter server spends: on a commit beside torch's optimizer, and for each of its workers.

`python -m benchmarks.server` makes versions of the buckets of an MLP of 10.5 M parameters out of sums that
are there, in one process and with one thread, and lets torch's fused optimizer step parameters of the same
shapes; they take turns. It prints the processor time of both. Then it runs a job with 1, 2, 4 and 8 workers,
and prints the processor time that the parameter server took for a step and worker.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.datapath import CASES, make_model, measure_parameter_server
from benchmarks.figures import Figure, write
from benchmarks.recovery import ROOT
from elastic_ps.api.job import BUCKET_BYTES
from elastic_ps.core.partition import Rule, partition
from elastic_ps.server.shards.values import BucketValues
from elastic_ps.worker.model.description import ModelDescription

SAMPLES = 64
OPTIMIZERS: dict[str, dict[str, float]] = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "Adam": {"lr": 1e-4}}


def time_of(call: Callable[[], None]) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    call()
    return time.process_time() - began


def time_commits(name: str, rounds: int) -> tuple[float, float]:
    """Seconds that a version of all buckets takes, and a step of torch's fused optimizer."""
    model, _, _ = make_model(CASES["mlp"].model)
    theirs = getattr(torch.optim, name)(model.parameters(), fused=True, **OPTIMIZERS[name])
    described = ModelDescription(model, theirs)
    settings = described.settings(theirs)
    layout = partition(described.specs, bucket_bytes=BUCKET_BYTES, shards=1)
    ours = []
    for bucket in layout.buckets:
        if bucket.rule is Rule.GRADIENT:
            values = BucketValues(bucket)
            values.build_optimizer([type(theirs)] * len(settings.groups), settings.groups, layout.tensors)
            ours.append((values, torch.randn(sum(piece.length for piece in bucket.pieces))))

    def apply() -> None:
        for values, _ in ours:
            values.apply(settings.groups, values.version + 1)

    seconds: list[tuple[float, float]] = []
    for _ in range(rounds):
        for values, gradient in ours:
            values.add(gradient, SAMPLES, (), first=True)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        seconds.append((time_of(apply), time_of(theirs.step)))
    a, b = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    return a, b


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="versions that are made")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    figures = []
    for name in OPTIMIZERS:
        ours, theirs = time_commits(name, parsed.rounds)
        print(f"{name:4} commit {ours * 1e3:6.2f} ms, torch {theirs * 1e3:6.2f} ms: {ours / theirs:.2f}")
        figures.append(Figure(f"{name}, commit", ours * 1e3, theirs * 1e3, "ms", "torch, fused"))
    spent = {}
    for count in parsed.workers:
        spent[count] = measure_parameter_server("mlp", workers=count).server / count
        print(
            f"{count} workers: {spent[count] * 1e3:6.2f} ms of the server's processor for a step and worker"
        )
    if parsed.workers:
        least = spent[parsed.workers[0]]
        figures += [
            Figure(f"{n} workers, for a step and worker", s * 1e3, least * 1e3, "ms", "one worker")
            for n, s in spent.items()
        ]
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
