"""What every transport promises when calls end early: deadlines, clients that go, sides that close."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from elastic_ps.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ElasticPSError,
)
from elastic_ps.transport.base import Frame, Incoming, Server, unary
from elastic_ps.transport.wire import CHUNK
from tests.testing.polling import LIMIT, eventually
from tests.testing.transports import LONG, SHORT, Reading, World, close, echo, read, sweeps


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

    connection, timeout = world.pair(handler), SHORT
    while True:
        answers = connection.call("get", Frame(b""), timeout=timeout)
        try:
            answer = next(answers)
            break
        except DeadlineExceeded:  # the machine is busy
            timeout *= 4
            assert timeout < LONG
    passed = time.monotonic() + timeout.total_seconds()
    eventually(lambda: time.monotonic() > passed, "the deadline passes")
    with pytest.raises(DeadlineExceeded):
        read(answer)


def test_a_handler_learns_that_its_client_has_gone_when_it_reads(world: World) -> None:
    entered, left, reading = threading.Event(), threading.Event(), Reading()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        entered.set()
        assert left.wait(20)
        yield from reading(method, incoming)

    call = world.pair(handler).call("push", Frame(b"", memoryview(bytes(64_000_000))), timeout=LONG)
    assert entered.wait(20)
    close(call)
    left.set()
    eventually(lambda: reading.errors, "the handler learns it")
    assert isinstance(reading.errors[0], ConnectionLost)


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


@sweeps
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
        assert entered.acquire(timeout=LIMIT)
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


def test_a_call_that_was_given_up_before_the_server_serves_is_not_carried_out(world: World) -> None:
    """A server may wait for its disk for hours, and the process that has called may have a successor."""
    server, seen = world.transport.listen(), list[bytes]()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        seen.append(incoming.header)
        yield Frame(b"")

    connection, body = world.connect(server), memoryview(bytes(100_000))  # not all of it is read ahead
    for number in range(3):
        with pytest.raises((DeadlineExceeded, ConnectionLost)):
            next(connection.call("ask", Frame(b"early %d" % number, body), timeout=SHORT))
    eventually(lambda: not threads_of(server), "its sockets are given up, and their threads")
    server.serve(handler)
    unary(connection, "ask", b"later", timeout=LONG)
    assert seen == [b"later"]
    server.close()


def threads_of(server: Server) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"{server.address} calls"]


def test_a_connection_finds_a_restarted_server(world: World) -> None:
    server = world.serve(echo)
    connection = world.connect(server)
    assert unary(connection, "echo", b"1", timeout=LONG) == b"1"
    for attempt in (b"2", b"3"):
        server.close()
        with pytest.raises(ConnectionLost):  # and not that it takes too long
            unary(connection, "echo", b"", timeout=LONG)
        server = world.transport.listen(again=server)
        server.serve(echo)

        def works(attempt: bytes = attempt) -> bool:
            try:
                return unary(connection, "echo", attempt, timeout=LONG) == attempt
            except ConnectionLost:
                return False

        eventually(works, "the server is found again")
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

    with ThreadPoolExecutor(16) as pool:
        assert len(list(pool.map(work, range(16)))) == 16


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
