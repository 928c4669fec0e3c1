"""The operator's queue and the monitor of its watches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import Any

import pytest

from elastic_operator.listings import WatchMonitor
from elastic_operator.queue import Key, Queue
from tests.testing.virtual import Clock

JOB: Key = ("default", "digits")
SOON = timedelta(milliseconds=1)


async def _serve(queue: Queue, until: threading.Event) -> None:
    task = asyncio.create_task(queue.run())
    assert await asyncio.to_thread(until.wait, 20), "the pass was not made"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_many_wishes_are_one_pass() -> None:
    passes: list[Key] = []
    done = threading.Event()

    async def run(key: Key) -> timedelta | None:
        passes.append(key)
        done.set()
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=2)
        for _ in range(10):
            queue.add(JOB, SOON)
        await _serve(queue, done)

    asyncio.run(main())
    assert passes == [JOB]


def test_one_job_is_never_looked_at_twice_at_a_time() -> None:
    inside, most, count = 0, 0, 0
    lock, done = threading.Lock(), threading.Event()

    async def run(key: Key) -> timedelta | None:
        nonlocal inside, most, count
        with lock:
            inside += 1
            most = max(most, inside)
            count += 1
        await asyncio.sleep(0.01)
        with lock:
            inside -= 1
        if count >= 5:
            done.set()
            return None
        return timedelta(0)

    async def main() -> None:
        queue = Queue(run, concurrency=4)
        queue.add(JOB)
        asyncio.get_running_loop().call_later(0.005, queue.add, JOB)
        await _serve(queue, done)

    asyncio.run(main())
    assert most == 1


def test_a_pass_that_fails_is_made_again() -> None:
    attempts = 0
    done = threading.Event()

    async def run(key: Key) -> timedelta | None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RuntimeError("the API server is away")
        done.set()
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=1)
        queue.add(JOB)
        await _serve(queue, done)

    asyncio.run(main())
    assert attempts == 2


def test_the_more_often_a_pass_has_failed_the_longer_it_is_waited_for_the_next_try() -> None:
    works = iter([False] * 9 + [True, False, True])
    done = threading.Event()
    waits: list[float] = []

    class Impatient(Queue):
        def add(self, key: Key, after: timedelta = timedelta(0)) -> None:
            waits.append(after.total_seconds())
            super().add(key)

    async def run(key: Key) -> timedelta | None:
        if not next(works):
            raise RuntimeError("the API server is away")
        if len(waits) > 11:
            done.set()
            return None
        return timedelta(hours=1)

    async def main() -> None:
        queue = Impatient(run, concurrency=1)
        queue.add(JOB)
        await _serve(queue, done)

    asyncio.run(main())
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 3600, 1]


def item(uid: str, version: str) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": version}}


def test_a_watch_that_died_is_noticed() -> None:
    monitor = WatchMonitor()
    monitor.delivered(item("a", "1"), gone=False)
    monitor.listed({"a": "1"}, now=0.0)
    assert monitor.age(100.0) == 0.0
    monitor.listed({"a": "2", "b": "3"}, now=100.0)
    monitor.listed({"a": "5", "b": "3"}, now=160.0)
    assert monitor.age(160.0) == 60.0
    monitor.delivered(item("a", "5"), gone=False)
    monitor.delivered(item("b", "3"), gone=True)
    assert monitor.age(200.0) == 0.0
    monitor.listed({}, now=300.0)
    assert monitor.age(400.0) == 0.0


def test_a_watch_may_be_ahead_of_a_listing_that_takes_a_while() -> None:
    monitor = WatchMonitor()
    monitor.delivered(item("a", "11"), gone=False)
    monitor.caught_up({"a": "9", "b": "4"})
    monitor.listed({"a": "9", "b": "4"}, now=0.0)
    assert monitor.age(100.0) == 0.0, "it has delivered a later version"
    monitor.listed({"a": "11", "b": "4"}, now=100.0)
    assert monitor.age(200.0) == 0.0, "it has delivered that before"
    monitor.listed({"a": "12", "b": "4"}, now=200.0)
    assert monitor.age(300.0) == 100.0


def test_what_is_due_at_this_very_moment_is_served() -> None:
    """A clock may stand still for a while."""
    done = threading.Event()

    async def run(key: Key) -> timedelta | None:
        done.set()
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=1, clock=lambda: 5.0)
        queue.add(JOB)
        assert len(queue) == 1
        await _serve(queue, done)
        assert len(queue) == 0

    asyncio.run(main())


def test_a_namespace_with_many_jobs_delays_no_other() -> None:
    served: list[str] = []
    done = threading.Event()

    async def run(key: Key) -> timedelta | None:
        served.append(key[0])
        if len(served) == 12:
            done.set()
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=1)
        for index in range(10):
            queue.add(("many", str(index)))
        queue.add(("one", "digits"))
        queue.add(("another", "digits"))
        await _serve(queue, done)

    asyncio.run(main())
    assert served[:5] == ["many", "one", "another", "many", "many"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def served(clock: Clock, lasts: float, *asked: tuple[float, Key, float], concurrency: int = 9) -> list[Any]:
    """When which jobs are served by passes that last so long.

    `asked`: when each is asked for, and how long after that the pass is due.
    """
    passes = []

    async def run(key: Key) -> timedelta | None:
        passes.append((round(clock.now, 3), key[1]))
        await asyncio.sleep(lasts)
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=concurrency, clock=clock.monotonic)
        loop = asyncio.get_running_loop()
        for at, key, after in asked:
            loop.call_at(at, queue.add, key, timedelta(seconds=after))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(100):
                await queue.run()
        assert len(queue) == 0
        assert queue.last_turn >= 95, "whoever looks can see that it turns, though nothing is to be done"

    clock.run(main())
    return passes


A, B, C = (("default", name) for name in "abc")


def test_a_pass_begins_when_it_is_due_and_the_sooner_wish_counts(clock: Clock) -> None:
    assert served(clock, 0, (1, A, 30), (2, A, 5), (3, B, 5), (4, B, 30), (50.5, C, 0)) == [
        (7, "a"),
        (8, "b"),
        (50.5, "c"),
    ]


def test_a_wish_during_a_pass_leads_to_another_one_after_it(clock: Clock) -> None:
    assert served(clock, 10, (1, A, 0), (2, A, 1), (3, A, 0)) == [(1, "a"), (11, "a")]
    clock.now = 0
    assert served(clock, 10, (1, A, 0), (2, A, 20)) == [(1, "a"), (22, "a")], "when that is due"


def test_no_more_passes_than_permitted_are_made_beside_each_other(clock: Clock) -> None:
    asked = [(1, key, 0) for key in (A, B, C)]
    assert served(clock, 10, *asked, concurrency=2) == [(1, "a"), (1, "b"), (11, "c")]


def test_the_queue_ends_when_the_passes_that_have_begun_are_over(clock: Clock) -> None:
    ended = []

    async def run(key: Key) -> timedelta | None:
        await asyncio.sleep(10)
        ended.append(clock.now)
        return None

    async def main() -> None:
        queue = Queue(run, concurrency=1)
        queue.add(A)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                await queue.run()
        assert ended == [10]

    clock.run(main())
