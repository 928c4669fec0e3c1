"""What every transport promises. A new transport is one more line in TRANSPORTS."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from elastic_ps.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ElasticPSError,
    Malformed,
    RefusalCode,
    Refused,
    TransportError,
)
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Limits, Server, unary
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.transport.inproc import InprocConnection, InprocServer
from elastic_ps.transport.wire import CHUNK

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=300)


class GrpcTransport:
    """Makes servers and connections of the gRPC transport."""

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """A server that does not serve yet; at the address of the closed server `again`, if given."""
        return GrpcServer(again.address if again else "127.0.0.1:0", limits=limits)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        return GrpcConnection(server.address, limits=limits)


class InprocTransport:
    """Makes servers and connections of the transport within a process."""

    def listen(self, *, again: Server | None = None, limits: Limits | None = None) -> Server:
        """See `GrpcTransport.listen`."""
        return again or InprocServer(limits=limits)

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        assert isinstance(server, InprocServer)
        return InprocConnection(server, limits=limits)


Transport = GrpcTransport | InprocTransport
TRANSPORTS: list[Callable[[], Transport]] = [GrpcTransport, InprocTransport]


def eventually(condition: Callable[[], Any], within: float = 20) -> None:
    """Wait until `condition` holds."""
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def read(incoming: Incoming) -> bytes:
    """The whole body."""
    body = bytearray(incoming.size)
    incoming.read_into(memoryview(body))
    return bytes(body)


def close(answers: Iterator[Incoming]) -> None:
    """What `contextlib.closing` does."""
    answers.close()  # type: ignore[attr-defined]


def echo(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Answer with what came."""
    yield Frame(incoming.header, memoryview(read(incoming)))


class World:
    """What a test uses; all of it is closed after the test."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.released = threading.Event()
        self._stack = contextlib.ExitStack()

    def serve(self, handler: Handler, *, limits: Limits | None = None) -> Server:
        """A server that answers with `handler`."""
        server = self.transport.listen(limits=limits)
        self._stack.callback(server.close)
        server.serve(handler)
        return server

    def connect(self, server: Server, *, limits: Limits | None = None) -> Connection:
        """A connection to `server`."""
        connection = self.transport.connect(server, limits=limits)
        self._stack.callback(connection.close)
        return connection

    def pair(self, handler: Handler, *, limits: Limits | None = None) -> Connection:
        """A connection to a server that answers with `handler`."""
        return self.connect(self.serve(handler, limits=limits))

    def block(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        """A handler that waits until the test is over."""
        assert self.released.wait(60)
        yield Frame(b"late")

    def close(self) -> None:
        """Let every handler go and close everything."""
        self.released.set()
        self._stack.close()


@pytest.fixture(params=TRANSPORTS, ids=lambda transport: transport.__name__)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    before = set(threading.enumerate())
    world = World(request.param())
    yield world
    world.close()
    eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 20_000_000])
def test_bodies_of_any_size_arrive_in_both_directions(world: World, size: int) -> None:
    connection = world.pair(echo)
    body = random.Random(size).randbytes(size)
    (answer,) = [
        (a.header, a.size, read(a))
        for a in connection.call("echo", Frame(b"header", memoryview(body)), timeout=LONG)
    ]
    assert answer == (b"header", size, body)


@pytest.mark.parametrize("size", [0, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("body", [b"", b"body" * CHUNK])
def test_headers_of_any_size_arrive(world: World, size: int, body: bytes) -> None:
    connection = world.pair(echo)
    header = random.Random(size).randbytes(size)
    answers = connection.call("echo", Frame(header, memoryview(body)), timeout=LONG)
    assert [(a.header, read(a)) for a in answers] == [(header, body)]


def test_a_call_with_headers_only(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(method.encode() + b" " + incoming.header)

    assert unary(world.pair(handler), "greet", b"you", timeout=LONG) == b"greet you"


def test_many_answers_arrive_in_order(world: World) -> None:
    bodies = [bytes([index]) * (index * 7001) for index in range(100)]

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        for index, body in enumerate(bodies):
            yield Frame(str(index).encode(), memoryview(body))

    answers = world.pair(handler).call("list", Frame(b""), timeout=LONG)
    assert [(int(a.header), read(a)) for a in answers] == list(enumerate(bodies))


def test_a_call_may_have_no_answers(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield from ()

    assert list(world.pair(handler).call("none", Frame(b""), timeout=LONG)) == []


def test_a_body_is_written_where_the_receiver_says_and_nowhere_else(world: World) -> None:
    size = 3 * CHUNK + 1
    arrived = bytearray(size + 20)

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        incoming.read_into(memoryview(arrived)[10:-10])
        yield Frame(b"", memoryview(arrived)[10:-10])

    target = bytearray(size + 20)
    for answer in world.pair(handler).call("put", Frame(b"", memoryview(b"x" * size)), timeout=LONG):
        answer.read_into(memoryview(target)[10:-10])
    assert arrived == target == bytes(10) + b"x" * size + bytes(10)


def test_bodies_may_be_views_of_other_types(world: World) -> None:
    body: Any = memoryview(bytearray(8 * 1000)).cast("d", (10, 100))
    body[9, 99] = 1.5
    target: Any = memoryview(bytearray(8 * 1000)).cast("d", (10, 100))
    for answer in world.pair(echo).call("echo", Frame(b"", body), timeout=LONG):
        answer.read_into(target)
    assert target == body


def test_a_target_of_the_wrong_size_is_an_error_and_changes_nothing(world: World) -> None:
    connection = world.pair(echo)
    for answer in connection.call("echo", Frame(b"", memoryview(b"body")), timeout=LONG):
        for size in (3, 5):
            with pytest.raises(ValueError, match="4"):
                answer.read_into(memoryview(bytearray(size)))
        with pytest.raises(ValueError, match="read-only"):
            answer.read_into(memoryview(bytes(4)))
        assert read(answer) == b"body"
        with pytest.raises(ValueError, match="already"):
            read(answer)


def test_unread_bodies_are_discarded(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        for index in range(5):
            yield Frame(str(index).encode(), memoryview(bytes([index]) * (CHUNK * 2)))

    connection = world.pair(handler)
    read_bodies = {}
    call = connection.call("list", Frame(b"", memoryview(bytes(20_000_000))), timeout=LONG)
    for index, answer in enumerate(call):
        if index in (1, 4):
            read_bodies[int(answer.header)] = read(answer)
    assert read_bodies == {1: b"\1" * (CHUNK * 2), 4: b"\4" * (CHUNK * 2)}


def test_the_next_answer_makes_the_one_before_unreadable(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"1", memoryview(b"one"))
        yield Frame(b"2", memoryview(b"two"))

    answers = world.pair(handler).call("list", Frame(b""), timeout=LONG)
    first, second = next(answers), next(answers)
    with pytest.raises(ValueError, match="already"):
        read(first)
    assert read(second) == b"two"


def test_sending_starts_with_the_call(world: World) -> None:
    arrived = threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        read(incoming)
        arrived.set()
        yield Frame(b"")

    call = world.pair(handler).call("put", Frame(b"", memoryview(bytes(5_000_000))), timeout=LONG)
    assert arrived.wait(20)
    assert len(list(call)) == 1


@pytest.mark.parametrize("code", list(RefusalCode))
def test_a_refusal_arrives_with_its_code_and_message(world: World, code: RefusalCode) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        raise Refused(code, "nö, \udcff not now")

    with pytest.raises(Refused, match="not now") as caught:
        unary(world.pair(handler), "ask", b"", timeout=LONG)
    assert caught.value.code is code


def test_a_handler_may_find_a_request_malformed(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        raise Malformed("no such header")
        yield

    with pytest.raises(Malformed, match="no such header"):
        unary(world.pair(handler), "ask", b"", timeout=LONG)


def test_a_failing_handler_is_named_to_the_client_and_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        raise ZeroDivisionError("of course")

    with pytest.raises(TransportError, match="ZeroDivisionError") as caught:
        unary(world.pair(handler), "divide", b"", timeout=LONG)
    assert type(caught.value) is TransportError
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "divide" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("size", [3, 20_000_000])
def test_a_handler_that_fails_half_way_has_its_first_answers_delivered(world: World, size: int) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"1", memoryview(bytes(size)))
        raise Refused(RefusalCode.NOT_READY, "later")

    answers = world.pair(handler).call("list", Frame(b""), timeout=LONG)
    assert len(read(next(answers))) == size
    with pytest.raises(Refused, match="later"):
        next(answers)


def test_a_refusal_without_reading_a_large_body_arrives(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        raise Refused(RefusalCode.STALE_EPOCH, "too late")

    with pytest.raises(Refused, match="too late"):
        next(world.pair(handler).call("push", Frame(b"", memoryview(bytes(64_000_000))), timeout=LONG))


def test_deadline_while_the_handler_blocks(world: World) -> None:
    connection = world.pair(world.block)
    with pytest.raises(DeadlineExceeded):
        unary(connection, "wait", b"", timeout=SHORT)


def test_a_call_that_has_no_time_left_is_not_sent(world: World) -> None:
    seen = []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        seen.append(method)
        yield Frame(b"")

    connection = world.pair(handler)
    for timeout in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(DeadlineExceeded):
            unary(connection, "early", b"", timeout=timeout)
    unary(connection, "now", b"", timeout=LONG)
    assert seen == ["now"]


def test_deadline_while_the_client_reads(world: World) -> None:
    body = bytes(50_000_000)

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"", memoryview(body))

    answers = world.pair(handler).call("get", Frame(b""), timeout=SHORT)
    answer = next(answers)
    passed = time.monotonic() + SHORT.total_seconds()
    eventually(lambda: time.monotonic() > passed)
    with pytest.raises(DeadlineExceeded):
        read(answer)


def test_a_handler_learns_that_its_client_has_gone_when_it_reads(world: World) -> None:
    entered, left, errors = threading.Event(), threading.Event(), list[Exception]()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        entered.set()
        assert left.wait(20)
        try:
            read(incoming)
        except TransportError as error:
            errors.append(error)
            raise
        yield Frame(b"")

    call = world.pair(handler).call("push", Frame(b"", memoryview(bytes(64_000_000))), timeout=LONG)
    assert entered.wait(20)
    close(call)
    left.set()
    eventually(lambda: errors)
    assert isinstance(errors[0], ConnectionLost)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_or_dropping_the_answers_closes_the_handler(world: World, how: str) -> None:
    closed = threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        try:
            while True:
                yield Frame(b"tick", memoryview(bytes(100)))
        finally:
            closed.set()

    answers = world.pair(handler).call("ticks", Frame(b""), timeout=LONG)
    next(answers)
    if how == "close":
        close(answers)
    gc.disable()  # going out of scope is enough
    try:
        del answers
        assert closed.wait(20)
    finally:
        gc.enable()


def test_an_answer_cannot_be_read_when_its_call_was_dropped(world: World) -> None:
    connection = world.pair(echo)
    answer = next(connection.call("echo", Frame(b"", memoryview(bytes(20_000_000))), timeout=LONG))
    with pytest.raises(ConnectionLost):
        read(answer)


def test_a_body_is_not_read_after_its_call_was_closed(world: World) -> None:
    body = bytearray(64_000_000)
    view = memoryview(body)
    call = world.pair(world.block).call("push", Frame(b"", view), timeout=LONG)
    close(call)
    view.release()  # reading it now would fail, loudly


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[ElasticPSError]]:
    """Run `work` in a thread; its error is in the list when the thread has ended."""
    errors: list[ElasticPSError] = []

    def target() -> None:
        try:
            work()
        except ElasticPSError as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("size", [0, 64_000_000])
@pytest.mark.parametrize("side", ["connection", "server"])
def test_closing_a_side_ends_blocked_calls(world: World, side: str, size: int) -> None:
    entered = threading.Semaphore(0)

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        entered.release()
        yield from world.block(method, incoming)

    server = world.serve(handler)
    connection = world.connect(server)
    frame = Frame(b"", memoryview(bytes(size)))
    calls = [in_thread(lambda: list(connection.call("wait", frame, timeout=LONG))) for _ in range(3)]
    for _ in calls:
        assert entered.acquire(timeout=20)
    if side == "connection":
        connection.close()
    else:
        closing = threading.Thread(target=server.close)
        closing.start()
    for thread, errors in calls:
        thread.join(20)
        assert [type(error) for error in errors] == [ConnectionLost]
    world.released.set()
    if side == "server":
        closing.join(20)
        assert not closing.is_alive()
    with pytest.raises(ConnectionLost):
        unary(connection, "wait", b"", timeout=LONG)


def test_calls_that_end_within_the_grace_of_a_close_are_answered(world: World) -> None:
    entered, go = threading.Event(), threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        entered.set()
        assert go.wait(20)
        yield Frame(b"done")

    server = world.serve(handler)
    connection = world.connect(server)
    answers: list[bytes] = []
    thread, errors = in_thread(lambda: answers.append(unary(connection, "work", b"", timeout=LONG)))
    assert entered.wait(20)
    closing = threading.Thread(target=server.close, args=(timedelta(seconds=30),))
    closing.start()
    go.set()
    for waiting in (thread, closing):
        waiting.join(20)
        assert not waiting.is_alive()
    assert (answers, errors) == ([b"done"], [])


def test_close_may_be_called_again_and_without_serving(world: World) -> None:
    server = world.transport.listen()
    connection = world.transport.connect(server)
    for _ in range(2):
        connection.close()
        server.close()


def test_a_connection_finds_a_restarted_server(world: World) -> None:
    server = world.serve(echo)
    connection = world.connect(server)
    assert unary(connection, "echo", b"1", timeout=LONG) == b"1"
    for attempt in (b"2", b"3"):
        server.close()
        began = time.monotonic()
        with pytest.raises(ConnectionLost):
            unary(connection, "echo", b"", timeout=LONG)
        assert time.monotonic() - began < 10, "a call without a server fails at once"
        server = world.transport.listen(again=server)
        server.serve(echo)

        def works(attempt: bytes = attempt) -> bool:
            try:
                return unary(connection, "echo", attempt, timeout=LONG) == attempt
            except ConnectionLost:
                return False

        eventually(works)
    server.close()


def test_many_calls_at_once_do_not_mix(world: World) -> None:
    connection = world.pair(echo)

    def work(number: int) -> None:
        chooser = random.Random(number)
        for _ in range(4):
            body = chooser.randbytes(chooser.randrange(4 * CHUNK))
            header = str(number).encode()
            for answer in connection.call("echo", Frame(header, memoryview(body)), timeout=LONG):
                assert (answer.header, read(answer)) == (header, body)

    with ThreadPoolExecutor(32) as pool:
        assert len(list(pool.map(work, range(32)))) == 32


def test_blocked_calls_do_not_hold_up_others(world: World) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield from (world.block if method == "wait" else echo)(method, incoming)

    connection = world.pair(handler)
    frame = Frame(b"", memoryview(bytes(2_000_000)))
    blocked = [connection.call("wait", frame, timeout=LONG) for _ in range(40)]
    body = bytes(5_000_000)
    for answer in connection.call("echo", Frame(b"", memoryview(body)), timeout=LONG):
        assert read(answer) == body
    world.released.set()
    for call in blocked:
        assert [answer.header for answer in call] == [b"late"]


@pytest.mark.parametrize("frame", [Frame(b"h" * 2000), Frame(b"", memoryview(bytes(2_000_001)))])
def test_a_frame_above_the_servers_limits_is_refused_before_the_handler_sees_it(
    world: World, frame: Frame
) -> None:
    seen = []

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        seen.append(incoming.size)
        yield Frame(b"ok")

    connection = world.pair(handler, limits=Limits(header_bytes=1000, body_bytes=2_000_000))
    with pytest.raises(Malformed, match="limit"):
        next(connection.call("push", frame, timeout=LONG))
    assert not seen
    (answer,) = connection.call("push", Frame(b"h" * 1000, memoryview(bytes(2_000_000))), timeout=LONG)
    assert answer.header == b"ok"


def test_an_answer_above_the_clients_limits_is_malformed(world: World) -> None:
    server = world.serve(echo)
    connection = world.connect(server, limits=Limits(header_bytes=1000, body_bytes=2000))
    with pytest.raises(Malformed, match="limit"):
        next(connection.call("echo", Frame(b"h" * 1001), timeout=LONG))
    with pytest.raises(Malformed, match="limit"):
        next(connection.call("echo", Frame(b"", memoryview(bytes(2001))), timeout=LONG))
