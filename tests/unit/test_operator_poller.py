"""Parameter servers are asked beside each other, and only some of their answers lead to a pass."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from elastic_operator.plan import Observed
from elastic_operator.pods import Pod
from elastic_operator.poller import Poller, Server, ask, essence, server_of
from elastic_operator.queue import Key
from elastic_ps.status import Member, Progress, ServerStatus
from tests.polling import LIMIT
from tests.unit import talking

HERE = "127.0.0.1"
FAST = ("default", "fast")


def told(job: str = "fast", **fields: Any) -> ServerStatus:
    return ServerStatus(job=job, shard=0, shards=1, term=1, ready=True, **fields)


@contextlib.contextmanager
def serving(talk: talking.Talk) -> Iterator[int]:
    """A server that talks so; its port."""
    server = talking.Server(talk)
    try:
        yield server.address[1]
    finally:
        server.close()


def page(status: ServerStatus) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + status.model_dump_json(by_alias=True).encode()


@pytest.mark.parametrize(
    "answer",
    [
        page(told("another")),
        b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.0 200 OK\r\n\r\n" + b" " * (5 * 1024 * 1024),
        b"HTTP/1.0 200 OK",
        b"",
        b"x" * 5_000_000,
    ],
)
def test_what_is_no_answer_of_that_job_is_none(answer: bytes) -> None:
    with serving(talking.saying(answer)) as port:
        assert asyncio.run(ask(HERE, port, "fast", timeout=LIMIT)) is None


def test_an_answer_that_drips_is_none_when_its_time_is_over() -> None:
    async def main(port: int) -> ServerStatus | None:
        async with asyncio.timeout(LIMIT):
            return await ask(HERE, port, "fast", timeout=0.2)

    with serving(talking.dripping) as port:
        assert asyncio.run(main(port)) is None


def test_a_server_that_does_not_answer_delays_no_other() -> None:
    """A hundred are silent; the one that answers is heard again and again meanwhile."""
    progress = itertools.count()

    def say(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(page(told(progress=Progress(version=next(progress)))))

    async def main(port: int) -> None:
        wanted: asyncio.Queue[Key] = asyncio.Queue()
        poller = Poller(
            wanted.put_nowait,
            interval=timedelta(milliseconds=1),
            timeout=timedelta(seconds=LIMIT),
            port=port,
            polls=10_000,
            writes=10_000,
        )
        poller.follow(FAST, Server("fast", HERE))
        for index in range(100):
            poller.follow(("default", f"slow-{index}"), Server("slow", "127.0.0.2"))
        running = asyncio.create_task(poller.run())
        async with asyncio.timeout(LIMIT):
            for _ in range(2):
                assert await wanted.get() == FAST
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with serving(say) as port, socket.create_server(("127.0.0.2", port), backlog=200):  # nobody accepts
        asyncio.run(main(port))


def test_an_answer_is_used_again_only_if_nothing_has_changed_since() -> None:
    versions = itertools.count()

    def say(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(page(told(progress=Progress(version=next(versions)))))

    async def main(port: int) -> list[int]:
        server = Server("fast", HERE)
        poller = Poller(
            lambda _: None, interval=timedelta(hours=1), timeout=timedelta(seconds=LIMIT), port=port
        )
        heard = []
        poller.follow(FAST, server)
        began = time.monotonic()
        for since in (began, began, time.monotonic() + 3600):
            answer = await poller.word(FAST, server, since=since)
            assert answer is not None
            heard.append(answer.progress.version)
        return heard

    with serving(say) as port:
        assert asyncio.run(main(port)) in ([0, 0, 1], [0, 1, 2]), "an answer is fresh for a second"


def test_numbers_that_move_need_no_hurry_and_everything_else_does() -> None:
    member = Member(worker=0, incarnation=1, pid=1, host="h", state="training", joined_version=0)
    before = told(progress=Progress(version=1, loss=0.5), members=[member])
    moved = told(
        progress=Progress(version=2, loss=0.25, percent=3),
        members=[member.model_copy(update={"steps": 7, "step_seconds": 0.1})],
    )
    assert essence(before) == essence(moved)
    for other in (
        told(progress=Progress(finished=True), members=[member]),
        told(members=[]),
        told(members=[member.model_copy(update={"state": "hung"})]),
        before.model_copy(update={"problem": "the disk is full"}),
        before.model_copy(update={"term": 2}),
        before.model_copy(update={"standbys": [False]}),
    ):
        assert essence(other) != essence(before)


def test_the_server_that_is_asked_is_the_first_shards_while_it_may_run() -> None:
    first = Pod(name="digits-ps-0", uid="a", role="ps", index=0, address="10.0.0.1")
    second = Pod(name="digits-ps-1", uid="b", role="ps", index=1, address="10.0.0.2")
    assert server_of("digits", Observed(pods=(second, first))) == Server("digits", "10.0.0.1")
    assert server_of("digits", Observed(pods=(second,))) is None
    ended = Pod(name="digits-ps-0", uid="a", role="ps", index=0, address="10.0.0.1", ending="invalid")
    assert server_of("digits", Observed(pods=(ended,))) is None
