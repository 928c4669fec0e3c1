"""A whole job of a large model: its beginning, its end, its steps and its memory, beside `torchrun`.

`python -m benchmarks.gpt` trains a GPT of 124 million parameters with AdamW and two processes that compute,
for twelve steps: with `elastic-ps run` (one parameter server), and with DistributedDataParallel (gloo) under
`torchrun`, which writes nothing to disk. They take turns. It prints, as medians over the rounds,

- the seconds from the command to its end,
- the seconds of the slowest process in `session.optimizer`, beside those in `DistributedDataParallel(...)`,
- the median time of a step of the slowest process,
- the seconds from the last step of a script to the end of its loop over the records, and to the command's,
- the largest memory of all processes together: the sum of their proportional shares (PSS) as Linux has them.

With `--writing` a third job writes one checkpoint after the other, and the rate of its steps is compared with
that of the first job. `--small` trains a model of 26 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.figures import Figure, write
from benchmarks.startup import ROOT, STAMPS, directory

CONTEXT, BATCH, WORKERS = 64, 2, 2
LARGE = {"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12}
SMALL = {"vocabulary": 13000, "width": 512, "layers": 6, "heads": 8}
LIMIT = 580.0
GIB = 1 << 30


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of text of which it does not matter here what is in them."""

    def __init__(self, records: int, vocabulary: int) -> None:
        self._records = records
        same = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (CONTEXT + 1,), generator=same)

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[:-1], self._tokens[1:]


class Stamps:
    """When this process came to which place; written to a file at its end."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def stamp(self, what: str) -> None:
        self._times[what].append(time.time())

    def save(self) -> None:
        (Path(os.environ[STAMPS]) / f"{os.getpid()}.json").write_text(json.dumps(self._times))


def make_model(size: Mapping[str, int]) -> torch.nn.Module:
    from elastic_ps.contrib.models import GPT

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT(context=CONTEXT, **size)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()


def train_with_parameter_server(steps: int, small: bool) -> None:
    """What a worker of the job runs."""
    import elastic_ps

    size, stamps = SMALL if small else LARGE, Stamps()
    model, session = make_model(size), elastic_ps.connect()
    stamps.stamp("enters")
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    stamps.stamp("entered")
    for x, y in session.loader(Text(steps * WORKERS * BATCH, size["vocabulary"]), BATCH):
        step(model, optimizer, x, y)
        stamps.stamp("step")
    stamps.stamp("over")
    stamps.save()


def train_with_ddp(steps: int, small: bool) -> None:
    """What `torchrun` runs in each rank."""
    size, stamps = SMALL if small else LARGE, Stamps()
    model = make_model(size)
    torch.distributed.init_process_group("gloo")
    stamps.stamp("enters")
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    stamps.stamp("entered")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    records = Text(steps * BATCH, size["vocabulary"])
    for x, y in torch.utils.data.DataLoader(records, BATCH):
        step(model, optimizer, x, y)
        stamps.stamp("step")
    torch.distributed.barrier()
    stamps.stamp("over")
    stamps.save()
    os._exit(0)  # gloo's threads abort the process now and then when it ends otherwise


class Job(NamedTuple):
    """What was measured of a job: seconds, and bytes of memory."""

    whole: float
    entering: float
    step: float
    leaving: float
    """From the last step to the end of the loop."""
    ending: float
    """From the last step to the command's end."""
    memory: float


def memory_of(process: psutil.Process) -> int:
    """The PSS of a process and of its descendants, in bytes."""
    total = 0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for each in family:
        try:
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except (OSError, ProcessLookupError):  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def measure(command: Sequence[str], path: Path, variables: Mapping[str, str]) -> Job:
    """Run a command until it ends. Raises RuntimeError if it fails, TimeoutError if it takes too long."""
    began, memory = time.time(), 0
    with (path / "output").open("wb") as output:
        process = psutil.Popen(command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    while process.poll() is None:
        memory = max(memory, memory_of(process))
        if time.time() > began + LIMIT:
            process.kill()
            raise TimeoutError(f"{command} takes longer than {LIMIT:.0f} s")
        time.sleep(0.1)
    ended = time.time()
    if process.returncode:
        raise RuntimeError((path / "output").read_text(errors="replace")[-4000:])
    each = [json.loads(file.read_text()) for file in (path / "stamps").glob("*.json")]
    if len(each) != WORKERS:
        raise RuntimeError(f"{len(each)} of {WORKERS} processes have come to their end")
    steps = [[b - a for a, b in zip(times["step"][1:], times["step"][2:], strict=False)] for times in each]
    last = max(times["step"][-1] for times in each)
    return Job(
        ended - began,
        max(times["entered"][0] - times["enters"][0] for times in each),
        max(statistics.median(times) for times in steps),
        max(times["over"][0] for times in each) - last,
        ended - last,
        memory,
    )


def measure_parameter_server(steps: int, small: bool, *, writing: bool = False) -> Job:
    checkpoint: dict[str, Any] = {"everyVersions": 1} if writing else {}
    job = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {
            "entrypoint": "benchmarks.gpt:train_with_parameter_server",
            "arguments": {"steps": steps, "small": small},
            "worker": {"replicas": WORKERS},
            "parameterServer": {"checkpoint": checkpoint},
            "data": {"shuffle": False},
        },
    }
    with directory() as (path, variables):
        (path / "job.yaml").write_text(json.dumps(job))
        return measure(
            [sys.executable, "-m", "elastic_ps.cli", "run", str(path / "job.yaml")], path, variables
        )


def measure_ddp(steps: int, small: bool) -> Job:
    with directory() as (path, variables):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS), "-m", "benchmarks.gpt", "--ddp", "--steps", str(steps)),
        ]
        return measure([*command, "--small"] if small else command, path, variables)


def medians(jobs: Sequence[Job]) -> Job:
    """Of each figure."""
    return Job(*(statistics.median(column) for column in zip(*jobs, strict=True)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="26 million parameters")
    parser.add_argument("--writing", action="store_true", help="also a job that always writes a checkpoint")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    options = parsed.steps, parsed.small
    if parsed.ddp:
        train_with_ddp(*options)
        return
    ours, theirs, writing = [], [], []
    for _ in range(parsed.rounds):
        ours.append(measure_parameter_server(*options))
        theirs.append(measure_ddp(*options))
        if parsed.writing:
            writing.append(measure_parameter_server(*options, writing=True))
        print(f"elastic-ps {ours[-1].whole:.1f} s, torchrun {theirs[-1].whole:.1f} s", flush=True)
    a, b = medians(ours), medians(theirs)
    size = f"GPT of {26 if parsed.small else 124} M parameters"
    print(f"{size}, AdamW, {WORKERS} workers, {parsed.steps} steps, {parsed.rounds} rounds (median)")
    figures = [
        Figure("whole job", a.whole, b.whole, "s", "torchrun, DDP"),
        Figure("entering: `session.optimizer`", a.entering, b.entering, "s", "the constructor of DDP"),
        Figure("a step", a.step, b.step, "s", "DDP"),
        Figure("last step to the end of the loop", a.leaving, b.leaving, "s", "a barrier"),
        Figure("last step to the end of the command", a.ending, b.ending, "s", "torchrun"),
        Figure("memory of all processes", a.memory / GIB, b.memory / GIB, "GiB", "torchrun, DDP"),
    ]
    if writing:
        rates = 1 / medians(writing).step, 1 / a.step
        what = "steps while checkpoints are written"
        figures.append(Figure(what, *rates, "steps/s", "without checkpoints", more=True))
    for each in figures:
        beside = f"{each.competitor} {each.theirs:7.2f} {each.unit}"
        print(f"{each.what:38} {each.ours:7.2f} {each.unit}, {beside}, ratio {each.ratio:.2f}")
    write(parsed.json, figures)


if __name__ == "__main__":
    main()
