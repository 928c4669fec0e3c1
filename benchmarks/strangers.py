"""How many calls of strangers a server with certificates answers: none, of a hundred thousand.

    python -m benchmarks.strangers --calls 100000

A process serves with a job's certificates, over tcp and over gRPC, as a parameter server does. Others call it
from many addresses: in plain text, without a certificate, and with one of another authority, of another job
of the same authority, or that has ended. None of them looks at the server's certificate. An answer is
anything that comes back but an alert of TLS, or the server's handler being called. A worker of the job calls
in the same ways, and is answered: so a call that could not be answered at all is found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from elastic_ps.contract.identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, server_name
from elastic_ps.transport import tcp
from elastic_ps.transport.base import Frame, Incoming, Server, unary
from elastic_ps.transport.credentials import Credentials
from elastic_ps.transport.grpc import GrpcServer
from elastic_ps.transport.line import HEAD, LineKind
from elastic_ps.transport.stream import GREETING
from elastic_ps.transport.tcp import TcpServer
from elastic_ps.transport.wire import messages
from tests.testing.certificates import HOUR, JOB, authority, write

THREADS = 4
SECONDS = 20.0
"""How long a call waits; one that hears nothing at all until then is not answered."""

ALERT = b"\x15"
"""The first byte of what TLS sends to say why it hangs up."""

METHOD = b"ask"
FRAMES = GREETING + HEAD.pack(LineKind.CALL, 0, len(METHOD), 0, 0, 0, 0) + METHOD
"""A whole call over tcp."""

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client says first; a server that talks to it answers with its settings."""

Way: TypeAlias = Literal["tcp", "grpc"]
Try: TypeAlias = Callable[[int], bool]
"""The call of a number; whether it was answered."""


@dataclass(frozen=True)
class Result:
    """Attributes: `answered`: calls by who made them and how; `reached`: how often the handler was called."""

    calls: int
    seconds: float
    answered: dict[str, int]
    reached: int


def serve(directory: Path, pipe: Connection) -> None:
    """In a process of its own: tell the ports, and whenever asked how often the handler was called."""
    reached: list[str] = []

    def answer(method: str, _incoming: Incoming) -> Iterator[Frame]:
        reached.append(method)
        yield Frame(b"answered")

    credentials = Credentials(directory)
    servers: list[Server] = [kind("127.0.0.1:0", credentials=credentials) for kind in (TcpServer, GrpcServer)]
    for server in servers:
        server.serve(answer)
    pipe.send([tcp.split(server.address)[1] for server in servers])
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(len(reached))
    for server in servers:
        server.close()


def context(directory: Path | None) -> ssl.SSLContext:
    """For a client that trusts everybody, and shows the certificate in `directory`, if it has one."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
    found.set_alpn_protocols(["h2"])
    if directory is not None:
        found.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    return found


def over_socket(port: int, said: bytes, tls: ssl.SSLContext | None) -> Try:
    """Calls of which each has a connection, from one of 200 addresses."""

    def call(number: int) -> bool:
        source = (f"127.0.0.{2 + number % 200}", 0)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), SECONDS, source_address=source)
            )
            try:
                if tls is not None:
                    sock = stack.enter_context(tls.wrap_socket(sock))
                sock.sendall(said)
                if not (heard := sock.recv(100)):
                    return False
            except OSError:  # it hung up, or sent an alert
                return False
        return tls is not None or not heard.startswith(ALERT)

    return call


def over_channel(port: int, directory: Path, stack: contextlib.ExitStack) -> Try:
    """Calls over one connection of gRPC, of a client that takes the server for one of its own job."""
    files = [(directory / name).read_bytes() for name in (CA_FILE, KEY_FILE, CERTIFICATE_FILE)]
    options = [("grpc.ssl_target_name_override", server_name(JOB))]
    channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*files), options)
    stack.callback(channel.close)
    ask: Any = channel.unary_unary("/elastic_ps.transport.Transport/Call", None, None)
    request = next(messages(Frame(b""), METHOD.decode()))

    def call(_number: int) -> bool:
        try:
            ask(request, timeout=SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:  # it was not tried
                raise
            return False
        return True

    return call


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[dict[Way, int], Callable[[], int]]]:
    """The ports of a process with the certificate in `directory`, and how often its handler was called."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(directory, theirs))
    process.start()
    theirs.close()

    def reached() -> int:
        ours.send(None)
        return int(ours.recv())

    try:
        numbers = ours.recv()
        yield {"tcp": numbers[0], "grpc": numbers[1]}, reached
    finally:
        ours.close()
        process.join()


def measure(root: Path, calls: int) -> Result:
    """About so many calls of strangers, as many of each kind; then those of a worker.

    Raises:
        AssertionError: the worker was not answered.
    """
    ca = authority()
    server, worker = write(root / "server", ca, "server"), write(root / "worker", ca, "worker", 3)
    another_job = write(root / "job", ca, "worker", job="job-2")
    shown: dict[str, ssl.SSLContext | None] = {
        "plain text": None,
        "no certificate": context(None),
        "another authority": context(write(root / "other", authority(), "worker", 3)),
        "another job": context(another_job),
        "it has ended": context(write(root / "old", ca, "worker", 3, lifetime=-HOUR / 2)),
    }
    said: dict[Way, bytes] = {"tcp": FRAMES, "grpc": HTTP2}
    with serving(server) as (ports, reached), contextlib.ExitStack() as stack:
        strangers = {
            f"{way}, {name}": over_socket(ports[way], said[way], tls)
            for way in said
            for name, tls in shown.items()
        }
        # gRPC makes a connection with it, and refuses each call.
        strangers["grpc, another job"] = over_channel(ports["grpc"], another_job, stack)
        begin, each = time.monotonic(), -(-calls // len(strangers))
        with ThreadPoolExecutor(THREADS) as pool:
            answered = {name: sum(pool.map(call, range(each))) for name, call in strangers.items()}
        seconds, heard = time.monotonic() - begin, reached()
        known = tcp.connect(f"127.0.0.1:{ports['tcp']}", credentials=Credentials(worker))
        stack.callback(known.close)
        assert unary(known, METHOD.decode(), b"", timeout=timedelta(seconds=SECONDS)) == b"answered"
        assert over_socket(ports["grpc"], HTTP2, context(worker))(0)
        assert over_channel(ports["grpc"], worker, stack)(0)
        assert reached() == heard + 2, "the worker's calls, and they are counted"
    return Result(each * len(strangers), seconds, answered, heard)


def main() -> int:
    """1 if a stranger was answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    with tempfile.TemporaryDirectory(prefix="elastic-ps-strangers-") as directory:
        result = measure(Path(directory), parser.parse_args().calls)
    print(json.dumps(asdict(result), indent=1))
    return int(result.reached > 0 or any(result.answered.values()))


if __name__ == "__main__":
    sys.exit(main())
