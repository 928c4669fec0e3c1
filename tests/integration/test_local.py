"""The transport within a host: what is in shared memory is not sent, and strangers are not answered."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.errors import CannotListen, ConnectionLost, DeadlineExceeded, Malformed, UsageError
from elastic_ps.transport import line, local, memory, stream, ways
from elastic_ps.transport.base import Frame, Incoming, unary
from elastic_ps.transport.credentials import Credentials
from elastic_ps.transport.grpc import GrpcServer
from elastic_ps.transport.local import LocalServer
from elastic_ps.transport.memory import Mapped, SharedMemory, place_of, shared_if_possible
from tests.testing import certificates, machine
from tests.testing.polling import LIMIT, eventually
from tests.testing.transports import LONG, Reading, echo, read

LARGE = line.SMALL + 1
NUMBERS = itertools.count(os.getpid() * 1000 + 500)


@contextlib.contextmanager
def served(handler: object = echo) -> Iterator[LocalServer]:
    server = LocalServer(f"127.0.0.1:{next(NUMBERS)}")
    server.serve(handler)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def connected(handler: object = echo) -> Iterator[stream.StreamConnection]:
    with served(handler) as server, contextlib.closing(local.connect(server.address)) as connection:
        yield connection


def test_a_body_in_shared_memory_is_seen_where_it_lies() -> None:
    shared = SharedMemory(LARGE)
    body = shared.take(LARGE)
    body[:] = b"x" * LARGE
    seen = []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        view = incoming.view()
        assert view is not None
        assert view.readonly
        body[:3] = b"new"  # no copy was sent: what the sender writes meanwhile is seen
        seen.append(bytes(view[:4]))
        yield Frame(b"")

    with connected(handler) as connection:
        unary_with(connection, Frame(b"", body))
        unary_with(connection, Frame(b"", body))
    assert seen == [b"newx"] * 2


def unary_with(connection: stream.StreamConnection, frame: Frame) -> list[bytes]:
    return [answer.header for answer in connection.call("ask", frame, timeout=LONG)]


@pytest.mark.parametrize("body", [memoryview(bytes(range(200)) * 1000), SharedMemory(5).take(5)])
def test_a_body_elsewhere_is_sent_and_so_is_a_small_one(body: memoryview) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        assert incoming.view() is None
        yield Frame(b"", memoryview(read(incoming)))

    with connected(handler) as connection:
        for answer in connection.call("ask", Frame(b"", body), timeout=LONG):
            assert (answer.view(), read(answer)) == (None, bytes(body))


def test_a_handler_goes_on_when_its_client_is_done_with_an_answer_in_shared_memory() -> None:
    values = SharedMemory(LARGE).take(LARGE)
    resumed = threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        for text in (b"first", b"again"):
            values[:5] = text
            yield Frame(b"", values)
            resumed.set()

    with connected(handler) as connection:
        answers = connection.call("pull", Frame(b""), timeout=LONG)
        first = next(answers)
        assert not resumed.wait(0.2)
        assert read(first)[:5] == b"first"
        assert not resumed.wait(0.1)
        second = next(answers)
        assert resumed.is_set()
        assert read(second)[:5] == b"again"
        assert list(answers) == []


def test_a_handler_may_answer_from_shared_memory_before_it_reads() -> None:
    values, pushed = SharedMemory(LARGE).take(LARGE), memoryview(b"x" * 5_000_000)

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"", values)
        yield Frame(b"", memoryview(read(incoming)))

    with connected(handler) as connection:
        for _ in range(2):
            answers = [read(answer) for answer in connection.call("both", Frame(b"", pushed), timeout=LONG)]
            assert answers == [bytes(LARGE), bytes(pushed)]


def test_many_calls_with_shared_bodies_do_not_mix() -> None:
    shared = SharedMemory(1 << 23)
    bodies = [shared.take(LARGE + index) for index in range(30)]
    for index, body in enumerate(bodies):
        body[:] = bytes([index]) * len(body)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            for answer in connection.call("echo", Frame(b"", bodies[index]), timeout=LONG):
                if read(answer) != bytes(bodies[index]):
                    wrong.append(index)

    with connected() as connection:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_shared_memory_is_found_by_address_as_long_as_it_lives() -> None:
    shared = SharedMemory(4096)
    piece = shared.take(10)
    more = shared.take(20)
    assert place_of(piece) == (shared.handle, 0)
    assert place_of(more[5:10]) == (shared.handle, memory.ALIGNMENT + 5)
    assert place_of(memoryview(bytes(10))) is None
    with pytest.raises(ValueError, match="left of 4096"):
        shared.take(4096)
    handle = shared.handle
    del shared, piece
    gc.collect()
    assert place_of(more) == (handle, memory.ALIGNMENT)
    fd = handle.fd
    del more
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_memory_that_could_shrink_is_not_read() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    with pytest.raises(Malformed, match="change its size"):
        Mapped(fd)
    with Path("/dev/null").open() as other, pytest.raises(Malformed, match="is not shared memory"):
        Mapped(os.dup(other.fileno()))
    shared = SharedMemory(100)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(shared.handle.fd, 10)
    mapped = Mapped(os.dup(shared.handle.fd))
    assert len(mapped.view(90, 10)) == 10
    with pytest.raises(Malformed, match="at 91 of a shared memory that has 100"):
        mapped.view(91, 10)
    with pytest.raises(TypeError, match="read-only"):
        mapped.view(0, 10)[0] = 1


def test_without_shared_memory_everything_is_sent_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.lacks_shared_memory(monkeypatch)
    body = shared_if_possible([10])(10)
    assert bytes(body) == bytes(10)
    assert place_of(body) is None
    assert "does not give 10 bytes of shared memory (not here)" in caplog.text
    with connected() as connection:
        (answer,) = (read(a) for a in connection.call("echo", Frame(b"", body), timeout=LONG))
    assert answer == bytes(10)


def test_a_stranger_is_hung_up_on_and_others_are_served() -> None:
    with served() as server, contextlib.closing(local.connect(server.address)) as connection:
        with contextlib.closing(local.dial(server.address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert unary(connection, "echo", b"1", timeout=LONG) == b"1"


@pytest.mark.parametrize("text", [b"\xff" * 100, bytes(100), b"\x01" + b"\0" * 99])
def test_a_frame_that_is_none_ends_its_socket_alone(text: bytes) -> None:
    with served() as server, contextlib.closing(local.connect(server.address)) as connection:
        with contextlib.closing(local.dial(server.address)) as broken:
            broken.sendall(stream.GREETING + text)
            broken.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while broken.recv(1000):
                    pass
        assert unary(connection, "echo", b"1", timeout=LONG) == b"1"


def test_a_body_in_memory_that_was_not_handed_over_is_malformed() -> None:
    head = line.HEAD.pack(line.LineKind.CALL, 1, 4, 0, 7, 10, 0)
    with served() as server, contextlib.closing(local.dial(server.address)) as broken:
        broken.sendall(stream.GREETING + head + b"push")
        assert b"shared memory 7, which was not handed over" in broken.recv(1000)


def test_a_process_of_another_user_is_not_answered() -> None:
    program = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0' + sys.argv[1])\n"
        "s.sendall(sys.argv[2].encode())\n"
        "try:\n    print('answer', s.recv(100))\n"
        "except ConnectionResetError:\n    print('answer', b'')\n"
    )
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with served() as server:
        name = local.name_of(server.address)
        assert name is not None
        command = [sys.executable, "-c", program, name[1:], stream.GREETING.decode()]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "answer b''" in result.stdout or "Broken pipe" in result.stderr, result


def test_a_client_waits_for_room_in_the_backlog() -> None:
    address = f"127.0.0.1:{next(NUMBERS)}"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(local.name_of(address) or "")
        listener.listen(0)
        stack.enter_context(local.dial(address))
        timer = threading.Timer(0.2, lambda: stack.enter_context(listener.accept()[0]))
        timer.start()
        stack.enter_context(local.dial(address))
        timer.join()


def test_a_server_that_gets_no_thread_serves_again_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with connected() as connection:
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            with pytest.raises(ConnectionLost):
                unary(connection, "echo", b"1", timeout=LONG)
        assert unary(connection, "echo", b"2", timeout=LONG) == b"2"


def test_a_client_without_a_descriptor_for_shared_memory_may_call_again() -> None:
    values = list[memoryview]()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"", values[-1])

    with connected(handler) as connection:
        for again in range(2):
            values.append(SharedMemory(LARGE).take(LARGE))
            if not again:
                assert len(list(connection.call("pull", Frame(b""), timeout=LONG))) == 1
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(ConnectionLost, match="no descriptor is left"):
                list(connection.call("pull", Frame(b""), timeout=LONG))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(list(connection.call("pull", Frame(b""), timeout=LONG))) == 1


@pytest.mark.parametrize(
    "sends",
    [
        "stream.StreamConnection(lambda: ours, 'here').call('ask', Frame(b''), timeout=timedelta(seconds=5))",
        "line.Line(ours, 'here').encode(line.LineKind.CALL, Frame(b'', SharedMemory(10**6).take(10**6)))",
    ],
    ids=["a frame", "shared memory"],
)
def test_a_script_with_its_own_mind_about_sigpipe_survives_a_server_that_goes(sends: str) -> None:
    program = (
        "import signal, socket, sys\n"
        "from datetime import timedelta\n"
        "from elastic_ps.errors import ConnectionLost\n"
        "from elastic_ps.transport import line, stream\n"
        "from elastic_ps.transport.base import Frame\n"
        "from elastic_ps.transport.memory import SharedMemory\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "ours, theirs = socket.socketpair()\n"
        "theirs.close()\n"
        f"try:\n    {sends}\n"
        "except ConnectionLost as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert "Broken pipe" in result.stdout


def test_a_fork_makes_no_call_on_its_parents_sockets() -> None:
    """Each of the two would get answers to the other's calls."""
    with connected() as connection:
        unary(connection, "ask", b"", timeout=LONG)
        child = os.fork()
        if not child:
            try:
                unary(connection, "ask", b"", timeout=LONG)
            except UsageError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_two_servers_of_one_address_are_refused() -> None:
    with served() as server, pytest.raises(CannotListen, match=server.address):
        LocalServer(server.address)


def test_a_client_that_stops_in_the_middle_of_a_body_is_cut_off() -> None:
    handler = Reading()
    address = f"127.0.0.1:{next(NUMBERS)}"
    server = LocalServer(address, stall=local.CONNECT / 20)
    server.serve(handler)
    head = line.HEAD.pack(line.LineKind.CALL, 0, 4, 0, 0, 10, 0)
    with contextlib.closing(local.dial(address)) as slow:
        slow.sendall(stream.GREETING + head + b"push" + b"123")
        assert slow.recv(100) == b""  # an answer would be no ConnectionLost for a client that was only slow
        eventually(lambda: handler.errors, "the handler is told")
    assert "in the middle of a frame" in str(handler.errors[0])
    server.close()


def test_a_body_that_was_not_read_to_its_end_is_not_taken_for_the_next_answer() -> None:
    released, sent, ended = threading.Event(), threading.Event(), threading.Event()
    address = f"127.0.0.1:{next(NUMBERS)}"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(local.name_of(address) or "")
        listener.listen()

        def serve() -> None:
            with contextlib.closing(listener.accept()[0]) as sock:
                end = line.HEAD.pack(line.LineKind.END, 0, 0, 0, 0, 0, 0)
                sock.sendall(line.HEAD.pack(line.LineKind.ANSWER, 0, 0, 0, 0, 10 * len(end), 0))
                assert released.wait(60)
                with contextlib.suppress(BrokenPipeError):
                    sock.sendall(end * 10)
                sent.set()
                assert ended.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        with contextlib.closing(local.connect(address)) as connection:
            answers = connection.call("pull", Frame(b""), timeout=timedelta(seconds=6))
            answer = next(answers)
            with pytest.raises(DeadlineExceeded):
                read(answer)
            released.set()
            assert sent.wait(60)
            with pytest.raises(ConnectionLost):
                next(answers)
        ended.set()
        thread.join()


def test_a_way_within_the_host_is_taken_if_it_is_there() -> None:
    server = ways.listen("127.0.0.1:0")
    bodies = []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        bodies.append(incoming.view() is not None)
        yield Frame(b"")

    server.serve(handler)
    shared = SharedMemory(LARGE).take(LARGE)
    _host, _, port = server.address.rpartition(":")
    for address in (server.address, f"localhost:{port}"):
        with contextlib.closing(ways.connect(address)) as connection:
            assert [a.header for a in connection.call("ask", Frame(b"", shared), timeout=LONG)] == [b""]
    assert bodies == [True, True]
    server.close()


def test_who_finds_the_port_finds_the_way_within_the_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match="taken"):
            ways.listen(address)
    found = []

    class Dialling(Credentials):
        """Whoever opens the port asks for them first."""

        def accepting(self) -> ssl.SSLContext:
            with contextlib.closing(local.dial(address)) as sock:
                found.append(sock.getpeername())
            return super().accepting()

    credentials = Dialling(certificates.write(tmp_path, certificates.authority(), "server"))
    ways.listen(address, credentials=credentials).close()
    assert len(found) == 1, "before the port is there"


def test_another_port_of_the_same_host_leads_over_tcp() -> None:
    """As a relay does, or a port that is forwarded."""

    server = GrpcServer("127.0.0.1:0")
    server.serve(echo)
    with contextlib.closing(ways.connect(server.address)) as connection:
        assert unary(connection, "echo", b"1", timeout=LONG) == b"1"
    server.close()


def test_a_server_that_comes_later_is_found_within_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with contextlib.closing(ways.connect(address)) as connection:
        with pytest.raises(ConnectionLost, match="nobody serves there"):
            unary(connection, "echo", b"1", timeout=LONG)
        server = LocalServer(address)
        server.serve(echo)
        assert unary(connection, "echo", b"2", timeout=LONG) == b"2"
        server.close()


def test_a_mapping_outlives_the_process_that_made_it() -> None:
    """Whoever reads a server's values when it dies reads what was there, and learns it at the next call."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = (
            "import os, socket, sys\n"
            "from elastic_ps.transport.memory import SharedMemory\n"
            "shared = SharedMemory(5)\n"
            "piece = shared.take(5)\n"
            "piece[:] = b'still'\n"
            "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'x'], [shared.handle.fd])\n"
        )
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        subprocess.run(command, pass_fds=[theirs.fileno()], check=True)
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    assert bytes(Mapped(fd).view(0, 5)) == b"still"


def test_memory_that_nobody_uses_any_more_is_freed_where_it_was_shown() -> None:
    """As when a parameter server goes back to a checkpoint, again and again."""
    nbytes = 1 << 20
    values = list[memoryview]()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        values[:] = [SharedMemory(nbytes).take(nbytes)]
        values[0][:] = b"x" * nbytes
        yield Frame(b"", values[0])

    def shared_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE

    with connected(handler) as connection:
        for again in range(100):
            (answer,) = (read(a) for a in connection.call("pull", Frame(b""), timeout=LONG))
            assert answer == b"x" * nbytes
            if not again:
                before, descriptors = shared_bytes(), len(list(Path("/proc/self/fd").iterdir()))
        assert shared_bytes() < before + 2 * nbytes
        assert len(list(Path("/proc/self/fd").iterdir())) < descriptors + 2 * line.MEMORIES


def test_a_server_keeps_no_memory_of_a_client_that_has_gone() -> None:
    shared = SharedMemory(LARGE)
    inode = f" {os.fstat(shared.handle.fd).st_ino} "

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(inode)

    with served() as server:
        with contextlib.closing(local.connect(server.address)) as connection:
            unary_with(connection, Frame(b"", shared.take(LARGE)))
            assert mapped() == 2
        eventually(lambda: mapped() == 1, "the server's is unmapped")


def test_a_forked_child_leaves_its_parents_memory_as_it_is() -> None:
    program = (
        "import os\n"
        "from elastic_ps.transport.memory import SharedMemory\n"
        "shared = SharedMemory(5)\n"
        "piece = shared.take(5)\n"
        "piece[:] = b'still'\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del shared, piece\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert bytes(piece) == b'still', bytes(piece)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)
