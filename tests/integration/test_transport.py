"""What every transport promises of frames: they arrive, or are refused or reported in words."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ps.errors import (
    Malformed,
    RefusalCode,
    Refused,
    TransportError,
)
from elastic_ps.transport.base import Frame, Incoming, Limits, unary
from elastic_ps.transport.wire import CHUNK
from tests.testing.transports import LONG, World, echo, read, sweeps


@sweeps
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 20_000_000])
def test_bodies_of_any_size_arrive_in_both_directions(world: World, size: int) -> None:
    connection = world.pair(echo)
    body = random.Random(size).randbytes(size)
    (answer,) = [
        (a.header, a.size, read(a))
        for a in connection.call("echo", Frame(b"header", memoryview(body)), timeout=LONG)
    ]
    assert answer == (b"header", size, body)


@sweeps
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


@sweeps
@pytest.mark.parametrize("size", [0, 100, 3 * CHUNK])
def test_an_answer_that_ends_the_call_arrives_as_any_other(world: World, size: int) -> None:
    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        yield Frame(b"first", memoryview(b"1" * size))
        yield Frame(b"second", memoryview(b"2" * size), last=True)

    connection = world.pair(handler)
    for _ in range(3):
        answers = connection.call("list", Frame(b""), timeout=LONG)
        assert [(a.header, read(a)) for a in answers] == [(b"first", b"1" * size), (b"second", b"2" * size)]


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
        arrived.set()
        read(incoming)
        yield Frame(b"")

    call = world.pair(handler).call("put", Frame(b"", memoryview(bytes(5_000_000))), timeout=LONG)
    assert arrived.wait(20)
    assert len(list(call)) == 1


@sweeps
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


@sweeps
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
        raise Refused(RefusalCode.STALE_TERM, "too late")

    with pytest.raises(Refused, match="too late"):
        next(world.pair(handler).call("push", Frame(b"", memoryview(bytes(64_000_000))), timeout=LONG))


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
