"""A step on a CUDA device: how much of the gradients' way to the host is under backward.

`python -m benchmarks.device` trains an MLP on the device with two workers: with gradients copied while
backward runs, and with gradients copied in `optimizer.step()`. It prints the median step of the slower one,
and the share of the copies' time during which the device computes, as torch's profiler sees them. `--trace`
keeps the profiler's trace, for `chrome://tracing`. Without a device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.datapath import Batches, as_it_is
from benchmarks.figures import Figure, write

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (1024, 4096, 4096, 1024)
BATCH, STEPS, WARM, TRACED, WORKERS = 512, 60, 20, 5, 2
LIMIT = 300.0

Span = tuple[float, float]
"""Begin and end, in microseconds."""


class Found(NamedTuple):
    """Seconds a step; the share of the copies' time that is under what the device computes."""

    step: float
    under: float


def under(copies: Iterable[Span], kernels: Iterable[Span]) -> float:
    """The share of the copies' time during which a kernel runs. NaN if nothing was copied."""
    computing: list[list[float]] = []
    for begin, end in sorted(kernels):
        if computing and begin <= computing[-1][1]:
            computing[-1][1] = max(computing[-1][1], end)
        else:
            computing.append([begin, end])
    total = shared = 0.0
    for begin, end in copies:
        total += end - begin
        shared += sum(max(0.0, min(end, b) - max(begin, a)) for a, b in computing)
    return shared / total if total else float("nan")


def spans(trace: Sequence[dict[str, Any]]) -> tuple[list[Span], list[Span]]:
    """The copies to the host, and the kernels, of the profiler's trace."""
    timed = [(event, event["ts"], event["ts"] + event["dur"]) for event in trace if "dur" in event]
    copies = [(a, b) for e, a, b in timed if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    return copies, [(a, b) for e, a, b in timed if e.get("cat") == "kernel"]


def train(directory: str, overlap: bool) -> None:
    """What a worker of the job runs."""
    import elastic_ps

    session, device = elastic_ps.connect(), torch.device("cuda")
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(WIDTHS):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = session.optimizer(sgd, model, overlap=overlap)
    batch = torch.randn(BATCH, WIDTHS[0]), torch.randn(BATCH, WIDTHS[-1])
    here = batch[0].to(device), batch[1].to(device)
    profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
    ends = []
    data = Batches(batch, (STEPS + TRACED) * BATCH * WORKERS * 4)
    for number, _ in enumerate(session.loader(data, BATCH, collate_fn=as_it_is)):
        if number == STEPS:
            profiler.start()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(here[0]), here[1]).backward()
        optimizer.step()
        ends.append(time.perf_counter())
        if number == STEPS + TRACED - 1:  # the others go on until they have as many
            torch.cuda.synchronize(device)
            profiler.stop()
            path = Path(directory) / f"trace-{session.worker}.json"
            profiler.export_chrome_trace(str(path))
            steps = [b - a for a, b in itertools.pairwise(ends[WARM:STEPS])]
            share = under(*spans(json.loads(path.read_text())["traceEvents"]))
            partial = path.with_name("partial")
            partial.write_text(json.dumps([statistics.median(steps), share]))
            partial.rename(path.with_name(f"worker-{session.worker}.json"))


def measure(*, overlap: bool, trace: Path | None) -> Found:
    """Run the job once."""
    from elastic_ps.api.job import parse_job
    from elastic_ps.local import Launcher, Options

    with tempfile.TemporaryDirectory() as name:
        spec = {
            "entrypoint": "benchmarks.device:train",
            "arguments": {"directory": name, "overlap": overlap},
            "worker": {"replicas": WORKERS},
            "data": {"shuffle": False},
        }
        document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
        job = parse_job({**document, "metadata": {"name": "device"}, "spec": spec}, source="benchmark")
        paths = [Path(name) / f"worker-{index}.json" for index in range(WORKERS)]
        until = time.monotonic() + LIMIT
        with Launcher(job, Options(root=Path(name) / "run")) as launcher:
            launcher.start()
            while not all(path.exists() for path in paths):
                status = launcher.status()
                if status.phase in ("Failed", "Succeeded") or time.monotonic() > until:
                    raise RuntimeError(f"no result: {status.phase} {status.reason} {status.message}")
                time.sleep(0.2)
            launcher.stop("measured", at_once=True)
            launcher.wait(timedelta(seconds=30))
        found = [Found(*json.loads(path.read_text())) for path in paths]
        if trace is not None:
            trace.write_bytes((Path(name) / "trace-0.json").read_bytes())
    return Found(max(each.step for each in found), min(each.under for each in found))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="write the profiler's trace of worker 0 there")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing is measured.")
        write(parsed.json, [])
        return
    trace = parsed.trace.resolve() if parsed.trace else None
    os.chdir(ROOT)
    found: dict[bool, list[Found]] = {True: [], False: []}
    for _ in range(parsed.rounds):
        for overlap, results in found.items():
            results.append(measure(overlap=overlap, trace=trace if overlap else None))
    ours, theirs = (
        Found(*(statistics.median(column) for column in zip(*found[overlap], strict=True)))
        for overlap in (True, False)
    )
    for name, each in (("during backward", ours), ("in optimizer.step()", theirs)):
        print(f"copied {name:20} {each.step * 1e3:7.1f} ms a step, {each.under:4.0%} of it under computation")
    figures = [Figure("a step on CUDA", ours.step * 1e3, theirs.step * 1e3, "ms", "copies after backward")]
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
