"""How long training stops after a SIGKILL: of a parameter server, compared with a rank of DDP.

`python -m benchmarks.recovery` trains one model with elastic-ps and kills the parameter server, with and
without a standby. It trains the same model with DistributedDataParallel (gloo) under `torchrun` with elastic
restarts, and kills a rank. Both have the same number of processes that compute and the same time between
checkpoints, and they take turns. It prints the seconds from the kill until the model is further than before
(so steps that are made again count), the share of time that elastic-ps pauses to copy checkpoints, and the
rounds per second with and without a standby.

With `strategy: all-reduce` it kills a worker, and prints the seconds until a step is made without that
worker, beside the seconds until the ranks of `torchrun` make their next step, whichever that is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from benchmarks.figures import Figure, write

if TYPE_CHECKING:
    from elastic_ps.api.job import TrainingJob

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH, RECORDS, EPOCHS = 512, 64, 100_000, 100_000
LIMIT = 120.0


def make_model() -> torch.nn.Sequential:
    """A multi-layer perceptron of 0.8 million parameters."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


class Zeros(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Records of which it does not matter here what is in them."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(WIDTH), torch.zeros(1)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train_with_parameter_server() -> None:
    """What a worker of the job runs."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_model()
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-4, fused=True), model)
    for x, y in session.loader(Zeros(), BATCH, epochs=EPOCHS):
        step(model, optimizer, x, y)


def train_with_ddp(directory: Path, interval: float) -> None:
    """What `torchrun` runs in each rank: the usual script, with a checkpoint by time."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    saved, number = directory / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["step"]
    x, y = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, 1)
    last = time.monotonic()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    progress = (directory / "step").open("r+" if (directory / "step").exists() else "w", buffering=1)
    while True:
        step(model, optimizer, x, y)
        number += 1
        if rank == 0:
            progress.seek(0)
            progress.write(f"{start:4} {number:12}\n")
            if time.monotonic() - last >= interval:
                last = time.monotonic()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
                torch.save(state, saved.with_suffix(".partial"))
                saved.with_suffix(".partial").rename(saved)


Read = Callable[[], tuple[int, int]]
"""How often training was started again, and the step that it has reached."""


class Recovered(NamedTuple):
    """Seconds from a kill until a later start has made a step, and until it has passed those from before."""

    next_step: float
    passed: float


def seconds_until_passed(read: Read, kill: Callable[[], None]) -> Recovered:
    """Kill, and measure how long it takes to recover."""
    start, reached = read()
    next_step: float | None = None
    began = time.monotonic()
    kill()
    while True:
        now, number = read()
        if now == start:  # what was under way when the kill came
            reached = max(reached, number)
        else:
            seconds = time.monotonic() - began
            next_step = seconds if next_step is None else next_step
            if number > reached:
                return Recovered(next_step, seconds)
        if time.monotonic() - began > LIMIT:
            raise TimeoutError(f"not recovered within {LIMIT:.0f} s")
        time.sleep(0.01)


def make_job(
    workers: int, interval: float, durability: str = "checkpoint", strategy: str = "parameter-server"
) -> TrainingJob:
    """A job of `train_with_parameter_server`, with that many seconds between checkpoints."""
    from elastic_ps.api.job import parse_job

    spec = {
        "entrypoint": "benchmarks.recovery:train_with_parameter_server",
        "strategy": strategy,
        "worker": {"replicas": workers},
        "parameterServer": {
            "checkpoint": {"interval": f"{round(interval * 1000)}ms"},
            "durability": durability,
        },
        "data": {"shuffle": False},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": "benchmark"}, "spec": spec}, source="benchmark")


class Measured(NamedTuple):
    """Seconds to recover, rounds per second before, and the share of time in checkpoint pauses."""

    seconds: float
    rate: float
    share: float


def measure_parameter_server(workers: int, interval: float, train: float, durability: str) -> Measured:
    from elastic_ps.local import Launcher, Options
    from elastic_ps.local.poller import fetch_status

    with (
        tempfile.TemporaryDirectory() as root,
        Launcher(make_job(workers, interval, durability), Options(root=Path(root))) as launcher,
    ):
        launcher.start()

        def version() -> tuple[int, int]:
            http = launcher.status().http
            status = fetch_status(http[0]) if http else None
            return (status.term, status.progress.version) if status else (1, 0)

        def followed() -> tuple[int, int]:
            status = fetch_status(launcher.status().http[0])
            return (1, int(all(status.standbys))) if status else (1, 0)

        until(lambda: version()[1] >= 1, "a step")
        until(lambda: followed()[1] >= 1, "a step")
        began, first = time.monotonic(), version()[1]
        time.sleep(train)
        status = fetch_status(launcher.status().http[0])
        elapsed = time.monotonic() - began
        share = status.checkpoint_pause_seconds / elapsed if status else 0.0
        rate = (version()[1] - first) / elapsed
        pid = next(p.pid for p in launcher.status().processes if p.role == "ps")
        seconds = seconds_until_passed(version, lambda: os.kill(pid, signal.SIGKILL)).passed
        launcher.stop("measured", at_once=True)
        launcher.wait(timedelta(seconds=30))
    return Measured(seconds, rate, share)


def measure_all_reduce(workers: int, interval: float, train: float) -> float:
    """Seconds from the kill of a worker until the others have made a step without it."""
    from elastic_ps.local import Launcher, Options

    with tempfile.TemporaryDirectory() as root:
        histories = Path(root) / "histories"
        options = Options(root=Path(root), history=histories)
        with Launcher(make_job(workers, interval, strategy="all-reduce"), options) as launcher:
            launcher.start()
            until(lambda: any(len(commit) == workers for _, commit in commits(histories)), "all take part")
            time.sleep(train)
            killed = next(p for p in launcher.status().processes if p.role == "worker" and p.index)
            began = time.monotonic()
            os.kill(killed.pid, signal.SIGKILL)

            def without() -> float | None:
                made = (at for at, commit in commits(histories) if at > began and killed.index not in commit)
                return next(made, None)

            made = until(without, "the others make a step")
            launcher.stop("measured", at_once=True)
            launcher.wait(timedelta(seconds=30))
    return made - began


def commits(histories: Path) -> Iterator[tuple[float, set[int]]]:
    """When each version was made, by the monotonic clock, and by which workers, as far as is recorded."""
    for path in histories.glob("ps-0-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and (event := json.loads(line))["event"] == "commit":
                yield event["time"], {each["worker"] for each in event["contributions"]}


def until(look: Callable[[], T | None], what: str) -> T:
    """What `look` gives when it gives anything."""
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT:.0f} s: {what}")
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def torchrun(directory: Path, workers: int, script: str, *arguments: str) -> Iterator[None]:
    """Ranks that run `script --ddp DIRECTORY ARGUMENTS...`, ended on the way out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", str(workers), "--monitor-interval", "0.1", script]
    command += ["--ddp", str(directory), *arguments]
    # With the agent's store shared, the ranks of torch 2.13 hang in init_process_group after a restart.
    variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=variables)
    try:
        yield
    except TimeoutError as error:
        error.add_note((directory / "log").read_text(errors="replace")[-3000:])
        raise
    finally:
        pids = [int(path.read_text()) for path in directory.glob("rank-*.pid")]
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def measure_ddp(workers: int, interval: float, train: float) -> Recovered:
    """Seconds to recover from the kill of a rank."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def number() -> tuple[int, int]:
            with contextlib.suppress(OSError, ValueError):
                start, reached = (directory / "step").read_text().split()
                return int(start), int(reached)
            return 0, 0

        with torchrun(directory, workers, __file__, "--interval", str(interval)):
            until(lambda: number()[1] >= 1, "a step")
            time.sleep(train)
            pid = int((directory / f"rank-{workers - 1}.pid").read_text())
            return seconds_until_passed(number, lambda: os.kill(pid, signal.SIGKILL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between checkpoints")
    parser.add_argument("--train", type=float, default=7.0, help="seconds of training before the kill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp is not None:
        train_with_ddp(parsed.ddp, parsed.interval)
        return
    os.chdir(ROOT)
    plain: list[Measured] = []
    standby: list[Measured] = []
    reduced: list[float] = []
    theirs: list[Recovered] = []
    options = (parsed.workers, parsed.interval, parsed.train)
    for number in range(parsed.rounds):
        plain.append(measure_parameter_server(*options, "checkpoint"))
        standby.append(measure_parameter_server(*options, "standby"))
        reduced.append(measure_all_reduce(*options))
        theirs.append(measure_ddp(*options))
        times = f"{plain[-1].seconds:.1f} s, standby {standby[-1].seconds:.1f} s"
        print(f"round {number + 1}: elastic-ps {times}, torchrun {theirs[-1].passed:.1f} s", flush=True)
        next_step = f"{reduced[-1]:.2f} s, torchrun {theirs[-1].next_step:.2f} s"
        print(f"round {number + 1}: next step with all-reduce {next_step}", flush=True)
    a, b, c = median(plain, "seconds"), median(standby, "seconds"), median(theirs, "passed")
    d, e = statistics.median(reduced), median(theirs, "next_step")
    print(
        f"{parsed.workers} workers, a checkpoint every {parsed.interval:g} s, {parsed.rounds} rounds (median)"
    )
    print(f"elastic-ps, parameter server killed      {a:6.1f} s until the version passes the one before")
    print(f"the same, durability: standby            {b:6.1f} s")
    print(f"torchrun elastic DDP (gloo), rank killed {c:6.1f} s until the step passes the one before")
    print(f"ratio elastic-ps / torchrun              {a / c:6.2f}")
    print(f"ratio elastic-ps with standby / torchrun {b / c:6.2f}")
    print(f"elastic-ps, all-reduce, worker killed    {d:6.2f} s until the next step")
    print(f"torchrun elastic DDP (gloo), rank killed {e:6.2f} s until the next step")
    print(f"ratio elastic-ps all-reduce / torchrun   {d / e:6.3f}")
    print(f"elastic-ps pauses for checkpoints        {100 * median(plain, 'share'):6.2f} % of the time")
    print(f"rounds/s with standby / without          {median(standby, 'rate') / median(plain, 'rate'):6.2f}")
    write(
        parsed.json,
        [
            Figure("checkpoints only", a, c, "s", "torchrun elastic"),
            Figure("durability: standby", b, c, "s", "torchrun elastic"),
            Figure("strategy: all-reduce, a worker killed: the next step", d, e, "s", "torchrun elastic"),
        ],
    )


def median(measured: Sequence[NamedTuple], what: str) -> float:
    return statistics.median(float(getattr(each, what)) for each in measured)


if __name__ == "__main__":
    main()
