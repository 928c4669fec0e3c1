"""How long a small job takes until its first step, and where the time goes, beside `torchrun`.

`python -m benchmarks.startup` trains a small model with elastic-ps (one parameter server) and with
DistributedDataParallel (gloo) under `torchrun`, with as many workers. It prints when each stage was reached,
in seconds since the command was given: the median over the rounds of the slowest process. They take turns.
The processor time of all processes together depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from benchmarks.figures import Figure, write

IMPORTED = time.time()
ROOT = Path(__file__).resolve().parents[1]
STAMPS = "BENCHMARK_STAMPS"
LIMIT = 120.0
WIDTH, BATCH, STEPS = 64, 16, 20

USED = "(processor time of all processes)"
OURS = (
    "job accepted",
    "worker: process started",
    "worker: script and torch imported",
    "parameter server serves",
)
BOTH = ("worker: model and optimizer ready", "worker: first step made", "command ended", USED)
THEIRS = ("worker: process started", "worker: script and torch imported", "worker: process group ready")


def stamp(what: str, when: float | None = None) -> None:
    """Note that this process has reached a stage."""
    with (Path(os.environ[STAMPS]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([what, time.time() if when is None else when]) + "\n")


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train_with_parameter_server() -> None:
    """What a worker of the job runs."""
    import elastic_ps

    stamp(OURS[1], psutil.Process().create_time())
    stamp(OURS[2], IMPORTED)
    model = make_model()
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    stamp(BOTH[0])
    records = BATCH * STEPS * session.spec.worker.replicas
    same = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(records, WIDTH, generator=same), torch.zeros(records, 1)
    )
    for number, (x, y) in enumerate(session.loader(data, BATCH)):
        step(model, optimizer, x, y)
        if number == 0:
            stamp(BOTH[1])


def train_with_ddp() -> None:
    """What `torchrun` runs in each rank."""
    stamp(THEIRS[0], psutil.Process().create_time())
    stamp(THEIRS[1], IMPORTED)
    torch.distributed.init_process_group("gloo")
    stamp(THEIRS[2])
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stamp(BOTH[0])
    for number in range(STEPS):
        step(model, optimizer, torch.randn(BATCH, WIDTH), torch.zeros(BATCH, 1))
        if number == 0:
            stamp(BOTH[1])
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads abort the process now and then when it ends otherwise


@contextlib.contextmanager
def directory() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory for the stamps and for the job's state, and the variables that name it."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        (path / "stamps").mkdir()
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "XDG_STATE_HOME": name,
            STAMPS: str(path / "stamps"),
        }
        yield path, variables


def processor_time() -> float:
    """Seconds that the processes that ended have computed, with all that they had started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(command: Sequence[str], path: Path, variables: Mapping[str, str]) -> tuple[float, dict[str, float]]:
    """Run a command; returns when it began and, for each stage, when the last process reached it."""
    began, used = time.time(), processor_time()
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    ended = time.time()
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    stages = {"command ended": ended, USED: began + processor_time() - used}
    for file in (path / "stamps").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            what, when = json.loads(line)
            stages[what] = max(when, stages.get(what, 0.0))
    return began, stages


def measure_parameter_server(workers: int) -> dict[str, float]:
    """Seconds from the command to each stage."""
    job = {
        "apiVersion": "elastic-ps.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "startup"},
        "spec": {
            "entrypoint": "benchmarks.startup:train_with_parameter_server",
            "worker": {"replicas": workers},
        },
    }
    with directory() as (path, variables):
        (path / "job.yaml").write_text(json.dumps(job))
        began, stages = run(
            [sys.executable, "-m", "elastic_ps.cli", "run", str(path / "job.yaml")], path, variables
        )
        state = path / "elastic-ps" / "startup"
        stages[OURS[0]] = (state / "job.json").stat().st_mtime
        stages[OURS[3]] = serves((state / "logs" / "ps-0.log").read_text())
    return {what: when - began for what, when in stages.items()}


def serves(log: str) -> float:
    """When a parameter server said that it serves."""
    line = next(line for line in log.splitlines() if " serves on " in line)
    moment, _, milliseconds = " ".join(line.split()[:2]).partition(",")
    return time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000


def measure_ddp(workers: int) -> dict[str, float]:
    """Seconds from the command to each stage."""
    with directory() as (path, variables):
        began, stages = run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(workers), "-m", "benchmarks.startup", "--ddp"),
            ],
            path,
            variables,
        )
    return {what: when - began for what, when in stages.items()}


def show(title: str, stages: Sequence[str], rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Print and return the median of each stage."""
    medians = {stage: statistics.median(each[stage] for each in rounds) for stage in stages}
    print(title)
    for stage in sorted(stages, key=medians.__getitem__):
        print(f"  {stage:<36}{medians[stage]:6.1f} s")
    return medians


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp:
        train_with_ddp()
        return
    ours, theirs = [], []
    for _ in range(parsed.rounds):
        ours.append(measure_parameter_server(parsed.workers))
        theirs.append(measure_ddp(parsed.workers))
    print(f"{parsed.workers} workers, {parsed.rounds} rounds (median), {os.cpu_count()} cores")
    a = show("elastic-ps run, 1 parameter server", (*OURS, *BOTH), ours)
    b = show("torchrun, DistributedDataParallel (gloo)", (*THEIRS, *BOTH), theirs)
    print(f"ratio until the first step            {a[BOTH[1]] / b[BOTH[1]]:6.2f}")
    what = f"{parsed.workers} workers"
    write(parsed.json, [Figure(what, a[BOTH[1]], b[BOTH[1]], "s", "torchrun, DDP")])


if __name__ == "__main__":
    main()
