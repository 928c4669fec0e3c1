"""What `benchmarks.goodput` measures: elastic-ps; `goodput_torchrun` and `goodput_torchft` have the others.

All train the same model. Each says how many samples count, and which process a fault strikes.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from benchmarks import goodput_machines as machines
from elastic_ps.api.job import TrainingJob, parse_job

WIDTH, BATCH, RECORDS = 64, 16, 100_000
PAUSE = 0.02
"""Seconds that each step sleeps, in place of a larger model's forward pass, so that two cores are enough."""
SLOWNESS = 5.0
"""How many times as long a slow worker sleeps."""
LEASE = 1.5
BEHIND = 64
"""About how many of its own steps a worker may be behind the others in mode `bounded`."""
INTERVAL = 1.0
"""Seconds between two checkpoints, of all systems."""

Kind: TypeAlias = Literal["kill", "kill-ps", "freeze", "slow"]
CLEAN = "0 of them twice; 0 other violations"
"""How the audit of a job ends that has lost nothing."""


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
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


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


class System(Protocol):
    """A job that trains. What has a `worker` is told its number, from 0."""

    def samples(self) -> int | None:
        """How many samples count now; None if nobody can say."""

    def pid(self, worker: int) -> int | None:
        """The process that trains, which a fault freezes; None if there is none."""

    def kill(self, worker: int) -> bool:
        """Kill the worker's process, or all of its machine, which is away then; False if it is not there."""

    def kill_server(self) -> bool:
        """Kill the parameter server's process; False if there is none."""

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


def quorum(workers: int) -> int:
    """How many learners an exchange waits for: two of three."""
    return max(1, 2 * workers // 3)


def modes(workers: int) -> Mapping[str, Mapping[str, Any]]:
    local = {"mode": "local", "steps": 20}
    return {
        "sync": {},
        "backupWorkers": {"backupWorkers": 1},
        "bounded": {"mode": "bounded", "maxStaleness": BEHIND * workers},
        "async": {"mode": "async"},
        "local diloco": local,
        "local quorum": {**local, "quorum": quorum(workers)},
        "local downpour": {**local, "outer": "downpour", "outerLearningRate": 1 / workers},
    }


def make_job(directory: Path, workers: int, consistency: Mapping[str, Any]) -> TrainingJob:
    spec = {
        "entrypoint": "benchmarks.goodput_systems:train_with_parameter_server",
        "arguments": {"directory": str(directory)},
        "worker": {
            "replicas": workers,
            "minReplicas": quorum(workers),
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
    """A job of elastic-ps in processes on this machine.

    Args:
        directory: takes its state and histories.
        gone: seconds that the machine of a worker is away once it is killed. None: the workers have none, and
            the launcher starts them again at once, as it does with the parameter server in any case.
    """

    def __init__(
        self, directory: Path, workers: int, consistency: Mapping[str, Any], gone: float | None = None
    ) -> None:
        from elastic_ps.local import Launcher, Options, Programs

        self.job = make_job(directory, workers, consistency)
        self.history = directory / "history"
        self.history.mkdir()
        self._directory, self._gone = directory, gone
        programs = Programs() if gone is None else Programs(worker=machines.program(directory))
        self.launcher = Launcher(
            self.job, Options(root=directory / "state", history=self.history, programs=programs)
        )

    def samples(self) -> int | None:
        from elastic_ps.local.poller import fetch_status

        http = self.launcher.status().http
        status = fetch_status(http[0]) if http else None
        return None if status is None or not status.ready else status.progress.records_applied

    def pid(self, worker: int) -> int | None:
        return self._pid("worker", worker, "ended", "starting")

    def kill(self, worker: int) -> bool:
        if self._gone is None:
            return self._kill(self.pid(worker))
        pid = self._pid("worker", worker, "ended")
        if pid is None or machines.seconds_away(self._directory, worker):
            return False
        machines.send_away(self._directory, worker, self._gone)  # first: the launcher starts it again at once
        return machines.kill_with_descendants(pid)

    def kill_server(self) -> bool:
        return self._kill(self._pid("ps", 0, "ended", "starting"))

    def _pid(self, role: str, index: int, *without: str) -> int | None:
        """The newest process, if its state is none of these."""
        for process in self.launcher.status().processes:
            if (process.role, process.index) == (role, index) and process.state not in without:
                return process.pid
        return None

    def _kill(self, pid: int | None) -> bool:
        return pid is not None and machines.signal_to(pid, signal.SIGKILL)

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
def parameter_server(
    directory: Path, workers: int, consistency: Mapping[str, Any], gone: float | None = None
) -> Iterator[System]:
    """A job that is started, and ended; the arguments are those of `OnParameterServer`."""
    system = OnParameterServer(directory, workers, consistency, gone)
    with system.launcher as launcher:
        launcher.start()
        try:
            yield system
        finally:
            launcher.stop("over", at_once=True)
            launcher.wait(timedelta(seconds=30))
