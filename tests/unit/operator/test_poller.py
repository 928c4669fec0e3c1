"""Parameter servers are asked beside each other, and only some of their answers lead to a pass."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from elastic_operator.plan import Observed
from elastic_operator.pods import Pod
from elastic_operator.poller import Poller, Server, ask, essence, server_of
from elastic_operator.queue import Key
from elastic_ps.api.status import Divergence, MemberStatus, Progress, ServerStatus
from elastic_ps.api.traffic import Traffic
from tests.testing import talking
from tests.testing.polling import LIMIT
from tests.testing.virtual import Clock

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


@pytest.mark.parametrize("workers", [600, 10_000])
def test_a_server_with_many_members_is_heard(workers: int) -> None:
    """It also remembers a thousand that have left."""
    traffic = {name: 10**12 if name.endswith("bytes") else 1e5 / 3 for name in Traffic.counts()}
    member = MemberStatus(
        worker=9999,
        incarnation=123456,
        pid=1234567,
        host="a-job-of-a-long-name-worker-9999",
        transport="tcp",
        state="lost",
        reason="it has not been heard of for 10 s",
        gone_seconds=1e5 / 3,
        joined_version=10**6,
        left_version=10**6,
        steps=10**6,
        records=10**8,
        step_seconds=1 / 3,
        records_per_second=1e3 / 3,
        slowness=1 / 3,
        traffic=Traffic.model_validate(traffic),
    )
    first = Pod(name="fast-ps-0", uid="a", role="ps", index=0, address=HERE)
    others = [Pod(name="fast-worker", uid="b", role="worker", index=index) for index in range(workers)]
    server = server_of("fast", Observed(pods=(first, *others)))
    assert server is not None
    answer = told(members=[member] * (workers + 1000))

    async def main(port: int, server: Server) -> ServerStatus | None:
        limit = timedelta(seconds=LIMIT)
        poller = Poller(lambda _: None, interval=timedelta(hours=1), timeout=limit, port=port)
        poller.follow(FAST, server)
        return await poller.word(FAST, server, since=time.monotonic())

    with serving(talking.saying(page(answer))) as port:
        assert asyncio.run(main(port, server)) == answer


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


def test_of_thousands_of_answers_little_is_kept() -> None:
    """Parsed, as they were kept once, each takes nine kilobytes."""
    members = [
        MemberStatus(
            worker=index,
            incarnation=1,
            pid=1,
            host=f"fast-worker-{index}",
            state="training",
            joined_version=0,
            steps=5,
            records=9,
        )
        for index in range(2)
    ]
    number = 200

    def say(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(page(told(members=members, progress=Progress(version=5))))

    async def main(port: int) -> float:
        server = Server("fast", HERE)
        poller = Poller(
            lambda _: None, interval=timedelta(hours=1), timeout=timedelta(seconds=LIMIT), port=port
        )
        for index in range(number):
            poller.follow(("default", str(index)), server)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for index in range(number):
            answer = await poller.word(("default", str(index)), server, since=time.monotonic())
            assert answer is not None
            assert answer.members == members
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / number

    with serving(say) as port:
        tracemalloc.start()
        try:
            assert asyncio.run(main(port)) < 4096
        finally:
            tracemalloc.stop()


def test_numbers_that_move_need_no_hurry_and_everything_else_does() -> None:
    member = MemberStatus(worker=0, incarnation=1, pid=1, host="h", state="training", joined_version=0)
    before = told(progress=Progress(version=1, loss=0.5), members=[member])
    moved = told(
        progress=Progress(version=2, loss=0.25, percent=3),
        members=[member.model_copy(update={"steps": 7, "step_seconds": 0.1})],
    )
    assert essence(before) == essence(moved)
    for other in (
        told(progress=Progress(finished=True), members=[member]),
        told(progress=Progress(records_expected=10), members=[member]),
        told(progress=Progress(stopped="enough"), members=[member]),
        told(progress=Progress(diverged=Divergence(reason="LossNoBetter", message="")), members=[member]),
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
    found = server_of("digits", Observed(pods=(second, first)))
    assert found == Server("digits", "10.0.0.1")
    assert not found.ready
    assert server_of("digits", Observed(pods=(second,))) is None
    ended = Pod(name="digits-ps-0", uid="a", role="ps", index=0, address="10.0.0.1", ending="invalid")
    assert server_of("digits", Observed(pods=(ended,))) is None
    lost = Pod(name="digits-ps-0", uid="a", role="ps", index=0)
    assert server_of("digits", Observed(pods=(lost,))) is None, "it has no address yet"


HOST = Server("fast", "10.0.0.1")


class World:
    """Servers that answer at once, as `say` tells for (host, time), and a clock that needs no waiting.

    Attributes:
        asked: when each server was asked.
        wanted: when a pass over which job was asked for.
        then: is called with the job at that time.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.say: Callable[[str, float], ServerStatus | None] = lambda host, now: told()
        self.asked: dict[str, list[float]] = {}
        self.wanted: list[tuple[float, Key]] = []
        self.then: Callable[[Key], object] = lambda _: None

    async def _ask(self, host: str, port: int, job: str, **limits: float) -> ServerStatus | None:
        self.asked.setdefault(host, []).append(self.clock.now)
        return self.say(host, self.clock.now)

    def poller(self, **options: Any) -> Poller:
        def wanted(key: Key) -> None:
            self.wanted.append((self.clock.now, key))
            self.then(key)

        options = {"asking": self._ask, "clock": self.clock.monotonic} | options
        return Poller(wanted, interval=timedelta(seconds=10), timeout=timedelta(seconds=5), **options)

    def run(self, poller: Poller, seconds: float, *later: tuple[float, Callable[[], object]]) -> None:
        """Ask for so long; at these times from the start, something happens."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for after, happens in later:
                loop.call_later(after, happens)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await poller.run()

        self.clock.run(main())

    def gaps(self, host: str = HOST.host, begin: float = 0.0) -> list[float]:
        """Seconds between two questions to a server."""
        return [after - before for before, after in itertools.pairwise([begin, *self.asked[host]])]


@pytest.fixture
def world() -> World:
    return World()


def near(gaps: list[float], *expected: float) -> bool:
    """Whether these are the gaps, but for the fifth by which they vary."""
    return all(0.79 * e <= gap <= 1.21 * e + 0.02 for gap, e in zip(gaps, expected, strict=True))


def test_a_server_is_asked_again_and_again_but_not_to_the_second(world: World) -> None:
    poller = world.poller()
    poller.follow(FAST, HOST)
    world.run(poller, 1000, (500, lambda: poller.follow(FAST, HOST)))
    gaps = world.gaps()
    assert near(gaps, *[10] * len(gaps))
    assert len(gaps) > 80
    assert max(gaps) - min(gaps) > 1
    assert world.wanted == [(world.asked[HOST.host][0], FAST)], "it says the same all the time"


def test_the_more_servers_the_less_often_each_is_asked(world: World) -> None:
    poller = world.poller(polls=5)
    for index in range(100):
        poller.follow(("default", str(index)), Server("fast", str(index)))
    assert len(poller) == 100
    world.run(poller, 300)
    for index in range(100):
        gaps = world.gaps(str(index))[1:]
        assert near(gaps, *[20] * len(gaps))
        assert len(gaps) > 10


def test_one_that_does_not_answer_is_asked_less_and_less_until_it_does(world: World) -> None:
    world.say = lambda host, now: None if now < 400 else told()
    poller = world.poller()
    poller.follow(FAST, HOST)
    world.run(poller, 1000)
    silent = len([now for now in world.asked[HOST.host] if now < 400])
    gaps = world.gaps()
    expected = [10, 20, 40, *[60] * (silent - 2)]
    assert near(gaps, *expected, *[10] * (len(gaps) - len(expected)))
    assert len(gaps) > len(expected) + 30
    assert world.wanted == [(world.asked[HOST.host][silent], FAST)]


def test_one_that_is_not_ready_is_asked_as_often_as_one_that_answers(world: World) -> None:
    """It is about to start; its status is what a person waits for then."""
    world.say = lambda host, now: None if now < 400 else told()
    poller = world.poller()
    starting = Server("fast", HOST.host, ready=False)
    poller.follow(FAST, starting)
    world.run(poller, 800, (500, lambda: poller.follow(FAST, HOST)))
    gaps = world.gaps()
    assert near(gaps, *[10] * len(gaps))


def test_one_that_answers_a_pass_is_asked_again_soon_though_it_was_silent_before(world: World) -> None:
    world.say = lambda host, now: None if now < 300 else told(progress=Progress(version=int(now)))
    poller = world.poller()
    poller.follow(FAST, HOST)

    async def make_pass() -> None:
        assert await poller.word(FAST, HOST, since=world.clock.now) is not None

    passes: list[asyncio.Task[None]] = []
    world.run(poller, 600, (300, lambda: passes.append(asyncio.create_task(make_pass()))))
    later = [now for now in world.asked[HOST.host] if now >= 300]
    assert near([b - a for a, b in itertools.pairwise(later)], *[10] * (len(later) - 1))


def test_a_poller_knows_how_long_a_server_that_is_ready_has_not_answered(world: World) -> None:
    starting = Server("fast", HOST.host, ready=False)
    world.say = lambda host, now: told() if now in (0, 60) else None

    async def main() -> None:
        poller = world.poller()
        for now, server, seconds in (
            (0, HOST, None),
            (10, HOST, 0),
            (25, HOST, 15),
            (60, HOST, None),
            (70, HOST, 0),
            (80, starting, None),
            (90, HOST, 0),
        ):
            world.clock.now = now
            poller.follow(FAST, server)
            await poller.word(FAST, server, since=now)
            assert poller.unanswered(FAST) == (None if seconds is None else timedelta(seconds=seconds))
        poller.follow(FAST, None)
        assert poller.unanswered(FAST) is None

    world.clock.run(main())


def test_many_that_do_not_answer_are_asked_no_more_often_than_many_that_do(world: World) -> None:
    world.say = lambda host, now: None
    poller = world.poller(polls=0.1)
    for index in range(10):
        poller.follow(("default", str(index)), Server("fast", str(index)))
    world.run(poller, 1000)
    assert all(near(gaps, *[100] * len(gaps)) for gaps in (world.gaps(str(i))[1:] for i in range(10)))


def test_progress_is_written_now_and_then_and_everything_else_at_once(world: World) -> None:
    passes: list[asyncio.Task[ServerStatus | None]] = []

    def say(host: str, now: float) -> ServerStatus | None:
        problem = "the disk is full" if now > 300 else ""
        return None if 400 < now < 500 else told(progress=Progress(version=int(now)), problem=problem)

    def make_pass(key: Key) -> None:
        passes.append(asyncio.create_task(poller.word(key, HOST, since=world.clock.now)))

    world.say, world.then = say, make_pass
    poller = world.poller(writes=0.02)
    poller.follow(FAST, HOST)
    world.run(poller, 700)
    times = [now for now, _ in world.wanted]
    first, *_ = times
    assert first == world.asked[HOST.host][0], "now it answers"
    for moment in (300, 400, 500):
        assert min(now for now in times if now > moment) == min(
            n for n in world.asked[HOST.host] if n > moment
        )
    quiet = [now for now in times if now < 300]
    assert all(45 <= gap <= 45 + 12.1 for gap in (b - a for a, b in itertools.pairwise(quiet)))
    assert len(quiet) > 4


def test_a_server_that_is_followed_no_more_is_asked_no_more(world: World) -> None:
    poller, other = world.poller(), Server("fast", "10.0.0.2")
    poller.follow(FAST, HOST)
    world.run(
        poller, 300, (100, lambda: poller.follow(FAST, other)), (200, lambda: poller.follow(FAST, None))
    )
    assert 80 < max(world.asked[HOST.host]) < 100 < min(world.asked[other.host])
    assert 180 < max(world.asked[other.host]) < 200
    assert len(poller) == 0
    poller.follow(FAST, None)


def test_whoever_is_not_followed_is_asked_for_a_pass_all_the_same(world: World) -> None:
    poller = world.poller()
    assert world.clock.run(poller.word(FAST, HOST, since=0)) == told()
    assert len(poller) == 0


def test_an_answer_serves_all_passes_of_a_second_but_those_over_what_has_changed_since(world: World) -> None:
    async def main() -> None:
        poller = world.poller()
        poller.follow(FAST, HOST)
        for now, since, questions in (
            (10, 5, 1),
            (10.5, 5, 1),
            (10.75, 10, 1),
            (10.75, 10.25, 2),
            (12, 5, 3),
        ):
            world.clock.now = now
            assert await poller.word(FAST, HOST, since=since) == told()
            assert len(world.asked[HOST.host]) == questions

    world.clock.run(main())


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(world: World) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def ask(host: str, port: int, job: str, **limits: float) -> ServerStatus | None:
            if world.clock.now == 1:
                await release.wait()
                return told(problem="older")
            return told(problem="newer")

        poller = world.poller(asking=ask)
        poller.follow(FAST, HOST)
        world.clock.now = 1
        slow = asyncio.create_task(poller.word(FAST, HOST, since=1))
        await asyncio.sleep(1)
        assert (await poller.word(FAST, HOST, since=2)) == told(problem="newer")
        release.set()
        assert await slow == told(problem="newer")

    world.clock.run(main())
