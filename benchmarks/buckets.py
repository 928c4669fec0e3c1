"""What the size of buckets changes in a step between hosts with a narrow network.

`python -m benchmarks.buckets` (root, Linux) makes hosts as `benchmarks.network` does: one for each of two
workers, and one for each shard. It trains a model with several `parameterServer.bucketBytes`, which take
turns, and prints for each the median step of the slowest worker and the processor time of a step, all
processes together.

`--codec` measures with gradients encoded so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.datapath import CASES, Measured, collect, server_cpu
from benchmarks.network import Hosts, killed_at_the_end, least_seconds, require_alive, start_job
from elastic_ps.api.compression import CODECS
from elastic_ps.api.fields import AUTO
from elastic_ps.api.job import TrainingJobSpec

KIB = 1024
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""KiB."""

WORKERS = 2


def measure(hosts: Hosts, case: str, steps: int, kib: int, *, shards: int, codec: str) -> Measured:
    """A job whose workers are on the first hosts, and its shards on the others."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = TrainingJobSpec.model_validate(
            {
                "entrypoint": "benchmarks.datapath:train_with_parameter_server",
                "arguments": {"case": case, "directory": name, "steps": steps},
                "worker": {"replicas": WORKERS},
                "parameterServer": {"replicas": shards, "bucketBytes": kib * KIB},
                "data": {"shuffle": False},
                "compression": {"codec": codec},
            }
        )
        servers = range(WORKERS, WORKERS + shards)
        processes = start_job(hosts, spec, servers, range(WORKERS), directory)
        with killed_at_the_end(processes, directory):
            measured = collect(directory, WORKERS, lambda: require_alive(processes))
            if not kib:
                print(*re.findall("buckets have .*", (directory / "ps-0.log").read_text()), flush=True)
            measured.server = sum(server_cpu(process.pid) for process in processes[:shards]) / steps
    measured.cpu += measured.server
    return measured


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="mlp")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, each way")
    parser.add_argument("--kib", type=int, nargs="+", default=SIZES, help="the sizes of buckets; 0: chosen")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--codec", choices=(*CODECS, AUTO), default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs root, and the commands ip and tc (iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    found: dict[int, list[Measured]] = {kib: [] for kib in parsed.kib}
    hosts = Hosts(WORKERS + parsed.shards, parsed.gbit)
    try:
        for _ in range(parsed.rounds):
            for kib, results in found.items():
                results.append(
                    measure(hosts, parsed.case, parsed.steps, kib, shards=parsed.shards, codec=parsed.codec)
                )
                print(kib, results[-1], flush=True)
    finally:
        hosts.close()
    shared = least_seconds(parsed.case, 1, parsed.gbit) / 2 * WORKERS / parsed.shards
    print(
        f"{CASES[parsed.case].model}, {parsed.gbit:g} Gbit/s, {parsed.shards} shards, {parsed.codec}; "
        f"plain gradients need {shared * 1e3:.0f} ms"
    )
    for kib, results in found.items():
        steps = [each.step * 1e3 for each in results]
        cpu = statistics.median(each.cpu for each in results) * 1e3
        middle = statistics.median(steps)
        name = f"{kib} KiB" if kib else "chosen"
        print(
            f"{name:9} {middle:6.0f} ms ({min(steps):.0f} to {max(steps):.0f}), "
            f"{cpu:5.0f} ms of processor time"
        )


if __name__ == "__main__":
    main()
