"""Asks parameter servers for their status in turn, and asks for a pass when an answer needs one.

It is asynchronous: a server that is slow or cannot be reached delays no other, and is asked less and less
often. With more jobs, each server is asked, and its progress written, less often, so that the load on the
operator and the API server stays the same. If more than the numbers of the progress has changed, a pass
follows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from elastic_operator.documents import read_server_status
from elastic_operator.plan import Observed
from elastic_operator.queue import Key
from elastic_ps.api.status import ServerStatus
from elastic_ps.contract.env import DEFAULT_HTTP_PORT

logger = logging.getLogger(__name__)

POLLS_PER_SECOND = 20.0
"""The rate of questions, except for those of passes that need an answer."""

WRITES_PER_SECOND = 3.0
"""The rate of passes, over all jobs, that are made only because the progress has moved."""

_FRESH = 1.0
_LIMIT = 1024 * 1024
"""The longest answer, in bytes, without its present members. It has up to a thousand that have left.

The server runs a user's image, and JSON may take a hundred times as much memory while it is read.
"""

_MEMBER = 1024
"""How much longer the answer may be for each pod of the job, in bytes."""

_LONGEST = 60.0


@dataclass(frozen=True)
class Server:
    """The address of a job's shard 0.

    `ready`: the kubelet reports that it is ready to answer. `limit`: the longest answer to read, in bytes.
    """

    job: str
    host: str
    ready: bool = field(default=True, compare=False)
    limit: int = field(default=_LIMIT, compare=False)


def server_of(job: str, observed: Observed) -> Server | None:
    """The server to ask; None if there is none that could answer."""
    first = next((pod for pod in observed.of("ps") if pod.index == 0), None)
    if first is None or first.ending is not None or first.address is None:
        return None
    return Server(job, first.address, first.ready, _LIMIT + _MEMBER * len(observed.pods))


def essence(status: ServerStatus) -> object:
    """The parts of an answer that may change a decision. The numbers of the progress are not urgent."""
    progress = status.progress
    members = tuple((m.worker, m.incarnation, m.host, m.state) for m in status.members)
    found = progress.diverged.reason if progress.diverged is not None else ""
    ends = (progress.finished, progress.stopped, progress.records_expected is None, found)
    tuning = (status.tuning.generation, status.tuning.problem)
    return (status.term, status.ready, status.problem, tuning, tuple(status.standbys), ends, members)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A server's answer as text: parsed, it would take nine kilobytes for each job.

    Attributes: `progress`: a hash, which tells whether the progress has moved.
    """

    text: str
    progress: int
    essence: object

    @classmethod
    def of(cls, status: ServerStatus) -> _Answer:
        text = json.dumps(status.model_dump(mode="json", by_alias=True, exclude_defaults=True))
        return cls(text, hash(status.progress.model_dump_json()), essence(status))

    def status(self) -> ServerStatus:
        return ServerStatus.model_validate(json.loads(self.text))


@dataclass
class _Followed:
    """Attributes: `silent`: when the first of its `failures` in a row was asked."""

    server: Server
    due: float
    written: float
    answer: _Answer | None = None
    asked: float = float("-inf")
    failures: int = 0
    silent: float | None = None


Asking = Callable[..., Awaitable[ServerStatus | None]]
"""The signature of `ask`."""


class Poller:
    """Follows the servers of jobs. For one event loop only.

    `wanted` asks for a pass over a job. `interval`: the shortest time between two questions to one server.
    `polls`, `writes`: the limits over all jobs, per second.
    """

    def __init__(
        self,
        wanted: Callable[[Key], None],
        *,
        interval: timedelta,
        timeout: timedelta,
        port: int = DEFAULT_HTTP_PORT,
        polls: float = POLLS_PER_SECOND,
        writes: float = WRITES_PER_SECOND,
        asking: Asking | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asking, self._clock = asking or ask, clock
        self._wanted = wanted
        self._interval, self._timeout = interval.total_seconds(), timeout.total_seconds()
        self._polls, self._writes = polls, writes
        self._port = port
        self._jobs: dict[Key, _Followed] = {}
        self._heap: list[tuple[float, Key]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def follow(self, key: Key, server: Server | None) -> None:
        """Ask this server about that job from now on; with None, ask nobody."""
        if server is None:
            self._jobs.pop(key, None)
            return
        known = self._jobs.get(key)
        if known is None or known.server != server:
            now = self._clock()
            self._jobs[key] = _Followed(server, due=now, written=now)
            self._plan(key, self._period())
        else:
            known.server = server

    async def word(self, key: Key, server: Server, *, since: float) -> ServerStatus | None:
        """The server's answer to a question after `since` (monotonic seconds); None if none comes in time.

        The pass that asks writes the progress.
        """
        job = self._jobs.get(key)
        now = self._clock()
        if job is None or job.server != server:
            return await self._question(server)
        job.written = now
        if job.answer is None or job.asked < max(since, now - _FRESH):
            silent = job.failures > 0
            await self._ask(job)
            if silent and job.failures == 0 and self._jobs.get(key) is job:
                self._plan(key, self._period())  # the next question may be a minute away
        return None if job.answer is None else job.answer.status()

    def unanswered(self, key: Key) -> timedelta | None:
        """How long the job's server has not answered although it is ready; None if it has, or is not."""
        job = self._jobs.get(key)
        if job is None or job.silent is None:
            return None
        return timedelta(seconds=self._clock() - job.silent)

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                now = self._clock()
                while self._heap and self._heap[0][0] <= now:
                    due, key = heapq.heappop(self._heap)
                    job = self._jobs.get(key)
                    if job is not None and job.due == due:
                        self._start(key, job)
                wait = self._heap[0][0] - now if self._heap else 1.0
                await asyncio.sleep(min(1.0, max(0.01, wait)))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _period(self) -> float:
        return max(self._interval, len(self._jobs) / self._polls)

    def _plan(self, key: Key, delay: float) -> None:
        job = self._jobs[key]
        job.due = self._clock() + delay * random.uniform(0.8, 1.2)
        heapq.heappush(self._heap, (job.due, key))

    def _start(self, key: Key, job: _Followed) -> None:
        task = asyncio.create_task(self._poll(key, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poll(self, key: Key, job: _Followed) -> None:
        before = job.answer
        await self._ask(job)
        if self._jobs.get(key) is not job:
            return
        period = self._period()
        self._plan(key, min(max(period, _LONGEST), period * 2 ** min(job.failures, 6)))
        after, now = job.answer, self._clock()
        if (before is None) != (after is None):
            self._wanted(key)
        elif before is not None and after is not None:
            rest = max(self._interval, len(self._jobs) / self._writes)
            moved = before.progress != after.progress and now - job.written >= 0.9 * rest
            if moved or before.essence != after.essence:
                self._wanted(key)

    async def _question(self, server: Server) -> ServerStatus | None:
        return await self._asking(
            server.host, self._port, server.job, timeout=self._timeout, limit=server.limit
        )

    async def _ask(self, job: _Followed) -> None:
        asked = self._clock()
        status = await self._question(job.server)
        if asked >= job.asked:
            job.asked, job.answer = asked, None if status is None else _Answer.of(status)
            if status is not None or not job.server.ready:
                # A server that is not ready may be starting, and is not expected to answer.
                job.failures, job.silent = 0, None
            else:
                job.failures, job.silent = job.failures + 1, asked if job.silent is None else job.silent


async def ask(host: str, port: int, job: str, *, timeout: float, limit: int = _LIMIT) -> ServerStatus | None:
    """Send `GET /status`; None if no whole answer of that job comes within `timeout` seconds.

    An answer of more than `limit` bytes is none.
    """
    try:
        async with asyncio.timeout(timeout):
            status = read_server_status(dict(json.loads(await _get(host, port, limit))))
    except (OSError, ValueError, TypeError, RecursionError, asyncio.IncompleteReadError) as error:
        logger.debug("%s of %s does not answer GET /status: %s", host, job, error)
        return None
    return status if status.job == job else None


async def _get(host: str, port: int, limit: int) -> bytes:
    """The body of an answer with status 200. Redirects are not followed.

    Raises:
        OSError, ValueError, IncompleteReadError: there is no such answer.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=limit)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET /status HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            raise ValueError(f"it answers {head.splitlines()[0]!r}; expected status 200")
        body = bytearray()
        while part := await reader.read(65536):
            body += part
            if len(body) > limit:
                raise ValueError(f"its answer has more than {limit} bytes")
        return bytes(body)
    except asyncio.LimitOverrunError as error:
        raise ValueError(str(error)) from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            writer.transport.abort()
