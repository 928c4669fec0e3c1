"""What `benchmarks.goodput` measures: elastic-ps and torchrun's elastic DDP; `goodput_torchft` has torchft.

All train the same model. Each says how many samples count, and which process a fault strikes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from elastic_ps.job import TrainingJob, parse_job

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BATCH, RECORDS = 64, 16, 100_000
PAUSE = 0.02
"""Seconds that each step sleeps, in place of a larger model's forward pass, so that two cores are enough."""
SLOWNESS = 5.0
"""How many times as long a slow worker sleeps."""
LEASE = 1.5
INTERVAL = 1.0
"""Seconds between two checkpoints, of all systems."""

Kind: TypeAlias = Literal["kill", "kill-ps", "freeze", "slow"]
CLEAN = "0 of them twice; 0 other violations"
"""How the audit of a job ends that has lost nothing."""


def variables(**more: str) -> dict[str, str]:
    """The environment of a process that imports this module, and packages from where this one does."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **more}


def kill_all_of(directory: Path) -> None:
    """SIGKILL to each process whose command names the directory, until there is none. Blocks for up to 10 s.

    A process may be started by one that is being killed.
    """
    deadline = time.monotonic() + 10.0
    while (found := list(_commands_with(str(directory)))) and time.monotonic() < deadline:
        for pid in found:
            signal_to(pid, signal.SIGKILL)
        time.sleep(0.05)


def _commands_with(text: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in path.read_text(errors="replace"):
                yield int(path.parent.name)


def signal_to(pid: int, number: signal.Signals) -> bool:
    """Returns whether there is such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


# --- what all of them train


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Linear(WIDTH, 1),
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4)


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Records of which it does not matter here what is in them."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(WIDTH), torch.zeros(1)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y


def compute(directory: Path, worker: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward and backward."""
    until = 0.0
    with contextlib.suppress(OSError, ValueError):
        until = float(slow_file(directory, worker).read_text())
    time.sleep(PAUSE * (SLOWNESS if time.monotonic() < until else 1.0))
    torch.nn.functional.mse_loss(model(x), y).backward()


def slow_file(directory: Path, worker: int) -> Path:
    """The file that says until when, by the machine's monotonic clock, a worker is slow."""
    return directory / f"slow-{worker}"


def put(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    part = path.with_suffix(f".part-{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def numbers_in(path: Path) -> list[int]:
    """The numbers in a file; none if there is no file."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for word in path.read_text().split()]
    return []


class System(Protocol):
    """A job that trains."""

    def samples(self) -> int | None:
        """How many samples count now; None if nobody can say."""

    def pid(self, kind: Kind, worker: int) -> int | None:
        """The process that a fault strikes, if there is one."""

    def finish(self) -> str:
        """End it; returns what is to be said of its records. Blocks."""


# --- elastic-ps


def train_with_parameter_server(directory: str) -> None:
    """What a worker of the job runs."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_model()
    optimizer = session.optimizer(make_optimizer(model), model)
    for x, y in session.loader(Numbers(), BATCH, epochs=10_000):
        optimizer.zero_grad()
        compute(Path(directory), session.worker, model, x, y)
        optimizer.step()


def modes(workers: int) -> Mapping[str, Mapping[str, Any]]:
    local = {"mode": "local", "steps": 20}
    return {
        "sync": {},
        "backupWorkers": {"backupWorkers": 1},
        "bounded": {"mode": "bounded", "maxStaleness": 64},
        "async": {"mode": "async"},
        "local diloco": local,
        "local quorum": {**local, "quorum": max(1, workers - 1)},
        "local downpour": {**local, "outer": "downpour", "outerLearningRate": 1 / workers},
    }


def make_job(directory: Path, workers: int, consistency: Mapping[str, Any]) -> TrainingJob:
    spec = {
        "entrypoint": "benchmarks.goodput_systems:train_with_parameter_server",
        "arguments": {"directory": str(directory)},
        "worker": {
            "replicas": workers,
            "minReplicas": max(1, workers - 1),
            "leaseDuration": f"{LEASE:g}s",
            "progressTimeout": "30s",
        },
        "parameterServer": {"checkpoint": {"interval": f"{INTERVAL:g}s"}},
        "consistency": dict(consistency),
        "data": {"shuffle": False},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": "goodput"}, "spec": spec}, source="goodput")


class OnParameterServer:
    """A job of elastic-ps in processes on this machine. `directory` takes its state and histories."""

    def __init__(self, directory: Path, workers: int, consistency: Mapping[str, Any]) -> None:
        from elastic_ps.local import Launcher, Options

        self.job = make_job(directory, workers, consistency)
        self.history = directory / "history"
        self.history.mkdir()
        self.launcher = Launcher(self.job, Options(root=directory / "state", history=self.history))

    def samples(self) -> int | None:
        from elastic_ps.local.poller import fetch_status

        http = self.launcher.status().http
        status = fetch_status(http[0]) if http else None
        return None if status is None or not status.ready else status.progress.records_applied

    def pid(self, kind: Kind, worker: int) -> int | None:
        role, index = ("ps", 0) if kind == "kill-ps" else ("worker", worker)
        for process in self.launcher.status().processes:
            if (process.role, process.index) == (role, index) and process.state not in ("ended", "starting"):
                return process.pid
        return None

    def finish(self) -> str:
        from elastic_ps.drill.history import check, fate
        from elastic_ps.drill.recorded import read

        self.launcher.stop("measured")
        if not self.launcher.wait(timedelta(seconds=60)):
            return "it did not stop"
        histories = read(self.history)
        wrong = check(histories, None, max_staleness=self.job.spec.consistency.most_stale)
        kept = fate(histories).surviving
        in_the_model = sum(r.records for each in kept for ranges in each.steps.values() for r in ranges)
        server = self.launcher.outcome().status.server
        counted = server.progress.records_applied if server else None
        twice = sum(each.records for each in wrong if each.kind == "record twice")
        lost = sum(each.kind != "record twice" for each in wrong)
        if counted is not None and counted != in_the_model:
            return f"{counted} records are counted, but {in_the_model} are in the model"
        return f"{in_the_model:,} records in the model, {twice} of them twice; {lost} other violations"


@contextmanager
def parameter_server(directory: Path, workers: int, consistency: Mapping[str, Any]) -> Iterator[System]:
    system = OnParameterServer(directory, workers, consistency)
    with system.launcher as launcher:
        launcher.start()
        try:
            yield system
        finally:
            launcher.stop("over", at_once=True)
            launcher.wait(timedelta(seconds=30))


# --- torchrun


def train_with_ddp(directory: Path) -> None:
    """What `torchrun` runs in each rank: the usual script, with a checkpoint by time."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    put(directory / f"rank-{rank}.pid", str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    saved, number = directory / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["step"]
    loader = torch.utils.data.DataLoader(Numbers(), BATCH)
    computed, last, batches = sum(numbers_in(directory / "computed")), time.monotonic(), iter(loader)
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            compute(directory, rank, model, x, y)
            optimizer.step()
            number, computed = number + 1, computed + 1
            if rank:
                continue
            put(directory / "computed", str(computed))
            put(directory / "samples", str(number * BATCH * ranks))
            if time.monotonic() - last >= INTERVAL:
                last = time.monotonic()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
                torch.save(state, saved.with_suffix(".partial"))
                saved.with_suffix(".partial").rename(saved)
        batches = iter(loader)


class UnderTorchrun:
    """Ranks that torchrun starts again, all together, when one ends."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory, self._workers = directory, workers

    def samples(self) -> int | None:
        return next(iter(numbers_in(self._directory / "samples")), None)

    def pid(self, kind: Kind, worker: int) -> int | None:
        if kind == "kill-ps":
            return None
        return next(iter(numbers_in(self._directory / f"rank-{worker}.pid")), None)

    def finish(self) -> str:
        computed = sum(numbers_in(self._directory / "computed")) * BATCH * self._workers
        return f"{computed - (self.samples() or 0):,} samples were computed again"


@contextmanager
def torchrun(directory: Path, workers: int) -> Iterator[System]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "10000"]
    command += [
        "--nproc-per-node",
        str(workers),
        "--monitor-interval",
        "0.1",
        "-m",
        "benchmarks.goodput_systems",
    ]
    # With the agent's store shared, the ranks of torch 2.13 hang in init_process_group after a restart.
    environment = variables(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with (directory / "log").open("wb") as log:
        agent = subprocess.Popen(
            [*command, "--ddp", str(directory)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for the benchmark
        )
    try:
        yield UnderTorchrun(directory, workers)
    finally:
        signal_to(agent.pid, signal.SIGKILL)  # first, so that it starts no ranks again
        agent.wait()
        kill_all_of(directory)


def main() -> None:
    """What torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", type=Path, required=True)
    parsed = parser.parse_args()
    train_with_ddp(parsed.ddp)


if __name__ == "__main__":
    main()
