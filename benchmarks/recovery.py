"""How long training stops after a SIGKILL: of a parameter server, compared with a rank of DDP.

`python -m benchmarks.recovery` trains one model with elastic-ps and kills the parameter server, with and
without a standby. It trains the same model with DistributedDataParallel (gloo) under `torchrun` with elastic
restarts, and kills a rank. Both have the same number of processes that compute and the same time between
checkpoints, and they take turns. It prints the seconds from the kill until the model is further than before
(so steps that are made again count), the share of time that elastic-ps pauses to copy checkpoints, and the
rounds per second with and without a standby.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.figures import Figure, write

if TYPE_CHECKING:
    from elastic_ps.job import TrainingJob

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
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-4), model)
    for x, y in session.loader(Zeros(), BATCH, epochs=EPOCHS):
        step(model, optimizer, x, y)


def train_with_ddp(directory: Path, interval: float) -> None:
    """What `torchrun` runs in each rank: the usual script, with a checkpoint by time."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
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


def seconds_until_passed(read: Read, kill: Callable[[], None]) -> float:
    """Kill, and the time until a later start has passed the step that was reached before."""
    start, reached = read()
    began = time.monotonic()
    kill()
    while True:
        now, number = read()
        if now == start:  # what was under way when the kill came
            reached = max(reached, number)
        elif number > reached:
            return time.monotonic() - began
        if time.monotonic() - began > LIMIT:
            raise TimeoutError(f"not recovered within {LIMIT:.0f} s")
        time.sleep(0.01)


def wait_for(read: Read, step_number: int) -> None:
    deadline = time.monotonic() + LIMIT
    while read()[1] < step_number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step_number} not within {LIMIT:.0f} s")
        time.sleep(0.05)


def make_job(workers: int, interval: float, durability: str = "checkpoint") -> TrainingJob:
    """A job of `train_with_parameter_server`, with that many seconds between checkpoints."""
    from elastic_ps.job import parse_job

    spec = {
        "entrypoint": "benchmarks.recovery:train_with_parameter_server",
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

        wait_for(version, 1)
        wait_for(followed, 1)
        began, first = time.monotonic(), version()[1]
        time.sleep(train)
        status = fetch_status(launcher.status().http[0])
        elapsed = time.monotonic() - began
        share = status.checkpoint_pause_seconds / elapsed if status else 0.0
        rate = (version()[1] - first) / elapsed
        pid = next(p.pid for p in launcher.status().processes if p.role == "ps")
        seconds = seconds_until_passed(version, lambda: os.kill(pid, signal.SIGKILL))
        launcher.stop("measured", at_once=True)
        launcher.wait(timedelta(seconds=30))
    return Measured(seconds, rate, share)


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


def measure_ddp(workers: int, interval: float, train: float) -> float:
    """Seconds to recover."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def number() -> tuple[int, int]:
            with contextlib.suppress(OSError, ValueError):
                start, reached = (directory / "step").read_text().split()
                return int(start), int(reached)
            return 0, 0

        with torchrun(directory, workers, __file__, "--interval", str(interval)):
            wait_for(number, 1)
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
    theirs: list[float] = []
    options = (parsed.workers, parsed.interval, parsed.train)
    for number in range(parsed.rounds):
        plain.append(measure_parameter_server(*options, "checkpoint"))
        standby.append(measure_parameter_server(*options, "standby"))
        theirs.append(measure_ddp(*options))
        times = f"{plain[-1].seconds:.1f} s, standby {standby[-1].seconds:.1f} s, torchrun {theirs[-1]:.1f} s"
        print(f"round {number + 1}: elastic-ps {times}", flush=True)
    a, b, c = median(plain, "seconds"), median(standby, "seconds"), statistics.median(theirs)
    print(
        f"{parsed.workers} workers, a checkpoint every {parsed.interval:g} s, {parsed.rounds} rounds (median)"
    )
    print(f"elastic-ps, parameter server killed      {a:6.1f} s until the version passes the one before")
    print(f"the same, durability: standby            {b:6.1f} s")
    print(f"torchrun elastic DDP (gloo), rank killed {c:6.1f} s until the step passes the one before")
    print(f"ratio elastic-ps / torchrun              {a / c:6.2f}")
    print(f"ratio elastic-ps with standby / torchrun {b / c:6.2f}")
    print(f"elastic-ps pauses for checkpoints        {100 * median(plain, 'share'):6.2f} % of the time")
    print(f"rounds/s with standby / without          {median(standby, 'rate') / median(plain, 'rate'):6.2f}")
    write(
        parsed.json,
        [
            Figure("checkpoints only", a, c, "s", "torchrun elastic"),
            Figure("durability: standby", b, c, "s", "torchrun elastic"),
        ],
    )


def median(measured: Sequence[Measured], what: str) -> float:
    return statistics.median(float(getattr(each, what)) for each in measured)


if __name__ == "__main__":
    main()
