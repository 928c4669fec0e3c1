"""What it costs to reach a parameter server through MPI, beside the connection that is used between hosts.

`mpirun -n 2 python -m benchmarks.relay` starts a server beside rank 0 and a client on rank 1, as a job does.
For `tcp` (without TLS, on loopback) and `mpi` it prints, in turns in the same run, GB/s up and down, the
processor time of each process for a GB, and the time of a call without a body, made after pauses of different
lengths. At the end it prints the processor time of the ranks while nothing travels.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from elastic_ps.contract.env import PREFIX
from elastic_ps.local import mpi
from elastic_ps.local.processes import free_addresses
from elastic_ps.transport import ways
from elastic_ps.transport.base import Connection, Frame, Incoming

SIZE = 16 * 1024 * 1024
BODIES = 20
ROUNDS = 3
PAUSES = (0.0, 0.001, 0.01, 0.1)
CALLS = 50
IDLE = 5.0
TIMEOUT = timedelta(seconds=60)
_MEMORY = memoryview(bytearray(SIZE))
_PROCESSES = ("server", "rank 0", "rank 1", "client")


def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Take a body, or send one; for one call at a time."""
    incoming.read_into(_MEMORY[: incoming.size])
    yield Frame(b"", _MEMORY if method == "down" else _MEMORY[:0], last=True)


def serve(addresses: list[str]) -> None:
    """Answer until the standard input ends."""
    servers = [ways.listen(address) for address in addresses]
    for server in servers:
        server.serve(handler)
    print("ready", flush=True)
    sys.stdin.read()


def _call(connection: Connection, method: str) -> None:
    frame = Frame(b"", _MEMORY if method == "up" else _MEMORY[:0])
    for answer in connection.call(method, frame, timeout=TIMEOUT):
        answer.read_into(_MEMORY[: answer.size])


class Processors:
    """The processor time of the four processes, in seconds, since this was made."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before = self._now()

    def _now(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def used(self) -> dict[str, float]:
        """By process."""
        pairs = zip(self._before, self._now(), strict=True)
        return dict(zip(_PROCESSES, (after - before for before, after in pairs), strict=True))


def measure(pids: list[int]) -> None:
    """The client: print everything."""
    addresses = {"tcp": os.environ["DIRECT"], "mpi": os.environ[f"{PREFIX}ADDRESSES"]}
    connections = {way: ways.connect(address) for way, address in addresses.items()}
    for method in ("up", "down"):
        rates: dict[str, list[float]] = {way: [] for way in connections}
        used = {way: dict.fromkeys(_PROCESSES, 0.0) for way in connections}
        for _ in range(ROUNDS):
            for way, connection in connections.items():
                _call(connection, method)
                processors, began = Processors(pids), time.monotonic()
                for _ in range(BODIES):
                    _call(connection, method)
                rates[way].append(BODIES * SIZE / 1e9 / (time.monotonic() - began))
                for name, seconds in processors.used().items():
                    used[way][name] += seconds / (ROUNDS * BODIES * SIZE / 1e9)
        for way in connections:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in used[way].items())
            total = sum(used[way].values())
            print(f"{way} {method}: {statistics.median(rates[way]):.2f} GB/s; {total:.2f} s/GB ({parts})")
    for pause in PAUSES:
        for way, connection in connections.items():
            took = []
            for _ in range(CALLS):
                time.sleep(pause)
                began = time.monotonic()
                _call(connection, "nothing")
                took.append(time.monotonic() - began)
            print(f"{way} call after {pause * 1000:g} ms: {statistics.median(took) * 1e6:.0f} us")
    processors = Processors(pids)
    time.sleep(IDLE)
    idle = {name: seconds / IDLE for name, seconds in processors.used().items()}
    print(f"idle: rank 0 {idle['rank 0']:.1%}, rank 1 {idle['rank 1']:.1%} of a core")


def main() -> None:
    """Start the server and the client, and print what the client has measured."""
    world = mpi.World()
    if world.rank:
        mpi.serve(world, relays=True)
        return
    slots = mpi.Slots(world, relays=True)
    direct, relayed = (f"{way}:{place}" for way, place in zip(("tcp", "mpi"), free_addresses(2), strict=True))
    command = [sys.executable, "-m", "benchmarks.relay"]
    pipe = subprocess.PIPE
    with (
        TemporaryDirectory() as directory,
        subprocess.Popen([*command, "serve", direct, relayed], stdin=pipe, stdout=pipe) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdout.readline()
        log = Path(directory) / "client.log"
        client = slots.start(
            0,
            [*command, "measure", str(server.pid), str(os.getpid())],
            variables={f"{PREFIX}ADDRESSES": relayed, "DIRECT": direct},
            log=log,
        )
        while (status := client.poll()) is None:
            time.sleep(0.05)
        print(log.read_text(), end="", flush=True)
        server.stdin.close()
    slots.close()
    if status:
        raise SystemExit(f"the client has ended with status {status}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *addresses]:
            serve(addresses)
        case ["measure", server, rank]:
            measure([int(server), int(rank), os.getppid(), os.getpid()])
        case _:
            main()
