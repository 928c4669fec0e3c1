"""torchft (`pip install torchft`) for `benchmarks.goodput`: replicas that go on while others are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.goodput_machines import Machines, numbers_in, put, signal_to, variables
from benchmarks.goodput_systems import BATCH, LEASE, Numbers, System, compute, make_model, make_optimizer


def train_with_torchft(directory: Path, replica: int) -> None:
    """What each replica runs: as torchft's own train_ddp.py, with a replica group of one process."""
    from torchft import (  # type: ignore[import-not-found, unused-ignore]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    torch.set_num_threads(1)
    model = make_model()
    inner = make_optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=LEASE)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"goodput-{replica}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    loader = torch.utils.data.DataLoader(Numbers(), BATCH)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            compute(directory, replica, wrapped, x, y)
            optimizer.step()
            put(directory / f"samples-{replica}", str(manager.batches_committed() * BATCH))


class UnderTorchft:
    """Replica groups of one process each, which are started again one by one; and a lighthouse."""

    def __init__(self, directory: Path, workers: int, gone: float) -> None:
        self._directory = directory
        self._lighthouse = self._start_lighthouse()
        self._machines = Machines(workers, self._start, gone)

    def _start_lighthouse(self) -> subprocess.Popen[bytes]:
        program = shutil.which(
            "torchft_lighthouse", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )
        if program is None:
            raise FileNotFoundError("torchft is installed without its program torchft_lighthouse")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [program, "--bind", f"127.0.0.1:{self._port}", "--min_replicas", "1"]
        command += ["--join_timeout_ms", "1000", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "3000"]
        with (self._directory / "lighthouse.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        environment = variables(TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._port}", RUST_LOG="warn")
        command = [
            sys.executable,
            "-m",
            "benchmarks.goodput_torchft",
            str(self._directory),
            str(replica),
        ]
        with (self._directory / f"log-{replica}").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def samples(self) -> int | None:
        found = [n for path in self._directory.glob("samples-?") for n in numbers_in(path)]
        return max(found, default=None)

    def pid(self, worker: int) -> int | None:
        return self._machines.pid(worker)

    def kill(self, worker: int) -> bool:
        return self._machines.kill(worker)

    def kill_server(self) -> bool:
        return False

    def finish(self) -> str:
        ended = f"; replicas ended by themselves {self._machines.ended} times" if self._machines.ended else ""
        return f"torchft counts batches, and does not know of records{ended}"

    def close(self) -> None:
        self._machines.close()
        signal_to(self._lighthouse.pid, signal.SIGKILL)
        self._lighthouse.wait()


@contextmanager
def torchft(directory: Path, workers: int, gone: float) -> Iterator[System]:
    """Replicas that are started, and ended. `gone`: seconds until one that was killed is started again."""
    system = UnderTorchft(directory, workers, gone)
    try:
        yield system
    finally:
        system.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("this is a replica of `python -m benchmarks.goodput`, which starts it; see its --help")
    train_with_torchft(Path(sys.argv[1]), int(sys.argv[2]))
