"""How fast bodies travel between two processes of this machine: each transport beside a raw TCP socket.

`python -m benchmarks.transport` prints, for each size and direction, MB/s (median of the rounds), the ratio
to `sendall` and `recv_into` on a socket, measured in turns in the same run, and the processor time of both
sides for a GB. `memcpy` copies the body within a process. With `shm` the body is in shared memory, and the
receiver copies it from there; `inproc` runs in one process. Both sides write into memory that they have
already, as a worker and a parameter server do. `sealed` is `tcp` with certificates; `tls` is `sendall` and
`recv_into` on Python's own TLS socket.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil

from benchmarks.figures import Figure, write
from elastic_ps.transport import local, tcp
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.transport.credentials import Credentials
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.transport.inproc import InprocServer, connect
from elastic_ps.transport.local import LocalServer
from elastic_ps.transport.memory import SharedMemory
from elastic_ps.transport.stream import StreamServer
from elastic_ps.transport.tcp import TcpServer
from tests.testing.certificates import authority
from tests.testing.certificates import write as certify

MIB = 1024 * 1024
LARGEST = 64 * MIB
TIMEOUT = timedelta(seconds=60)
REQUEST = struct.Struct("!?Q")
"""To the raw socket's server: whether the body goes up, and its size."""

BESIDE = ("socket", "tls", "memcpy")
"""What the transports are compared with."""

Transfer = Callable[[bool, memoryview], None]
"""Moves a body: up from the view, or down into it."""


def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Take a body, or send one of as many bytes as the header says; for one call at a time."""
    if method == "up":
        incoming.read_into(_MEMORY[: incoming.size])
        yield Frame(b"")
    else:
        yield Frame(b"", _MEMORY[: int(incoming.header)])


_MEMORY = SharedMemory(LARGEST).take(LARGEST)


def serve_raw(listener: socket.socket, credentials: Credentials | None) -> None:
    """What `handler` does, over a bare socket or one with TLS, until the client goes."""
    client, _ = listener.accept()
    if credentials is not None:
        client = credentials.accepting().wrap_socket(client, server_side=True)
    with client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = bytearray(REQUEST.size)
        while client.recv_into(request):  # sent at once, so it comes at once
            up, size = REQUEST.unpack(request)
            if up:
                receive(client, _MEMORY[:size])
                client.sendall(b"k")
            else:
                client.sendall(_MEMORY[:size])


def receive(client: socket.socket, target: memoryview) -> None:
    """Fill `target`."""
    while target:
        target = target[client.recv_into(target) :]


def over_socket(client: socket.socket) -> Transfer:
    """Moves bodies with `sendall` and `recv_into`."""

    def transfer(up: bool, body: memoryview) -> None:
        client.sendall(REQUEST.pack(up, len(body)))
        if up:
            client.sendall(body)
            client.recv(1)
        else:
            receive(client, body)

    return transfer


def within_memory(there: memoryview) -> Transfer:
    """Copies a body to `there`, or back: what copies once can do no better."""

    def transfer(up: bool, body: memoryview) -> None:
        other = there[: len(body)]
        target, source = (other, body) if up else (body, other)
        target[:] = source

    return transfer


def over(connection: Connection) -> Transfer:
    """Moves bodies with calls."""

    def transfer(up: bool, body: memoryview) -> None:
        if up:
            for _ in connection.call("up", Frame(b"", body), timeout=TIMEOUT):
                pass
        else:
            for answer in connection.call("down", Frame(str(len(body)).encode()), timeout=TIMEOUT):
                answer.read_into(body)

    return transfer


def serve(certificate: Path) -> None:
    """The other process: print where it listens, serve until its input ends."""
    credentials = Credentials(certificate)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as secure,
    ):
        server = GrpcServer("127.0.0.1:0")
        server.serve(handler)
        near, data = LocalServer(server.address), TcpServer("127.0.0.1:0")
        sealed = TcpServer("127.0.0.1:0", credentials=credentials)
        streams: list[StreamServer] = [near, data, sealed]
        for stream in streams:
            stream.serve(handler)
        ports = [str(each.getsockname()[1]) for each in (listener, secure)]
        for raw, using in ((listener, None), (secure, credentials)):
            threading.Thread(target=serve_raw, args=(raw, using), name="raw", daemon=True).start()
        print(*ports, server.address, data.address, sealed.address, flush=True)
        sys.stdin.read()
        server.close()
        for stream in streams:
            stream.close()


@contextlib.contextmanager
def transfers() -> Iterator[tuple[dict[str, Transfer], Callable[[], float]]]:
    """A way to move bodies for each name, the raw socket first; and the processor time of both sides."""
    with contextlib.ExitStack() as stack:
        directory, ca = Path(stack.enter_context(tempfile.TemporaryDirectory())), authority()
        certificate = certify(directory / "server", ca, "server")
        credentials = Credentials(certify(directory / "worker", ca, "worker"))
        command = [sys.executable, "-m", "benchmarks.transport", "--serve", str(certificate)]
        peer = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert peer.stdout is not None
        port, secure, address, data, sealed = peer.stdout.readline().split()
        client, encrypted = (
            stack.enter_context(socket.create_connection(("127.0.0.1", int(each)))) for each in (port, secure)
        )
        for each in (client, encrypted):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        encrypted = stack.enter_context(
            credentials.current().client.wrap_socket(encrypted, server_hostname=credentials.server_name)
        )
        here = InprocServer()
        here.serve(handler)
        stack.callback(here.close)
        connections = {
            "grpc": GrpcConnection(address),
            "tcp": tcp.connect(data),
            "sealed": tcp.connect(sealed, credentials=credentials),
            "shm": local.connect(address),
            "inproc": connect(here),
        }
        for connection in connections.values():
            stack.callback(connection.close)
        processes = psutil.Process(), psutil.Process(peer.pid)
        ways = {
            "socket": over_socket(client),
            "tls": over_socket(encrypted),
            "memcpy": within_memory(memoryview(bytearray(LARGEST))),
        } | {name: over(each) for name, each in connections.items()}
        yield ways, lambda: sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(sizes: list[int], rounds: int) -> list[Figure]:
    """Print the table, and return it."""
    figures = []
    print(f"{'MiB':>4} {'direction':9} {'transport':9} {'MB/s':>7} {'ratio':>6} {'CPU s/GB':>9}")
    body = SharedMemory(LARGEST).take(LARGEST)
    body[:] = b"\1" * LARGEST
    with transfers() as (ways, cpu_seconds):
        for size, up in [(size, up) for size in sizes for up in (True, False)]:
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            cpu = dict.fromkeys(ways, 0.0)
            repeats = max(1, LARGEST // size)
            for number in range(rounds + 1):
                for name, transfer in ways.items():
                    began, spent = time.perf_counter(), cpu_seconds()
                    for _ in range(repeats):
                        transfer(up, body[:size])
                    if number:  # the first round warms up
                        seconds[name].append((time.perf_counter() - began) / repeats)
                        cpu[name] += cpu_seconds() - spent
            rates = {name: size / statistics.median(taken) / 1e6 for name, taken in seconds.items()}
            for name, rate in rates.items():
                ratio, each_gb = rate / rates["socket"], cpu[name] / (rounds * repeats * size / 1e9)
                print(
                    f"{size / MIB:4.0f} {'up' if up else 'down':9} {name:9} {rate:7.0f} {ratio:6.2f} "
                    f"{each_gb:9.2f}"
                )
                what = f"{size / MIB:.0f} MiB {'up' if up else 'down'}, {name}"
                if name not in BESIDE:
                    figures.append(Figure(what, rate, rates["socket"], "MB/s", "raw socket", more=True))
                if name == "sealed":
                    figures.append(Figure(what, rate, rates["tls"], "MB/s", "TLS socket", more=True))
                if name == "shm":
                    figures.append(Figure(what, rate, rates["memcpy"], "MB/s", "memcpy", more=True))
                if name in ("tcp", "shm"):
                    grpc = cpu["grpc"] / (rounds * repeats * size / 1e9)
                    figures.append(Figure(f"{what}, processor time", each_gb, grpc, "s/GB", "gRPC"))
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 64], help="MiB of the bodies")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    else:
        write(arguments.json, measure([size * MIB for size in arguments.sizes], arguments.rounds))


if __name__ == "__main__":
    main()
