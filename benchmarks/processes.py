"""What a worker of N processes saves at the parameter server, beside N workers of one process.

`python -m benchmarks.processes` (root, Linux) makes two hosts out of network namespaces, whose links carry
`--gbit` each way. On one is the parameter server, on the other are N processes that compute: once as N
workers, once as one worker with `worker.processes: N`. A version is made of the same number of records. It
prints, for each version, the bytes on the parameter server's link as the system counts them, the parameter
server's processor time, and the time; and the ratios. They take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.figures import Figure, write
from benchmarks.network import Hosts, killed_at_the_end, require_alive, start_job
from benchmarks.recovery import EPOCHS, LIMIT, ROOT, Zeros, make_model, step
from elastic_ps.api.job import TrainingJobSpec

BATCH = 16
"""Records of one process."""
WARM, LAST = 10, 110
"""Versions between which it is measured."""


class Cost(NamedTuple):
    """Of a version."""

    megabytes: float
    """On the parameter server's link, both ways."""
    processor: float
    """Milliseconds of the parameter server's processor time."""
    milliseconds: float
    """Between two versions."""


def train(directory: str, batch: int) -> None:
    """What each process runs; the first one writes the version to a file."""
    import elastic_ps

    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_model()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    first = session.worker == 0 and os.environ.get("LOCAL_RANK", "0") == "0"
    for x, y in session.loader(Zeros(), batch, epochs=EPOCHS):
        step(model, optimizer, x, y)
        if first:
            partial = Path(directory) / "partial"
            partial.write_text(str(session.version))
            partial.rename(Path(directory) / "version")


def link_bytes(host: str) -> int:
    """What a host's link has carried both ways."""
    command = ["ip", "-n", host, "-s", "-j", "link", "show", "eth0"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    counts = shown[0]["stats64"]
    return int(counts["rx"]["bytes"]) + int(counts["tx"]["bytes"])


def measure(hosts: Hosts, workers: int, processes: int) -> Cost:
    """The cost of a version with so many workers of so many processes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = TrainingJobSpec.model_validate(
            {
                "entrypoint": "benchmarks.processes:train",
                "arguments": {"directory": name, "batch": BATCH * processes},
                "worker": {"replicas": workers, "processes": processes},
                "data": {"shuffle": False},
            }
        )
        started = start_job(hosts, spec, [0], [1] * workers, directory)
        with killed_at_the_end(started, directory):
            server = psutil.Process(started[0].pid)

            def come_to(version: int) -> tuple[int, int, float, float]:
                """Version, bytes, processor time and time, as soon as the version is there."""
                deadline = time.monotonic() + LIMIT
                while (found := read(directory / "version")) < version:
                    require_alive(started)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"version {version} is not there within {LIMIT:.0f} s")
                    time.sleep(0.005)
                times = server.cpu_times()
                return found, link_bytes(hosts.namespace(0)), times.user + times.system, time.monotonic()

            before, after = come_to(WARM), come_to(LAST)
    versions, moved, processor, seconds = (b - a for a, b in zip(before, after, strict=True))
    return Cost(moved / versions / 1e6, processor / versions * 1e3, seconds / versions * 1e3)


def read(path: Path) -> int:
    """The number in a file; 0 before there is one."""
    return int(path.read_text()) if path.exists() else 0


def medians(costs: Sequence[Cost]) -> Cost:
    """Of each of its figures."""
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, each way")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs root, and the commands ip and tc (iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    os.chdir(ROOT)
    count, ours, theirs = parsed.processes, list[Cost](), list[Cost]()
    hosts = Hosts(2, parsed.gbit)
    try:
        for _ in range(parsed.rounds):
            ours.append(measure(hosts, 1, count))
            theirs.append(measure(hosts, count, 1))
    finally:
        hosts.close()
    one, several = medians(ours), medians(theirs)
    print(
        f"{count} processes, batches of {BATCH}, {parsed.gbit:g} Gbit/s, {parsed.rounds} rounds. A version:"
    )
    rows = (
        ("bytes on the parameter server's link", one.megabytes, several.megabytes, "MB"),
        ("processor time of the parameter server", one.processor, several.processor, "ms"),
        ("time", one.milliseconds, several.milliseconds, "ms"),
    )
    competitor = f"{count} workers"
    for what, a, b, unit in rows:
        print(f"{what:40}one worker {a:7.2f} {unit}, {competitor} {b:7.2f} {unit}, ratio {a / b:.2f}")
    write(parsed.json, [Figure(what, a, b, unit, competitor) for what, a, b, unit in rows])


if __name__ == "__main__":
    main()
