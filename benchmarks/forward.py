"""What would it save if layers waited for their own values, instead of `optimizer.step()` for all of them?

`python -m benchmarks.forward` (root, Linux) makes hosts out of network namespaces, whose links carry `--gbit`
each way. On some are shards, on others workers. Each worker records when its buckets come and when its
modules begin. From that its steps are worked out again as if `step()` had returned when the version was
decided, and each module had waited for its own parameters: as ByteScheduler (Peng et al. 2019, "A Generic
Communication Scheduler for Distributed DNN Training Acceleration") does it. What that saves is a bound: it is
taken for granted that computing and receiving do not slow each other down, that waiting costs nothing, and
that buffers (of BatchNorm) come first. Each setting is measured with drafts (`parameterServer.drafts`),
which overlap values with backward, and without.

It prints medians of the slowest worker: the step, how long values still come after the version is decided,
the forward, and the bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.datapath import (
    CASES,
    Batches,
    as_it_is,
    collect,
    cpu_seconds,
    make_batch,
    make_model,
    make_optimizer,
)
from benchmarks.network import Hosts, killed_at_the_end, require_alive, start_job
from elastic_ps.api.job import BUCKET_BYTES, TrainingJobSpec
from elastic_ps.core.partition import Rule, partition
from elastic_ps.worker.model.description import ModelDescription

STEPS, WARM = 24, 6
"""How many steps a worker makes, and how many of them are not measured."""

PLACES: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "1 worker, 1 shard": ((0,), (1,)),
    "2 workers, 2 shards": ((0, 1), (2, 3)),
}
"""The hosts of shards and of workers."""


class Forward(NamedTuple):
    """One forward. All times are of one clock.

    `modules`: when each module with parameters of its own begins, in order, and the buckets that it reads.
    """

    modules: Sequence[tuple[float, frozenset[int]]]
    end: float


def could_save(decided: float, arrived: Mapping[int, float], forward: Forward) -> float:
    """How much earlier a forward would end that begins when the version is decided.

    Args:
        arrived: when each bucket was there, in the same unit; those that are not in it were there before.
    """
    at, last = decided, max(arrived.values(), default=decided)  # as it would be, and as it was
    for begins, buckets in forward.modules:
        at += begins - last
        at = max([at, *(arrived[bucket] for bucket in buckets & arrived.keys())])
        last = begins
    return max(0.0, last - at)


class Recorder:
    """Notes when the modules of a model begin."""

    def __init__(self, model: torch.nn.Module, buckets: Mapping[int, frozenset[int]]) -> None:
        self._begun: list[tuple[float, frozenset[int]]] = []
        for module in model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            read = frozenset().union(*(buckets[id(tensor)] for tensor in own))
            if read:
                module.register_forward_pre_hook(
                    lambda _module, _inputs, read=read: self._begun.append((now(), read))
                )

    def take(self) -> Forward:
        """The forward that has just ended."""
        begun, self._begun = self._begun, []
        return Forward(begun, now())


def now() -> float:
    """Microseconds, by the clock of `Trace`."""
    return time.monotonic_ns() / 1000


def train(case: str, directory: str, shards: int, bucket_bytes: int) -> None:
    """What a worker of the job runs."""
    import elastic_ps

    torch.set_num_threads(1)
    chosen = CASES[case]
    session = elastic_ps.connect()
    model, shape, classes = make_model(chosen.model)
    wrapped = make_optimizer(chosen.optimizer, model)
    described = ModelDescription(model, wrapped)
    layout = partition(described.specs, bucket_bytes=bucket_bytes, shards=shards)
    optimizer = session.optimizer(wrapped, model)
    pieces = [(id(described.tensors[p.tensor]), b) for b in layout.buckets for p in b.pieces]
    buckets: dict[int, frozenset[int]] = {id(tensor): frozenset() for tensor in model.buffers()}
    for tensor, bucket in pieces:
        read = {bucket.index} if bucket.rule is Rule.GRADIENT else set()
        buckets[tensor] = buckets.get(tensor, frozenset()) | read
    recorder = Recorder(model, buckets)
    data = Batches(make_batch(shape, classes, chosen.batch), STEPS * chosen.batch * 16)
    forwards: dict[int, Forward] = {}
    ends: list[float] = []
    for number, (x, y) in enumerate(session.loader(data, chosen.batch, collate_fn=as_it_is)):
        optimizer.zero_grad()
        out = model(x)
        forwards[session.version] = recorder.take()
        torch.nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        ends.append(now())
        if number == STEPS:
            folder = Path(directory)
            (trace,) = folder.glob(f"trace/*-{os.getpid()}.jsonl")
            first = {bucket.index for bucket in layout.of_shard(0)}
            found = summary(list(pulls(trace)), first, forwards, WARM)
            steps = [b - a for a, b in itertools.pairwise(ends)][WARM:]
            found |= {"step": statistics.median(steps), "cpu": cpu_seconds()}
            path = folder / f"worker-{session.worker}.json"
            path.with_suffix(".partial").write_text(json.dumps(found))
            path.with_suffix(".partial").rename(path)


def pulls(trace: Path) -> Iterator[tuple[int, int, float]]:
    """Version, bucket and end of each pull that was no draft's."""
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if event["name"] == "pull" and not event["args"]["draft"]:
            yield event["args"]["version"], event["args"]["bucket"], event["ts"] + event["dur"]


def summary(
    pulled: Sequence[tuple[int, int, float]], first: set[int], forwards: Mapping[int, Forward], warm: int
) -> dict[str, float]:
    """The medians over the versions after `warm`.

    Args:
        first: the buckets of shard 0, which decides.
    """
    tails, lasting, saved = [], [], []
    for version, forward in forwards.items():
        arrived = {bucket: end for of, bucket, end in pulled if of == version}
        decided = min((end for bucket, end in arrived.items() if bucket in first), default=0.0)
        if version <= warm or not decided:
            continue
        there = max(arrived.values())
        tails.append(there - decided)
        lasting.append(forward.end - forward.modules[0][0])
        saved.append(could_save(decided, arrived, forward))
    return {
        "tail": statistics.median(tails),
        "forward": statistics.median(lasting),
        "bound": statistics.median(saved),
    }


def measure(
    hosts: Hosts, case: str, servers: Sequence[int], workers: Sequence[int], *, ahead: bool
) -> dict[str, float]:
    """What the slowest worker found, in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec: dict[str, Any] = {
            "entrypoint": "benchmarks.forward:train",
            "worker": {"replicas": len(workers)},
            "parameterServer": {"replicas": len(servers), "drafts": ahead, "bucketBytes": BUCKET_BYTES},
            "data": {"shuffle": False},
        }
        arguments = {"case": case, "directory": name, "shards": len(servers), "bucket_bytes": BUCKET_BYTES}
        job = TrainingJobSpec.model_validate({**spec, "arguments": arguments})
        started = start_job(hosts, job, servers, workers, directory, trace=directory / "trace")
        with killed_at_the_end(started, directory):
            collect(directory, len(workers), lambda: require_alive(started))
            found = [json.loads((directory / f"worker-{i}.json").read_text()) for i in range(len(workers))]
    slowest: dict[str, float] = max(found, key=lambda each: each["step"])
    return {what: value / 1000 for what, value in slowest.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", choices=("mlp", "resnet"), help="default: both")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, each way")
    parser.add_argument("--rounds", type=int, default=1)
    parsed = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs root, and the commands ip and tc (iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    rows = [
        (case, place, ahead)
        for case in parsed.case or ("mlp", "resnet")
        for place in PLACES
        for ahead in (1, 0)
    ]
    found: dict[Any, list[dict[str, float]]] = {row: [] for row in rows}
    hosts = Hosts(4, parsed.gbit)
    try:
        for _ in range(parsed.rounds):
            for case, place, ahead in rows:
                found[case, place, ahead].append(measure(hosts, case, *PLACES[place], ahead=bool(ahead)))
    finally:
        hosts.close()
    print(f"{'':48} {'step':>8} {'tail':>8} {'forward':>8} {'saves at most':>14}")
    for (case, place, ahead), results in found.items():
        step, tail, forward, bound = (
            statistics.median(each[what] for each in results) for what in ("step", "tail", "forward", "bound")
        )
        name = f"{CASES[case].model}, {place}{'' if ahead else ', no drafts'}"
        print(
            f"{name:48} {step:5.0f} ms {tail:5.0f} ms {forward:5.0f} ms {bound:5.1f} ms, {bound / step:.1%}"
        )


if __name__ == "__main__":
    main()
