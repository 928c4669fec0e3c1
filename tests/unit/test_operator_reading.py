"""Reads of pages that other people's programs serve: they end in time, and lead nowhere else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from elastic_operator.reading import SLOW_PLACES, PageReader, Unreadable, get
from tests.polling import eventually
from tests.unit.talking import Server, Talk, dripping, saying


@pytest.fixture
def serve() -> Iterator[Callable[[Talk], Server]]:
    servers: list[Server] = []

    def start(talk: Talk) -> Server:
        servers.append(Server(talk))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_page_is_read(serve: Callable[[Talk], Server]) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nye\r\n1\r\ns\r\n0\r\n\r\n"
    for answer in (
        b"HTTP/1.0 200 OK\r\n\r\nyes",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes",
        chunked,
    ):
        server = serve(saying(answer))
        assert PageReader(10.0).read("a", server.address, "/status") == b"yes"


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 200 OK\r\nA:"]
)
def test_a_server_that_drips_bytes_or_says_nothing_is_left_in_time(
    serve: Callable[[Talk], Server], head: bytes
) -> None:
    def drip(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(head)
        while not ended.wait(0.02):
            connection.sendall(b"a" if head else b"")

    with pytest.raises(TimeoutError):
        get(serve(drip).address, "/status", timeout=0.3)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 100, "more than 80 bytes"),
        (b"A" * 100, "more than 80 bytes"),
        (b"hello", "not HTTP"),
        (b"", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nyes", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"HTTP/1.1 500 No\r\n\r\n", "500 No"),
    ],
)
def test_an_answer_of_another_kind_is_none(serve: Callable[[Talk], Server], answer: bytes, word: str) -> None:
    with pytest.raises(Unreadable, match=word):
        get(serve(saying(answer)).address, "/status", timeout=10.0, limit=80)


def test_a_redirection_is_not_followed(serve: Callable[[Talk], Server]) -> None:
    target = serve(saying(b"HTTP/1.1 200 OK\r\n\r\nsecret"))
    place = f"http://127.0.0.1:{target.address[1]}/".encode()
    leading = serve(saying(b"HTTP/1.1 302 Found\r\nLocation: " + place + b"\r\nContent-Length: 0\r\n\r\n"))
    with pytest.raises(Unreadable, match="302"):
        PageReader(10.0).read("a", leading.address, "/status")
    assert target.asked == 0


def test_servers_that_keep_us_waiting_hold_a_few_places_and_others_are_read(
    serve: Callable[[Talk], Server],
) -> None:
    stalling, good = serve(dripping), serve(saying(b"HTTP/1.1 200 OK\r\n\r\nyes"))
    owners = [f"team/{number}" for number in range(6)]
    reader = PageReader(0.1)
    for owner in owners:
        with pytest.raises(Unreadable, match=r"within 0\.1 s"):
            reader.read(owner, stalling.address, "/status")
    eventually(lambda: stalling.open == 0, "all of them have been left")
    reader._timeout = 30.0  # from now on they hold their places for as long as the test lasts
    errors: list[str] = []

    def ask(owner: str) -> None:
        try:
            reader.read(owner, stalling.address, "/status")
        except Unreadable as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    eventually(lambda: len(errors) == len(owners) - SLOW_PLACES, "the others are turned away at once")
    eventually(lambda: stalling.open == SLOW_PLACES, "these are asked")
    assert reader.read("team/good", good.address, "/status") == b"yes"
    stalling.close()
    for thread in threads:
        thread.join()


def test_a_server_that_answers_again_is_as_good_as_any(serve: Callable[[Talk], Server]) -> None:
    slow = threading.Event()
    slow.set()

    def talk(connection: socket.socket, ended: threading.Event) -> None:
        if slow.is_set():
            ended.wait(1.0)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nyes")

    server, reader = serve(talk), PageReader(0.2)
    with pytest.raises(Unreadable):
        reader.read("a", server.address, "/")
    slow.clear()
    reader._timeout = 30.0
    assert reader.read("a", server.address, "/") == b"yes"
    assert not reader._slow
