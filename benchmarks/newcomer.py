"""How long a new worker takes: from the command to add it until a step with it is made.

`python -m benchmarks.newcomer` trains one model with elastic-ps and with DistributedDataParallel (gloo) under
`torchrun --nnodes 1:2`, in turns. Then it asks for one worker more: `elastic-ps scale`, and a second agent of
`torchrun`, which has all ranks start again. It prints the seconds until the newcomer's first gradient is in a
version, and until the first step of the larger group.
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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.figures import Figure, write
from benchmarks.recovery import BATCH, ROOT, WIDTH, commits, make_job, make_model, step, until
from elastic_ps.local.processes import free_addresses

INTERVAL = 3600.0
"""Seconds between checkpoints: none is needed."""


def train_with_ddp(directory: Path) -> None:
    """What `torchrun` runs in each rank: rank 0 says how many there are, once they have made a step."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    (directory / f"process-{os.getpid()}").touch()
    model = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, 1)
    while True:
        step(model, optimizer, x, y)
        if rank == 0:
            (directory / f"ranks-{ranks}").touch()


@contextlib.contextmanager
def agent(directory: Path, endpoint: str, ranks: int) -> Iterator[None]:
    """One of at most two agents of `torchrun`, with that many ranks; it is killed on the way out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "3"]
    command += ["--nproc-per-node", str(ranks), "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "newcomer"]
    # It would wait half a minute for a second agent before it begins.
    command += ["--rdzv-conf", "last_call_timeout=1", "-m", "benchmarks.newcomer", "--ddp", str(directory)]
    variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    path = directory / f"log-{ranks}"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=variables)
    try:
        yield
    except TimeoutError as error:
        error.add_note(path.read_text(errors="replace")[-3000:])
        raise
    finally:
        process.kill()
        process.wait()
        for each in directory.glob("process-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(each.name.partition("-")[2]), signal.SIGKILL)


def measure_ddp(workers: int, train: float) -> float:
    """Seconds from the start of a second agent, of one rank, until all have made a step."""
    (endpoint,) = free_addresses(1)
    with tempfile.TemporaryDirectory() as name, agent(Path(name), endpoint, workers):
        until(lambda: (Path(name) / f"ranks-{workers}").exists(), "they train")
        time.sleep(train)
        began = time.monotonic()
        with agent(Path(name), endpoint, 1):
            until(lambda: (Path(name) / f"ranks-{workers + 1}").exists(), "one more trains")
            return time.monotonic() - began


def measure_parameter_server(workers: int, train: float) -> float:
    """Seconds from the command until the new worker's gradient is in a version."""
    from elastic_ps.local import Launcher, Options

    with tempfile.TemporaryDirectory() as root:
        histories = Path(root) / "histories"
        with Launcher(make_job(workers, INTERVAL), Options(root=Path(root), history=histories)) as launcher:
            launcher.start()
            until(lambda: any(len(commit) == workers for _, commit in commits(histories)), "they train")
            time.sleep(train)
            began = time.monotonic()
            launcher.directory.scale(workers + 1)
            made = until(
                lambda: next((at for at, commit in commits(histories) if workers in commit), None),
                "the new worker trains",
            )
            launcher.stop("measured", at_once=True)
            launcher.wait(timedelta(seconds=30))
    return made - began


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--train", type=float, default=3.0, help="seconds of training before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.ddp:
        train_with_ddp(parsed.ddp)
        return
    os.chdir(ROOT)
    ours, theirs = [], []
    for _ in range(parsed.rounds):
        ours.append(measure_parameter_server(parsed.workers, parsed.train))
        theirs.append(measure_ddp(parsed.workers, parsed.train))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"one worker more: {a:.2f} s; torchrun elastic {b:.2f} s; {a / b:.2f}")
    what = f"{parsed.workers} workers, and one more"
    write(parsed.json, [Figure(what, a, b, "s", "torchrun elastic")])


if __name__ == "__main__":
    main()
