"""What only the gRPC transport has to stand: strangers, dead hosts, killed servers, forks, flow control."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import psutil
import pytest

from elastic_ps.errors import CannotListen, ConnectionLost, Malformed, TransportError, UserError
from elastic_ps.transport import frame_pb2
from elastic_ps.transport.base import Frame, Incoming, Limits, unary
from elastic_ps.transport.grpc import WINDOW, GrpcConnection, GrpcServer
from elastic_ps.transport.wire import messages
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing.polling import LIMIT, eventually

LONG = timedelta(seconds=60)
MIB = 1024 * 1024

FRAME = struct.Struct(">BHBBI")
"""The header of an HTTP/2 frame (RFC 9113, 4.1): length in 1 + 2 bytes, type, flags, stream."""
HEADERS, SETTINGS, PING = 1, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4

SERVER = """
import os, sys, threading
from elastic_ps.transport.base import Frame
from elastic_ps.transport.grpc import GrpcServer

def handler(method, incoming):
    if method == "block":
        os.write(1, b"entered\\n")
        threading.Event().wait()
    yield Frame(incoming.header)

server = GrpcServer(sys.argv[1])
server.serve(handler)
print(server.address, flush=True)
sys.stdin.read()
"""

FORKS = """
import gc, multiprocessing, os, threading
from datetime import timedelta
from elastic_ps.transport.base import Frame, unary
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer

LONG = timedelta(seconds=60)
release = threading.Event()

def handler(method, incoming):
    if method == "block":
        release.wait()
    yield Frame(incoming.header)

def in_child(number):
    gc.collect()
    return number * number

if __name__ == "__main__":
    server = GrpcServer("127.0.0.1:0")
    server.serve(handler)
    connection = GrpcConnection(server.address)
    blocked = connection.call("block", Frame(b"late", memoryview(bytes(50_000_000))), timeout=LONG)
    for round in range(5):
        assert unary(connection, "echo", b"x", timeout=LONG) == b"x"
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(in_child, range(10)) == [n * n for n in range(10)]
            assert unary(connection, "echo", b"y", timeout=LONG) == b"y"
    release.set()
    assert [answer.header for answer in blocked] == [b"late"]
    connection.close()
    server.close()
    print("done")
"""


def echo(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Answer with what came."""
    body = memoryview(bytearray(incoming.size))
    incoming.read_into(body)
    yield Frame(incoming.header, body)


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    server = GrpcServer("127.0.0.1:0", limits=Limits(header_bytes=MIB, body_bytes=64 * MIB))
    server.serve(echo)
    yield server
    server.close()


@pytest.fixture
def connection(server: GrpcServer) -> Iterator[GrpcConnection]:
    connection = GrpcConnection(server.address)
    yield connection
    connection.close()


@contextlib.contextmanager
def server_process(bind: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, bind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def endpoint(address: str) -> tuple[str, int]:
    """`address` as the socket module wants it."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def resident(process: psutil.Process) -> int:
    """Bytes of memory that `process` has, once that has stopped changing."""
    readings = [0]

    def steady() -> bool:
        readings.append(process.memory_info().rss)
        return len(readings) > 100 and max(readings[-100:]) - min(readings[-100:]) < MIB

    eventually(steady, "the memory is steady")
    return readings[-1]


def test_bodies_that_nobody_asks_for_are_not_buffered() -> None:
    calls, size = 20, 64 * MIB
    with server_process() as (process, address):
        assert process.stdout is not None
        connection = GrpcConnection(address)
        unary(connection, "warm up", b"", timeout=LONG)
        before = resident(psutil.Process(process.pid))
        body = memoryview(bytes(size))
        running = [connection.call("block", Frame(b"", body), timeout=LONG) for _ in range(calls)]
        for _ in range(calls):
            assert process.stdout.readline() == "entered\n"
        grown = resident(psutil.Process(process.pid)) - before
        connection.close()
        del running
    print(f"{grown / MIB:.1f} MiB for {calls} calls")
    assert grown < calls * 2 * WINDOW + 16 * MIB


def test_a_killed_server_ends_calls_and_is_found_again() -> None:
    with server_process() as (process, address):
        assert process.stdout is not None
        connection = GrpcConnection(address)
        running = connection.call("block", Frame(b"", memoryview(bytes(64 * MIB))), timeout=LONG)
        assert process.stdout.readline() == "entered\n"
        process.kill()
        with pytest.raises(ConnectionLost):
            next(running)
        with pytest.raises(ConnectionLost):
            unary(connection, "echo", b"", timeout=LONG)
    with server_process(address):

        def works() -> bool:
            try:
                return unary(connection, "echo", b"again", timeout=LONG) == b"again"
            except ConnectionLost:
                return False

        eventually(works, "the server is found again")
        connection.close()


def test_strangers_bytes_neither_stop_the_server_nor_take_its_memory(
    server: GrpcServer, connection: GrpcConnection
) -> None:
    chooser = random.Random(1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    before = psutil.Process().memory_info().rss
    for attempt in range(200):
        with socket.create_connection(endpoint(server.address), timeout=20) as stranger:
            start = preface if attempt % 2 else b""
            with contextlib.suppress(OSError):
                stranger.sendall(start + chooser.randbytes(chooser.choice([1, 100, 10_000, 100_000])))
    assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
    assert psutil.Process().memory_info().rss - before < 64 * MIB


SILENT = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
host, port, first, count = sys.argv[1], *map(int, sys.argv[2:])
held = []
for number in range(count):
    address = f"127.0.{first}.{1 + number % 200}", 0
    held.append(socket.create_connection((host, port), 60, source_address=address))
print("open", flush=True)
sys.stdin.read()
"""
"""Opens so many connections, from 200 addresses, and says nothing."""


@pytest.mark.nightly
def test_twenty_thousand_connections_that_say_nothing_take_little_memory() -> None:
    with server_process() as (process, address), contextlib.ExitStack() as stack:
        connection = stack.enter_context(contextlib.closing(GrpcConnection(address)))
        unary(connection, "warm up", b"", timeout=LONG)
        server = psutil.Process(process.pid)
        before = most = server.memory_info().rss
        host, port = endpoint(address)
        strangers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SILENT, host, str(port), str(first), "5000"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for first in range(1, 5)
        ]
        with ThreadPoolExecutor(len(strangers)) as pool:
            opened = [pool.submit(each.stdout.readline) for each in strangers if each.stdout is not None]
            while not all(each.done() for each in opened):
                most = max(most, server.memory_info().rss)
                assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
        assert [each.result() for each in opened] == [b"open\n"] * len(strangers)
        assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
        most = max(most, server.memory_info().rss)
        for each in strangers:
            each.kill()
    assert most - before < 128 * MIB, f"{(most - before) / MIB:.0f} MiB"


def test_calls_that_do_not_follow_the_schema_are_malformed_for_their_sender(
    server: GrpcServer, connection: GrpcConnection
) -> None:
    chooser = random.Random(2)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)
        for _ in range(200):
            stream = [chooser.randbytes(chooser.choice([0, 1, 10, 1000])) for _ in range(3)]
            (answer,) = call(iter(stream), timeout=60)
            assert frame_pb2.Message.FromString(answer).refusal.kind == frame_pb2.Refusal.Kind.MALFORMED
        (answer,) = call(iter([]), timeout=60)
        assert "no frame" in frame_pb2.Message.FromString(answer).refusal.message
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([bytes(2 * MIB)]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"


def test_a_method_name_that_does_not_fit_is_malformed(connection: GrpcConnection) -> None:
    with pytest.raises(Malformed):
        unary(connection, "x" * (2 * MIB), b"", timeout=LONG)


def test_a_stranger_that_speaks_grpc_is_as_if_nobody_was_there() -> None:
    """A proxy answers in the place of a server that is being replaced; so the call may be tried again."""
    stranger = grpc.server(ThreadPoolExecutor(1))
    port = stranger.add_insecure_port("127.0.0.1:0")
    stranger.start()
    connection = GrpcConnection(f"127.0.0.1:{port}")
    with pytest.raises(ConnectionLost, match="something else"):
        unary(connection, "echo", b"", timeout=LONG)
    stranger.stop(0).wait()
    server = GrpcServer(f"127.0.0.1:{port}")
    server.serve(echo)
    deadline = time.monotonic() + LONG.total_seconds()
    while True:
        try:
            assert unary(connection, "echo", b"again", timeout=LONG) == b"again"
            break
        except ConnectionLost:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    connection.close()
    server.close()


@contextlib.contextmanager
def in_front_of(server: GrpcServer, status: bytes, there: threading.Event) -> Iterator[str]:
    """The address of a proxy that leads to `server` for connections made once it is `there`.

    Others are answered by the proxy itself, with this HTTP status, for as long as they are open.
    """

    def refuse(client: socket.socket) -> None:
        client.sendall(FRAME.pack(0, 0, SETTINGS, 0, 0))
        stream = client.makefile("rb")
        stream.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        while header := stream.read(FRAME.size):
            high, low, kind, flags, number = FRAME.unpack(header)
            body = stream.read((high << 16) + low)
            if kind in (SETTINGS, PING) and not flags & ACK:
                answer = b"" if kind == SETTINGS else body
                client.sendall(FRAME.pack(0, len(answer), kind, ACK, 0) + answer)
            elif kind == HEADERS:
                answer = b"\x48\x03" + status  # HPACK: a literal value for :status, of three bytes
                client.sendall(FRAME.pack(0, len(answer), HEADERS, END_HEADERS | END_STREAM, number) + answer)

    def lead(client: socket.socket) -> None:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            back = threading.Thread(target=pass_on, args=(upstream, client), daemon=True)
            back.start()
            pass_on(client, upstream)
            upstream.shutdown(socket.SHUT_RDWR)
            back.join()

    def pass_on(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            (lead if there.is_set() else refuse)(client)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listening.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("status", [b"404", b"503"])
def test_a_proxy_that_has_answered_is_not_asked_again(server: GrpcServer, status: bytes) -> None:
    """It keeps the connection and would go on answering, although new ones lead to the server again."""
    there = threading.Event()
    with in_front_of(server, status, there) as address:
        connection = GrpcConnection(address)
        for _ in range(3):
            with pytest.raises(ConnectionLost, match=f"something else .* status: {status.decode()}"):
                unary(connection, "echo", b"", timeout=LONG)
        there.set()
        assert unary(connection, "echo", b"again", timeout=LONG) == b"again"
        connection.close()


def test_a_worker_says_that_it_is_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    connection = GrpcConnection(address)
    limits = WorkerLimits(patience=timedelta(seconds=3), notice=timedelta(seconds=0.2))
    calls = Client("job", 0, [connection], limits=limits)
    with pytest.raises(ConnectionLost, match=r"the parameter server has not answered for \d s"):
        calls.heartbeat()
    calls.close()
    said = r"the parameter server has not answered for \d s, trying again: Heartbeat at"
    assert 1 <= sum(bool(re.match(said, message)) for message in caplog.messages) <= 15, "now and then"


def test_a_stranger_at_the_address_is_a_transport_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = stranger.accept()
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        connection = GrpcConnection(f"127.0.0.1:{stranger.getsockname()[1]}")
        with pytest.raises(TransportError):
            unary(connection, "echo", b"", timeout=LONG)
        connection.close()
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_half_open_connections_do_not_hold_up_calls_or_close() -> None:
    server = GrpcServer("127.0.0.1:0")
    server.serve(echo)
    connection = GrpcConnection(server.address)
    with contextlib.ExitStack() as stack:
        for index in range(100):
            silent = stack.enter_context(socket.create_connection(endpoint(server.address), timeout=20))
            if index % 2:
                silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
        # A connection that breaks off with a reset, in the middle of a frame.
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        silent.close()
        assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
        connection.close()
        server.close()


def test_silent_connections_take_a_part_of_the_descriptors_and_for_a_moment_only() -> None:
    """Each takes a descriptor and memory; without an end to it, the server would have none for its files."""
    for handshake, closed in ((LONG, 5), (timedelta(seconds=1), 9)):  # those beyond the limit; the silent
        server = GrpcServer("127.0.0.1:0", connections=4, limits=Limits(handshake=handshake))
        server.serve(echo)
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(endpoint(server.address), timeout=20))
                for _ in range(9)
            ]
            eventually(lambda: sum(map(is_closed, silent)) == closed, f"{closed} are closed")  # noqa: B023
            if closed == 9:
                connection = stack.enter_context(contextlib.closing(GrpcConnection(server.address)))
                assert unary(connection, "echo", b"alive", timeout=LONG) == b"alive"
        server.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed a connection; what it has said before is dropped."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_a_users_error(server: GrpcServer, host: str) -> None:
    with pytest.raises(CannotListen, match="taken") as caught:
        GrpcServer(f"{host}:{endpoint(server.address)[1]}")
    assert isinstance(caught.value, UserError)


def test_a_host_that_is_not_this_machine_is_a_users_error() -> None:
    with pytest.raises(CannotListen, match="not an address"):
        GrpcServer("203.0.113.1:0")


def test_the_address_of_a_server_that_listens_everywhere_works_here() -> None:
    server = GrpcServer("0.0.0.0:0")
    server.serve(echo)
    connection = GrpcConnection(server.address)
    assert unary(connection, "echo", b"here", timeout=LONG) == b"here"
    connection.close()
    server.close()


def test_more_calls_than_threads_wait_for_their_turn() -> None:
    server = GrpcServer("127.0.0.1:0", calls=2)
    server.serve(echo)
    connection = GrpcConnection(server.address)
    calls = [connection.call("echo", Frame(bytes([n])), timeout=LONG) for n in range(20)]
    assert [[answer.header for answer in call] for call in calls] == [[bytes([n])] for n in range(20)]
    connection.close()
    server.close()


def test_one_address_has_a_share_of_the_threads() -> None:
    """However many connections it makes: a connection has a limit of its own."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        if method == "wait":
            entered.release()
            assert go_on.wait(LONG.total_seconds())
        yield Frame(incoming.header)

    server = GrpcServer("127.0.0.1:0", calls=4, limits=Limits(share=2))
    server.serve(handler)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(server.close)
        connections = [GrpcConnection(server.address) for _ in range(3)]
        for connection in connections:
            cleanup.callback(connection.close)
        cleanup.callback(go_on.set)
        calls = [connection.call("wait", Frame(b""), timeout=LONG) for connection in connections[:2]]
        for _ in calls:
            assert entered.acquire(timeout=LIMIT)
        with pytest.raises(ConnectionLost, match="too many calls from this address"):
            unary(connections[2], "echo", b"x", timeout=LONG)
        go_on.set()
        for call in calls:
            assert len(list(call)) == 1

        def answered() -> bool:
            with contextlib.suppress(ConnectionLost):
                return unary(connections[2], "echo", b"x", timeout=LONG) == b"x"
            return False

        eventually(answered, "the calls give back what they held")


def test_the_waiting_calls_of_many_workers_leave_room_for_others() -> None:
    """Three hundred workers, each of which waits for records and for a version."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        if method == "wait":
            entered.release()
            assert go_on.wait(LONG.total_seconds())
        yield Frame(incoming.header)

    server = GrpcServer("127.0.0.1:0")
    server.serve(handler)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(server.close)
        connections = [GrpcConnection(server.address) for _ in range(15)]
        for connection in connections:
            cleanup.callback(connection.close)
        calls = [c.call("wait", Frame(b""), timeout=LONG) for c in connections for _ in range(40)]
        cleanup.callback(go_on.set)
        for _ in calls:
            assert entered.acquire(timeout=LIMIT)
        assert unary(connections[0], "echo", b"heard", timeout=LONG) == b"heard"
        go_on.set()
        for call in calls:
            assert [answer.header for answer in call] == [b""]


def test_calls_leave_nothing_to_the_garbage_collector(connection: GrpcConnection) -> None:
    # It may run in a forked child, where freeing gRPC's objects can wait for threads of the parent.
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        unary(connection, "echo", b"", timeout=LONG)
        for frame in (Frame(b""), Frame(b"", memoryview(bytes(5 * MIB)))):
            assert len(list(connection.call("echo", frame, timeout=LONG))) == 1
        with pytest.raises(Malformed):
            unary(connection, "x" * (2 * MIB), b"", timeout=LONG)
        gc.collect()
        left = {type(item).__module__ for item in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [module for module in left if module.startswith(("grpc", "elastic_ps"))]


def test_a_process_with_open_calls_may_fork() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), json.dumps(done.stderr)


def test_who_stops_sending_in_a_body_is_cut_off_and_what_it_held_is_free() -> None:
    """A server has a few receive buffers only; here it is one."""
    buffer, held, errors = threading.Lock(), threading.Event(), []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        with buffer:
            held.set()
            try:
                yield from echo(method, incoming)
            except ConnectionLost as error:
                errors.append(str(error))
                raise

    server = GrpcServer("127.0.0.1:0", stall=timedelta(seconds=3))
    server.serve(handler)
    resume = threading.Event()

    def half() -> Iterator[bytes]:
        sent = messages(Frame(b"", memoryview(bytes(8 * MIB))), "push")
        yield from itertools.islice(sent, 4)
        resume.wait(30)

    with grpc.insecure_channel(server.address) as channel:
        stuck = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)(half(), timeout=60)
        assert held.wait(LIMIT), "the stuck call has had the receive buffer"
        connection = GrpcConnection(server.address)
        body = memoryview(bytes(range(256)) * 16 * 1024)
        for answer in connection.call("push", Frame(b"", body), timeout=timedelta(seconds=30)):
            received = memoryview(bytearray(answer.size))
            answer.read_into(received)
            assert received == body
        assert errors == ["the client has sent nothing for 3 s in the middle of a frame, or next to nothing"]
        assert stuck.code() is grpc.StatusCode.CANCELLED
        resume.set()
        connection.close()
    server.close()


def test_who_sends_next_to_nothing_of_a_body_is_cut_off() -> None:
    """A byte now and then would keep a receive buffer from all others."""
    errors: list[str] = []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        try:
            incoming.read_into(memoryview(bytearray(incoming.size)))
        except ConnectionLost as error:
            errors.append(str(error))
            raise
        yield Frame(b"")

    server = GrpcServer("127.0.0.1:0", stall=timedelta(milliseconds=300))
    server.serve(handler)
    over = threading.Event()

    def trickle() -> Iterator[bytes]:
        opening = frame_pb2.Opening(method="push", body_size=MIB)
        yield frame_pb2.Message(opening=opening).SerializeToString()
        while not over.wait(0.05):
            yield b"\x1a\x01\0"  # a byte of the body

    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)(
            trickle(), timeout=60
        )
        eventually(lambda: errors, "it is cut off")
        over.set()
        assert "next to nothing" in errors[0]
        call.cancel()  # type: ignore[no-untyped-call]
    server.close()


def test_a_slow_sender_that_goes_on_is_not_cut_off() -> None:
    """Until the end it takes longer than a client may be silent, which is long enough for a busy machine."""
    server = GrpcServer("127.0.0.1:0", stall=timedelta(seconds=2))
    server.serve(echo)

    def slowly() -> Iterator[bytes]:
        for message in messages(Frame(b"", memoryview(bytes(8 * MIB))), "push"):
            yield message
            time.sleep(0.3)  # not for something to happen: this is what a slow sender does

    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)
        assert sum(len(message) for message in call(slowly(), timeout=30)) > 8 * MIB
    server.close()
