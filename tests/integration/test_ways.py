"""Which transport leads to an address, and what happens when the better one does not."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.drill.wire import Wires
from elastic_ps.errors import CannotListen, ConnectionLost, DeadlineExceeded, UsageError
from elastic_ps.local.processes import free_ports
from elastic_ps.transport import line, local, shares, stream, tcp, ways
from elastic_ps.transport.base import Connection, Frame, Incoming, Limits, Server, unary
from elastic_ps.transport.grpc import GrpcServer
from elastic_ps.transport.tcp import TcpServer, data_address
from tests.testing import machine
from tests.testing.addresses import addresses
from tests.testing.polling import LIMIT, eventually
from tests.testing.transports import LONG, Reading


def name_the_way(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Answer with how the call came."""
    yield Frame(incoming.transport.encode())


def way_to(connection: Connection) -> str:
    return unary(connection, "ask", b"", timeout=LONG).decode()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that is free, on what counts as another host; its data port is free, too."""
    machine.is_another_host(monkeypatch)
    while True:
        (address,) = addresses(1)
        with contextlib.suppress(OSError), socket.create_server(tcp.split(data_address(address))):
            return address


def patient(address: str) -> contextlib.closing[Connection]:
    """A connection. On a busy machine it may take more than a second until a data port has spoken."""
    return contextlib.closing(ways.connect(address, limits=Limits(speaks=LONG)))


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    server.serve(name_the_way)
    try:
        yield server
    finally:
        server.close()


def everywhere(address: str) -> contextlib.AbstractContextManager[Server]:
    """A server on all addresses of this host, as in a pod."""
    return serving(ways.listen(f"0.0.0.0:{tcp.split(address)[1]}"))


@pytest.mark.parametrize("scheme", ["shm", "tcp", "grpc", "mpi"])
def test_a_scheme_names_the_way(scheme: str) -> None:
    (address,) = addresses(1)
    with (
        serving(ways.listen(f"{scheme}:{address}")),
        contextlib.closing(ways.connect(f"{scheme}:{address}")) as connection,
    ):
        assert way_to(connection) == scheme
        for other in {"shm", "tcp", "grpc"} - {scheme, "shm" if scheme == "mpi" else ""}:
            with (
                contextlib.closing(ways.connect(f"{other}:{address}")) as wrong,
                pytest.raises(ConnectionLost),
            ):
                way_to(wrong)


def test_a_data_port_that_is_named_may_be_behind_a_relay() -> None:
    """Which has another port, so that the server's own number says nothing."""
    with contextlib.closing(Wires()) as wires, serving(TcpServer("127.0.0.1:0")) as server:
        (relay,) = wires.route(0, [server.address])
        with contextlib.closing(ways.connect(f"tcp:{relay}")) as connection:
            assert way_to(connection) == "tcp"


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("127.0.0.1:1", ("", "127.0.0.1:1")),
        ("[::1]:2", ("", "[::1]:2")),
        ("digits-ps-0:2222", ("", "digits-ps-0:2222")),
        ("tcp:digits-ps-0:2222", ("tcp", "digits-ps-0:2222")),
        ("grpc:[::1]:2", ("grpc", "[::1]:2")),
    ],
)
def test_an_address_may_have_a_scheme(address: str, parsed: tuple[str, str]) -> None:
    assert ways.parse(address) == parsed


@pytest.mark.parametrize("address", ["", "host", "rdma:host:1", "tcp:host:", "host:70000", "host:one", ":1"])
def test_an_address_that_is_none_is_refused_in_words(address: str) -> None:
    for made in (ways.connect, ways.listen):
        with pytest.raises(UsageError, match=r"is not an address\. Expected host:port, or one of shm, tcp"):
            made(address)


def test_another_host_is_reached_at_its_data_port(far: str) -> None:
    with everywhere(far), patient(far) as connection:
        assert way_to(connection) == "tcp"


def test_a_port_that_was_picked_has_its_data_port_beside_it(far: str) -> None:
    with (
        serving(ways.listen("0.0.0.0:0")) as server,
        patient(server.address) as connection,
    ):
        assert way_to(connection) == "tcp"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_server_on_every_address_is_reached_with_both_protocols(far: str, bind: str, host: str) -> None:
    """As gRPC's port is, whichever of them is named."""
    port = tcp.split(far)[1]
    with (
        serving(ways.listen(f"{bind}:{port}")),
        patient(f"{host}:{port}") as connection,
    ):
        assert way_to(connection) == "tcp"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_address_of_a_server_on_ipv6_leads_to_it() -> None:
    with (
        serving(TcpServer("[::1]:0")) as server,
        contextlib.closing(ways.connect(f"tcp:{server.address}")) as connection,
    ):
        assert server.address.startswith("[::1]:")
        assert way_to(connection) == "tcp"


def test_a_server_that_does_not_serve_yet_is_reached_at_its_data_port(far: str) -> None:
    """As one that loads a checkpoint, when the workers look for it again."""
    server = ways.listen(f"0.0.0.0:{tcp.split(far)[1]}")
    serve = threading.Timer(1.5 * tcp.CONNECT.total_seconds(), server.serve, [name_the_way])
    serve.start()
    with contextlib.closing(server), contextlib.closing(ways.connect(far)) as connection:
        assert way_to(connection) == "tcp"
        serve.join()


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_server_that_is_closed_before_it_serves_lets_its_clients_go(scheme: str) -> None:
    (address,) = addresses(1)
    server = ways.listen(f"{scheme}:{address}")
    with contextlib.closing(ways.connect(f"{scheme}:{address}")) as connection:
        answers = connection.call("ask", Frame(b""), timeout=LONG)
        server.close()
        with pytest.raises(ConnectionLost):
            next(answers)


def silent(sock: socket.socket) -> None:
    """A port that accepts, and says nothing."""


def wrong(sock: socket.socket) -> None:
    """The data port of another server."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                with sock.accept()[0] as client:
                    client.sendall(b"elastic-ps/2 00001\n")

    threading.Thread(target=accept, daemon=True).start()


@pytest.mark.parametrize("stranger", [silent, wrong, None])
def test_without_the_data_port_grpc_is_used_and_the_log_says_so(
    far: str, stranger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elastic_ps")
    with contextlib.ExitStack() as stack:
        if stranger is not None:
            sock = stack.enter_context(socket.create_server(tcp.split(data_address(far))))
            stranger(sock)
            stack.callback(sock.shutdown, socket.SHUT_RDWR)
            stack.enter_context(everywhere(far))
            assert f"cannot listen on 0.0.0.0:{tcp.split(data_address(far))[1]}" in caplog.text
        else:
            stack.enter_context(serving(GrpcServer(far)))
        connection = stack.enter_context(contextlib.closing(ways.connect(far)))
        assert [way_to(connection) for _ in range(3)] == ["grpc"] * 3
    said = [r.getMessage() for r in caplog.records if "is reached over gRPC" in r.getMessage()]
    assert len(said) == 1
    assert f"{far} is reached over gRPC, because its data port cannot be used: " in said[0]


def test_no_call_and_no_close_waits_for_another_calls_look(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not answer: all threads have to learn it in the time that one needs."""
    looking = threading.Barrier(4)
    released = threading.Event()

    def vanished(*_: Any, **__: Any) -> socket.socket:
        looking.wait(LIMIT)
        released.wait(LIMIT)
        raise TimeoutError("timed out")

    machine.dials(monkeypatch, vanished)
    connection = ways.connect(far)
    errors = list[Exception]()

    def call() -> None:
        try:
            way_to(connection)
        except ConnectionLost as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    looking.wait(LIMIT)
    connection.close()
    released.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 3


@contextlib.contextmanager
def late(address: str, to: str, seconds: float) -> Iterator[None]:
    """A relay at `address`, which passes on what it takes so much later."""

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def relay(client: socket.socket) -> None:
        time.sleep(seconds)
        with client, socket.create_connection(tcp.split(to)) as server:
            back = threading.Thread(target=pass_on, args=(server, client))
            back.start()
            pass_on(client, server)
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=relay, args=(listener.accept()[0],)).start()

    with socket.create_server(tcp.split(address)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def test_the_time_of_a_look_counts_as_the_calls(far: str) -> None:
    """It takes 0.7 s, as the connection and the answer do, which would be in time alone."""

    def answer(method: str, incoming: Incoming) -> Iterator[Frame]:
        time.sleep(0.7)
        yield Frame(incoming.transport.encode())

    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(GrpcServer(far)))
        data = stack.enter_context(contextlib.closing(TcpServer("127.0.0.1:0", known=far)))
        data.serve(answer)
        stack.enter_context(late(data_address(far), data.address, 0.7))
        connection = stack.enter_context(patient(far))
        with pytest.raises(DeadlineExceeded):
            unary(connection, "ask", b"", timeout=timedelta(seconds=1.8))
        assert way_to(connection) == "tcp"


def test_a_data_port_that_speaks_slowly_is_a_strangers() -> None:
    ended = threading.Event()

    def speak(listener: socket.socket) -> None:
        with listener.accept()[0] as client, contextlib.suppress(OSError):
            while not ended.wait(0.1):
                client.sendall(b"e")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak, args=(listener,))
        thread.start()
        with pytest.raises(TimeoutError):
            tcp.dial(f"127.0.0.1:{listener.getsockname()[1]}", speaks=timedelta(seconds=0.3))
        ended.set()
        thread.join()


def test_a_server_that_is_busy_is_not_taken_for_lost() -> None:
    """Its data port has been chosen, so it is no stranger's."""
    with (
        serving(TcpServer("127.0.0.1:0")) as server,
        contextlib.closing(Wires()) as wires,
        contextlib.closing(tcp.connect(*wires.route(0, [server.address]))) as connection,
        ThreadPoolExecutor(1) as threads,
    ):
        with wires.cut(0):
            asked = threads.submit(way_to, connection)
            threading.Event().wait(1.5 * tcp.CONNECT.total_seconds())
        assert asked.result(60) == "tcp"


def test_a_server_that_comes_back_is_reached_at_its_data_port_again(far: str) -> None:
    with patient(far) as connection:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="nobody serves there"):
                way_to(connection)
            with everywhere(far):
                assert way_to(connection) == "tcp"
            with pytest.raises(ConnectionLost):
                way_to(connection)


def test_a_server_that_stood_still_is_reached_at_its_data_port_again(far: str) -> None:
    """Ports of a process that is stopped take connections, and say nothing."""
    with contextlib.closing(ways.connect(far, limits=Limits(speaks=timedelta(seconds=10)))) as connection:
        with everywhere(far):
            assert way_to(connection) == "tcp"
        with (
            socket.create_server(tcp.split(far)),
            socket.create_server(tcp.split(data_address(far))),
        ):
            with pytest.raises(ConnectionLost):
                way_to(connection)
            with pytest.raises(ConnectionLost, match="does not answer"):
                unary(connection, "ask", b"", timeout=timedelta(seconds=2))
        with everywhere(far):
            assert way_to(connection) == "tcp"


def test_a_server_that_comes_back_without_its_data_port_is_reached_over_grpc(far: str) -> None:
    with patient(far) as connection:
        with everywhere(far):
            assert way_to(connection) == "tcp"
        with serving(GrpcServer(far)):
            with pytest.raises(ConnectionLost):
                way_to(connection)
            assert way_to(connection) == "grpc"
        with everywhere(far):
            with contextlib.suppress(ConnectionLost):  # gRPC may have found it again
                way_to(connection)
            assert way_to(connection) in ("tcp", "grpc")


def test_who_takes_the_servers_name_within_the_host_is_not_overlooked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another user, who would make the job slower; and no new job gets such a port."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.bind(local.name_of(address) or "")
        stranger.listen()
        with pytest.raises(CannotListen, match="needs 1 free ports"):
            free_ports(1, range(port, port + 1))
        machine.is_another_users(monkeypatch)
        with serving(ways.listen(address)), contextlib.closing(ways.connect(address)) as connection:
            assert way_to(connection) == "grpc"
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 2
    assert "cannot listen on this host" in told[0]
    assert "belongs to another user" in told[1]


def test_sockets_do_not_take_all_descriptors_of_a_server(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are for gRPC, which is used then, and for checkpoints."""
    machine.lacks_descriptors(monkeypatch, 2 * shares.PART)
    with everywhere(far), contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(tcp.dial(data_address(far), speaks=LONG)).sendall(stream.GREETING)
        connection = stack.enter_context(contextlib.closing(ways.connect(far)))
        assert way_to(connection) == "grpc"


def test_one_address_has_a_share_of_the_sockets(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With them it would have all threads, too, and nobody else could call."""
    share = Limits().share
    machine.lacks_descriptors(monkeypatch, 2 * share * shares.PART)
    with everywhere(far), contextlib.ExitStack() as stack:
        host, port = tcp.split(data_address(far))
        greedy, heard = list[socket.socket](), list[bool]()
        for _ in range(share + 4):
            sock = socket.create_connection((host, port), source_address=("127.0.0.9", 0))
            greedy.append(stack.enter_context(sock))
            heard.append(bool(sock.recv(1)))
            if heard[-1]:
                sock.sendall(stream.GREETING)  # the server hangs up on those that say nothing for long
        assert heard == [True] * share + [False] * 4
        connection = stack.enter_context(patient(far))
        assert way_to(connection) == "tcp", "others are served"
        greedy[0].close()
        eventually(lambda: hears(host, port), "what it gives back, it may have again")


def hears(host: str, port: int) -> bool:
    with socket.create_connection((host, port), source_address=("127.0.0.9", 0)) as sock:
        return bool(sock.recv(1))


def test_a_client_that_stops_in_the_middle_of_a_body_is_cut_off() -> None:
    reading = Reading()
    server = TcpServer("127.0.0.1:0", stall=timedelta(milliseconds=200))
    server.serve(reading)
    head = line.HEAD.pack(line.LineKind.CALL, 0, 4, 0, 0, 10, 0)
    with tcp.dial(server.address, speaks=LONG) as slow:
        slow.sendall(stream.GREETING + head + b"push" + b"123")
        assert slow.recv(100) == b""
        eventually(lambda: reading.errors, "the handler is told")
    assert "the client has sent nothing for 0.2 s in the middle of a frame" in str(reading.errors[0])
    server.close()


def test_a_client_that_sends_next_to_nothing_of_a_body_is_cut_off() -> None:
    """It would keep a receive buffer, a thread and a socket for ever."""
    reading = Reading()
    server = TcpServer("127.0.0.1:0", stall=timedelta(milliseconds=500))
    server.serve(reading)
    head = line.HEAD.pack(line.LineKind.CALL, 0, 4, 0, 0, 1000, 0)
    with tcp.dial(server.address, speaks=LONG) as slow:
        slow.sendall(stream.GREETING + head + b"push")

        def cut_off() -> bool:
            with contextlib.suppress(ConnectionError):
                slow.sendall(b"1")
            return bool(reading.errors)

        eventually(cut_off, "the handler is told")
    assert "or next to nothing" in str(reading.errors[0])
    server.close()


def test_a_header_that_is_only_announced_takes_no_memory() -> None:
    server = TcpServer("127.0.0.1:0", stall=timedelta(milliseconds=200))
    server.serve(Reading())
    announced = server.limits.header_bytes
    tracemalloc.start()
    try:
        with tcp.dial(server.address, speaks=LONG) as stranger:
            stranger.sendall(
                stream.GREETING + line.HEAD.pack(line.LineKind.CALL, 0, 4, announced, 0, 0, 0) + b"push"
            )
            assert stranger.recv(100) == b""
        assert tracemalloc.get_traced_memory()[1] < announced / 2
    finally:
        tracemalloc.stop()
    server.close()


def test_a_client_that_takes_no_more_of_a_body_is_cut_off() -> None:
    ended = threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        try:
            yield Frame(b"", memoryview(bytes(100_000_000)))
        finally:
            ended.set()

    server = TcpServer("127.0.0.1:0", stall=timedelta(milliseconds=200))
    server.serve(handler)
    with contextlib.closing(tcp.connect(server.address)) as connection:
        answer = next(connection.call("ask", Frame(b""), timeout=LONG))
        assert ended.wait(20), "the handler is closed"
        with pytest.raises(ConnectionLost):
            answer.read_into(memoryview(bytearray(answer.size)))
    server.close()


HALF_OPEN = """
import os, subprocess, sys, threading, time
from datetime import timedelta
from elastic_ps.errors import ConnectionLost
from elastic_ps.transport import tcp
from elastic_ps.transport.base import Frame

def network(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

sends = sys.argv[1] == "send"
cancelled = threading.Event()

def handler(method, incoming):
    try:
        while True:
            yield Frame(b"", memoryview(bytes(1000)))
            time.sleep(0.1 if sends else 1000)
    finally:
        cancelled.set()

network("up")
tcp.PROBE, tcp.GONE = timedelta(seconds=1), timedelta(seconds=5)
server = tcp.TcpServer("127.0.0.1:0")
server.serve(handler)
connection = tcp.connect(server.address)
answers = connection.call("ask", Frame(b""), timeout=timedelta(seconds=60))
next(answers)
network("down")
try:
    while True:
        next(answers)
except ConnectionLost as error:
    print("the client notices:", error)
if sends:
    assert cancelled.wait(30)
    print("the server notices")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("does", ["wait", "send"])
def test_a_host_that_vanished_is_noticed(does: str) -> None:
    """Nothing arrives any more, and nobody says so: the network of a namespace of its own is taken down."""
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", sys.executable, "-c", HALF_OPEN, does],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("namespaces are not permitted here")
    noticed = {line.partition(" notices")[0] for line in done.stdout.splitlines()}
    assert noticed == ({"the client", "the server"} if does == "send" else {"the client"}), done.stderr


BLOCKED = """
import contextlib, logging, subprocess, sys
from datetime import timedelta
from elastic_ps.transport import local, ways
from elastic_ps.transport.base import Frame, unary

def name_the_way(method, incoming):
    yield Frame(incoming.transport.encode())

for command in ("ip link set lo up", f"iptables -A INPUT -p tcp --dport 2223 -j {sys.argv[1]}"):
    subprocess.run(command.split(), check=True)
logging.basicConfig(level=logging.INFO)
local.name_of = lambda address: None  # as of another host
server = ways.listen("0.0.0.0:2222")
server.serve(name_the_way)
with contextlib.closing(server), contextlib.closing(ways.connect("127.0.0.1:2222")) as connection:
    for _ in range(3):
        print(unary(connection, "ask", b"", timeout=timedelta(seconds=60)).decode())
"""


@pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables is not installed here")
@pytest.mark.parametrize("how", ["DROP", "REJECT"])
def test_a_firewall_in_front_of_the_data_port_leaves_grpc(how: str) -> None:
    """In the network of a namespace of its own; what is dropped gets no answer at all."""
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", sys.executable, "-c", BLOCKED, how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("namespaces, or rules in them, are not permitted here")
    assert done.stdout.split() == ["grpc"] * 3, done.stderr
    assert (
        done.stderr.count("127.0.0.1:2222 is reached over gRPC, because its data port cannot be used: ") == 1
    )


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_job_may_name_its_transport(tmp_path: Path, transport: str) -> None:
    """It is named in the summary and in the status of each member."""
    spec = {
        "entrypoint": "tests.testing.scripts.steady:main",
        "arguments": {"records": 200, "widths": [6, 64, 64, 1]},
        "parameterServer": {"replicas": 2, "bucketBytes": 1024},
        "worker": {"replicas": 2},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "moved"}}
    (tmp_path / "job.yaml").write_text(json.dumps({**document, "spec": spec}))
    command = [sys.executable, "-m", "elastic_ps.cli", "run", str(tmp_path / "job.yaml")]
    done = subprocess.run(
        [*command, "--transport", transport, "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"transport +{transport}\n", done.stdout), done.stdout
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["phase"], report["records_applied"]) == ("Succeeded", 200)
    assert {worker["transport"] for worker in report["workers"]} == {transport}
