"""DistributedDataParallel under torchrun's elastic agents, for `benchmarks.goodput`.

The script is the usual one: it loads the newest checkpoint when it begins, and rank 0 writes one each second.
All that is set of torchrun, and why:

- `--max-restarts 10000`: no fault shall end the job. `--monitor-interval 0.1`: torch's default, said here
  since it was 5 s once.
- `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: with the agent's store shared, the ranks of torch 2.13 hang in
  `init_process_group` after a restart.
- On one machine: `--standalone --nproc-per-node N`, so that the agent starts all ranks again at once.
- On N machines: an agent each, `--nnodes 1:N --nproc-per-node 1 --rdzv-backend c10d`. So any number of them
  may train. `--rdzv-conf is_host=false`: the store of the rendezvous is in the benchmark, where no fault
  strikes it. In an agent it would be lost with that machine. `--local-addr`: all are on this host.
- All times of the rendezvous are torch's own: 30 s for a last call, if fewer than N machines are there, and
  three times 5 s until an agent that is silent counts as dead. `TUNED` has shorter ones.

An agent that ends by itself is started again, as a pod is. If it has closed the rendezvous, which is for
good, nothing trains any more, and that time is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.goodput_machines import (
    Machines,
    kill_all_of,
    kill_with_descendants,
    numbers_in,
    put,
    signal_to,
    variables,
)
from benchmarks.goodput_systems import BATCH, INTERVAL, Numbers, System, compute, make_model, make_optimizer

TUNED = {"last_call_timeout": "1", "keep_alive_interval": "1"}
"""The shortest times that torchrun takes: a last call of 1 s, and 3 s until an agent counts as dead."""


def train_with_ddp(directory: Path, machine: int | None) -> None:
    """What `torchrun` runs in each rank: the usual script, with a checkpoint by time.

    Args:
        directory: shared by all ranks.
        machine: the number of the machine that this rank is on; None if all are on one.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = rank if machine is None else machine
    put(directory / f"worker-{worker}.pid", str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    saved, samples = directory / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        samples = state["samples"]
    loader = torch.utils.data.DataLoader(Numbers(), BATCH)
    computed, last, batches = sum(numbers_in(directory / "computed")), time.monotonic(), iter(loader)
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            compute(directory, worker, model, x, y)
            optimizer.step()
            samples, computed = samples + BATCH * ranks, computed + BATCH * ranks
            if rank:
                continue
            put(directory / "computed", str(computed))
            put(directory / "samples", str(samples))
            if time.monotonic() - last >= INTERVAL:
                last = time.monotonic()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "samples": samples}
                torch.save(state, saved.with_suffix(".partial"))
                saved.with_suffix(".partial").rename(saved)
        batches = iter(loader)


class UnderTorchrun:
    """Ranks that torchrun starts again, all together, when one ends.

    Args:
        machines: each rank has a machine; or
        agent: all have this one.
    """

    def __init__(
        self, directory: Path, machines: Machines | None = None, agent: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._directory, self._machines, self._agent = directory, machines, agent

    def samples(self) -> int | None:
        if self._agent is not None and self._agent.poll() is not None:
            raise RuntimeError(f"torchrun has ended: {last_error(self._directory)}")
        return next(iter(numbers_in(self._directory / "samples")), None)

    def pid(self, worker: int) -> int | None:
        if self._machines is not None and self._machines.pid(worker) is None:
            return None
        return next(iter(numbers_in(self._directory / f"worker-{worker}.pid")), None)

    def kill(self, worker: int) -> bool:
        if self._machines is not None:
            return self._machines.kill(worker)
        pid = self.pid(worker)
        return pid is not None and signal_to(pid, signal.SIGKILL)

    def kill_server(self) -> bool:
        return False

    def finish(self) -> str:
        computed = sum(numbers_in(self._directory / "computed"))
        again = f"{computed - (self.samples() or 0):,} samples were computed again"
        if self._machines is None or not self._machines.ended:
            return again
        return (
            f"{again}; agents ended by themselves {self._machines.ended} times: {last_error(self._directory)}"
        )


def last_error(directory: Path) -> str:
    """The last line of the agents' logs that names an error, of the log that was written to last."""
    logs = sorted(directory.glob("log*"), key=lambda path: path.stat().st_mtime, reverse=True)
    lines = [line for path in logs for line in reversed(path.read_text(errors="replace").splitlines())]
    return next((line.strip() for line in lines if "Error" in line), "they named no error")


def command(directory: Path, options: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """An agent with options of its own, and arguments for the script."""
    words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "10000"]
    words += ["--monitor-interval", "0.1", *options]
    return [*words, "-m", "benchmarks.goodput_torchrun", "--ddp", str(directory), *arguments]


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = variables(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with log.open("ab") as output:
        return subprocess.Popen(  # in a session of its own: a Ctrl-C is for the benchmark
            words, stdout=output, stderr=output, env=environment, start_new_session=True
        )


@contextmanager
def on_one_machine(directory: Path, workers: int) -> Iterator[System]:
    """One agent with all ranks."""
    options = ["--standalone", "--nproc-per-node", str(workers)]
    agent = _start(command(directory, options), directory / "log")
    try:
        yield UnderTorchrun(directory, agent=agent)
    finally:
        kill_with_descendants(agent.pid)
        agent.wait()
        kill_all_of(directory)


@contextmanager
def on_machines(
    directory: Path, workers: int, gone: float, configuration: Mapping[str, str] | None = None
) -> Iterator[System]:
    """An agent with one rank on each of `workers` machines.

    Args:
        gone: seconds that a machine is away.
        configuration: for `--rdzv-conf`; torch's defaults else.
    """
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    settings = {"is_host": "false", **(configuration or {})}
    options = ["--nnodes", f"1:{workers}", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    options += ["--rdzv-id", "goodput", "--rdzv-conf", ",".join(f"{k}={v}" for k, v in settings.items())]

    def start(machine: int) -> subprocess.Popen[bytes]:
        words = command(directory, options, ["--machine", str(machine)])
        return _start(words, directory / f"log-{machine}")

    machines = Machines(workers, start, gone)
    try:
        yield UnderTorchrun(directory, machines)
    finally:
        machines.close()
        kill_all_of(directory)


def main() -> None:
    """What torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ddp", type=Path, required=True)
    parser.add_argument("--machine", type=int, default=None)
    parsed = parser.parse_args()
    train_with_ddp(parsed.ddp, parsed.machine)


if __name__ == "__main__":
    main()
