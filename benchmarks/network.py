"""What an exact `sync` step costs between hosts with a narrow network: elastic-ps beside DDP over gloo.

`python -m benchmarks.network` (root, Linux) makes four hosts out of network namespaces, whose links to a
switch carry `--gbit` each way (`tc tbf`). On each host runs a worker and, for elastic-ps, a shard; so both
systems move the same bytes through each link. It prints the median step of the slowest worker of both, the
ratio, and the least time that the bytes of a step need: first the gradients, then the values. They take
turns.

`--apart` gives each of the four shards a host of its own, as a cluster does. Then a worker's link carries
gradients one way and values the other, and both at the same time: see `parameterServer.drafts`. One of the
rows is without that, and one has the size of buckets chosen.

`--codec int8` also measures elastic-ps with gradients encoded so, and `--compression '{codec: int8, values:
int8}'` with any compression; both may be given several times. `--hooks` also measures DDP with its own hooks
`bf16_compress` and PowerSGD (rank 4). `--brief` leaves rows out that have to do with neither.

All hosts share this machine's cores. With `--gbit 0.1` a step is that of hosts with 10 times the cores and
links of 1 Gbit/s, 10 times slower (Gupta et al. 2006, "To Infinity and Beyond: Time-Warped Network
Emulation").

`--workers 1` measures a single worker with a parameter server on another host, beside that least time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.datapath import CASES, HOOKS, Measured, collect, make_model, median
from benchmarks.figures import Figure, write
from benchmarks.recovery import ROOT
from elastic_ps.api.compression import CODECS
from elastic_ps.api.fields import AUTO
from elastic_ps.api.job import BUCKET_BYTES, TrainingJobSpec
from elastic_ps.codec import NONE
from elastic_ps.contract.env import DEFAULT_HTTP_PORT, DEFAULT_PORT, ProcessEnvironment, Role

MASTER = 29500
"""The port of DistributedDataParallel's store."""

NAMES = "/run/netns"
"""Where `ip netns` keeps the namespaces; it mounts the folder when it makes the first one."""


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def mounted() -> bool:
    """Whether `NAMES` is a mount. `os.path.ismount` sees none: it is mounted on itself."""
    return any(line.split()[1] == NAMES for line in Path("/proc/mounts").read_text().splitlines())


class Hosts:
    """Network namespaces, each with a link to a switch, which is one, too. Removed by `close`."""

    def __init__(self, count: int, gbit: float) -> None:
        self._name = f"eps{os.getpid()}"
        self._count = count
        self._mounted = mounted()
        try:
            self._make(gbit)
        except BaseException:
            self.close()
            raise

    def _make(self, gbit: float) -> None:
        switch = f"{self._name}-sw"
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        shape = ("root", "tbf", "rate", f"{gbit:g}gbit", "burst", "256kb", "latency", "50ms")
        for host in range(self._count):
            inside = self.namespace(host)
            run("ip", "netns", "add", inside)
            run("ip", "-n", inside, "link", "set", "lo", "up")
            peer = ("netns", switch)
            run("ip", "-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{host}", *peer)
            run("ip", "-n", inside, "address", "add", f"{address(host)}/24", "dev", "eth0")
            run("ip", "-n", inside, "link", "set", "eth0", "up")
            run("ip", "-n", switch, "link", "set", f"p{host}", "master", "br0", "up")
            run("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *shape)
            run("tc", "-n", switch, "qdisc", "add", "dev", f"p{host}", *shape)

    def namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def start(
        self, host: int, command: Sequence[str], variables: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """A process on a host, in a session of its own."""
        everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                env=everything,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def close(self) -> None:
        for name in [*(self.namespace(host) for host in range(self._count)), f"{self._name}-sw"]:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)
        if not self._mounted and mounted():
            with contextlib.suppress(subprocess.CalledProcessError):  # another run has hosts there
                run("umount", NAMES)


@contextlib.contextmanager
def killed_at_the_end(processes: list[subprocess.Popen[bytes]], directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for log in sorted(directory.glob("*.log")):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def require_alive(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll():
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")


def start_job(
    hosts: Hosts,
    spec: TrainingJobSpec,
    servers: Sequence[int],
    workers: Sequence[int],
    directory: Path,
    *,
    scheme: str = "",
    trace: Path | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start a job's processes, which write their logs into `directory`.

    Args:
        servers, workers: on which hosts they are.
        trace: where they write their traces, if they are to.
    """
    # With a scheme the port is the one that is listened on; without one, that of gRPC.
    places = tuple(f"{scheme}{address(host)}:{DEFAULT_PORT}" for host in servers)
    roles: list[tuple[Role, int, int]] = [("ps", index, host) for index, host in enumerate(servers)]
    roles += [("worker", index, host) for index, host in enumerate(workers)]
    processes = []
    for role, index, host in roles:
        environment = ProcessEnvironment(
            job="benchmark",
            spec=spec,
            role=role,
            index=index,
            addresses=places,
            bind=places[index] if role == "ps" else "",
            http=f"127.0.0.1:{DEFAULT_HTTP_PORT}",
            run="benchmark",
            instance=uuid.uuid4().hex,
            trace=trace,
        )
        module = "elastic_ps.server" if role == "ps" else "elastic_ps.worker"
        command = [sys.executable, "-m", module]
        log = directory / f"{role}-{index}.log"
        processes.append(hosts.start(host, command, environment.to_variables(), log))
    return processes


def measure_ours(
    hosts: Hosts,
    case: str,
    servers: Sequence[int],
    workers: Sequence[int],
    *,
    scheme: str = "",
    compression: Mapping[str, Any] = {},
    server: Mapping[str, Any] = {},
) -> Measured:
    """`servers`, `workers`: on which hosts they are. `server`: more of `spec.parameterServer`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = TrainingJobSpec.model_validate(
            {
                "entrypoint": "benchmarks.datapath:train_with_parameter_server",
                "arguments": {"case": case, "directory": name},
                "worker": {"replicas": len(workers)},
                "parameterServer": {"replicas": len(servers), **server},
                "data": {"shuffle": False},
                "compression": compression,
            }
        )
        processes = start_job(hosts, spec, servers, workers, directory, scheme=scheme)
        with killed_at_the_end(processes, directory):
            return collect(directory, len(workers), lambda: require_alive(processes))


def measure_ddp(hosts: Hosts, case: str, workers: Sequence[int], hook: str = "") -> Measured:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        processes = []
        for rank, host in enumerate(workers):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(len(workers)), "GLOO_SOCKET_IFNAME": "eth0"}
            variables |= {"MASTER_ADDR": address(workers[0]), "MASTER_PORT": str(MASTER)}
            script = str(ROOT / "benchmarks" / "datapath.py")
            command = [sys.executable, script, "--ddp", name, "--case", case, "--hook", hook]
            processes.append(hosts.start(host, command, variables, directory / f"rank-{rank}.log"))
        with killed_at_the_end(processes, directory):
            return collect(directory, len(workers), lambda: require_alive(processes))


def least_seconds(case: str, hosts: int, gbit: float) -> float:
    """What the bytes of a step need through a link: float32 gradients up, and after that values down.

    Args:
        hosts: over how many a shard's share is spread that is on the worker's own; 1: none is.
    """
    parameters = sum(p.numel() for p in make_model(CASES[case].model)[0].parameters())
    share = (hosts - 1) / hosts if hosts > 1 else 1.0
    return 2 * share * 4 * parameters * 8 / (gbit * 1e9)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="mlp4")
    parser.add_argument("--gbit", type=float, default=1.0, help="of each link, each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, choices=(1, 4), default=4)
    parser.add_argument("--apart", action="store_true", help="the shards have hosts of their own")
    parser.add_argument(
        "--codec", action="append", default=[], choices=(*CODECS[1:], AUTO), help="another row"
    )
    parser.add_argument("--compression", action="append", default=[], type=yaml.safe_load, help="another row")
    parser.add_argument("--bucket-bytes", type=int, help="of rows with a codec; default: chosen")
    parser.add_argument("--brief", action="store_true", help="neither without drafts nor over gRPC")
    parser.add_argument("--hooks", action="store_true", help="also DDP with its own compression")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parsed = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        parser.error("needs root, and the commands ip and tc (iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    four = range(4)
    servers, workers = ([0], [1]) if parsed.workers == 1 else (range(4, 8) if parsed.apart else four, four)
    rows: dict[str, dict[str, Any]] = {
        "elastic-ps": {},
        "elastic-ps, buckets of 4 MiB": {"server": {"bucketBytes": BUCKET_BYTES}},
    }
    if not parsed.brief:
        rows["elastic-ps, no drafts"] = {"server": {"drafts": False}}
        rows["elastic-ps over gRPC"] = {"scheme": "grpc:"}
    for compression in [{"codec": codec} for codec in parsed.codec] + parsed.compression:
        words = [compression.get("codec", NONE)]
        words += [f"{key} {value}" for key, value in compression.items() if key != "codec"]
        server = {} if parsed.bucket_bytes is None else {"bucketBytes": parsed.bucket_bytes}
        rows[f"elastic-ps, {', '.join(words)}"] = {"compression": compression, "server": server}
    found: dict[str, list[Measured]] = {name: [] for name in rows}
    if parsed.workers == 4:
        found["DDP"] = []
        found |= {f"DDP, {hook}": [] for hook in HOOKS if parsed.hooks}
    hosts = Hosts(8 if parsed.apart else 4, parsed.gbit)
    try:
        for _ in range(parsed.rounds):
            for name, results in found.items():
                if name.startswith("DDP"):
                    hook = name.removeprefix("DDP").removeprefix(", ")
                    results.append(measure_ddp(hosts, parsed.case, workers, hook))
                else:
                    results.append(measure_ours(hosts, parsed.case, servers, workers, **rows[name]))
                # At once: a later row may fail, after many minutes.
                print(f"{name}: {results[-1].step * 1e3:.0f} ms", file=sys.stderr, flush=True)
    finally:
        hosts.close()
    shared = 1 if parsed.workers == 1 or parsed.apart else 4
    least = least_seconds(parsed.case, shared, parsed.gbit)
    steps = {name: median(results).step for name, results in found.items()}
    print(f"{CASES[parsed.case].name}, {parsed.gbit:g} Gbit/s; the bytes alone need {least * 1e3:.0f} ms")
    for name, step in steps.items():
        ratio = (
            f"  {step / steps['DDP']:.2f} of DDP" if "DDP" in steps else f"  {step / least:.2f} of the bytes"
        )
        print(f"{name:44} {step * 1e3:7.0f} ms{ratio}")
    competitor, theirs = ("DDP", steps["DDP"]) if "DDP" in steps else ("the bytes alone", least)
    write(
        parsed.json,
        [
            Figure(name, step * 1e3, theirs * 1e3, "ms", competitor)
            for name, step in steps.items()
            if not name.startswith("DDP")
        ],
    )


if __name__ == "__main__":
    main()
