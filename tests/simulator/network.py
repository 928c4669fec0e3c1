"""The simulator's transport: messages that are late, lost, or come twice, and connections that break.

A call that fails on the way fails as it does over TCP: the request did not arrive, or the answer did not, and
the caller cannot tell which. A request may also arrive once more, long after the call has ended: a worker
repeats what was not answered, and the network may keep the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed, TransportError
from elastic_ps.transport.base import Connection, Frame, Handler, Incoming, Server
from elastic_ps.transport.refusal import Refusal, answers
from tests.simulator.world import Process, Task, World, world

SILENCE = 8.0
"""Seconds after which a transport knows at the latest that the other side is out of reach."""

LIVE = 0.001
"""Virtual seconds between two looks of a server that closes at its handlers."""


@dataclass
class Weather:
    """How good the network is: probabilities for each call or answer."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    twice: float = 0.0
    late: float = 0.0


@dataclass
class Mishap:
    """What shall happen to a call, besides the weather.

    Attributes:
        lost_answer: the request arrives, the answer does not.
        delay: seconds that the request is late.
        again: is given a function that delivers the request once more when it is called.
    """

    lost_answer: bool = False
    delay: float = 0.0
    again: Callable[[Callable[[], None]], None] | None = None


Watch = Callable[[str, str, str, Frame], Mishap | None]
"""Called with the caller's process, the address, the method and the request, before it is sent."""


@dataclass(eq=False)
class Network:
    """All servers, and who can reach whom.

    Attributes:
        cut: pairs of (process name's stem, address) between which nothing passes.
        watches: may do something to a call.
    """

    here: World
    weather: Weather = field(default_factory=Weather)
    servers: dict[str, SimServer] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    calls: int = 0
    watches: list[Watch] = field(default_factory=list)
    process: Process = field(default_factory=lambda: Process("network"))

    def latency(self) -> float:
        """How long a message is under way."""
        usual = self.here.random.uniform(0.0001, 0.002)
        if self.here.random.random() < self.weather.late:
            return usual + self.here.random.choice([0.05, 0.5, 5.0, 20.0]) * self.here.random.random()
        return usual

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.here.random.random() < probability

    def is_cut(self, source: str, address: str) -> bool:
        return (source.partition("#")[0], address) in self.cut


class SimServer(Server):
    """Listens at an address; the process that made it answers.

    While it listens, it hides the server that listened there before.
    """

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self._process = world().process
        self.handler: Handler | None = None
        self._calls: list[_Call] = []
        self._hidden: SimServer | None = None

    @property
    def address(self) -> str:
        return self._address

    def serve(self, handler: Handler) -> None:
        self.handler = handler
        self._hidden = self._network.servers.get(self._address)
        self._network.servers[self._address] = self
        self._process.on_death.append(self._vanish)

    def close(self, grace: timedelta = timedelta(0)) -> None:
        self.handler = None
        here = world()
        until = here.now + grace.total_seconds()
        while self._calls and here.now < until:
            here.sleep(LIVE)
        self._vanish()
        until = here.now + 10
        while self._calls and here.now < until:
            here.sleep(LIVE)

    def _vanish(self) -> None:
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]
            if self._hidden is not None and self._hidden.handler is not None:
                self._network.servers[self._address] = self._hidden
        self.handler = None
        for call in self._calls:
            call.end(ConnectionLost(f"{call.what}: the server has gone"), self._network.latency())

    def begin(self, call: _Call, *, again: bool = False) -> None:
        """Answer a call in a thread of this process."""
        if self.handler is None or self._process.dead:
            call.end(ConnectionLost(f"{call.what}: nobody serves there"), self._network.latency())
            return
        handler = self.handler
        self._calls.append(call)
        world().spawn(self._process, f"handler {call.what}", lambda: self._answer(call, handler, again))

    def _answer(self, call: _Call, handler: Handler, again: bool) -> None:
        received = _Received(call, call.request)
        try:
            with closing(answers(handler, call.method, received, alive=call.alive)) as items:
                for item in items:
                    world().preempt()
                    if again:
                        continue
                    if not call.alive():
                        break
                    call.offer(item)
            if not again:
                call.offer(None)
        finally:
            self._calls.remove(call)


class SimConnection(Connection):
    """One process's way to an address, whoever serves there at the time."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self._process = world().process
        self._calls: list[_Call] = []
        self._closed = False
        self._process.on_death.append(self._die)

    def _die(self) -> None:
        for call in self._calls:
            call.end(ConnectionLost(f"{call.what}: the client has gone"), 0.0)

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        here, network = world(), self._network
        here.preempt()
        if self._closed:
            raise ConnectionLost(f"{method}: the connection was closed")
        network.calls += 1
        call = _Call(
            self._process, f"{method} at {self._address}", method, frame, here.now + timeout.total_seconds()
        )
        self._calls.append(call)
        weather = network.weather
        if network.is_cut(self._process.name, self._address) or network.chance(weather.lost_request):
            self._lose(call)
            return _Answers(call, self)
        mishaps = [watch(self._process.name, self._address, method, frame) for watch in network.watches]
        mishap = next((found for found in mishaps if found is not None), Mishap())
        call.lossy = mishap.lost_answer or network.chance(weather.lost_answer)
        self._deliver(call, network.latency() + mishap.delay)
        if mishap.again is not None:
            mishap.again(self._again(method, frame))
        if network.chance(weather.twice):
            self._again(method, frame)(here.random.choice([0.01, 1.0, 30.0]) * here.random.random())
        return _Answers(call, self)

    def _again(self, method: str, frame: Frame) -> Callable[..., None]:
        """A function that delivers a request once more; nobody waits for the answer."""
        copy = Frame(bytes(frame.header), memoryview(bytes(frame.body)))

        def deliver(delay: float = 0.0) -> None:
            what = f"{method} at {self._address} (again)"
            second = _Call(self._network.process, what, method, copy, world().now + 100)
            self._deliver(second, delay, again=True)

        return deliver

    def _lose(self, call: _Call) -> None:
        """A reset, soon; or silence, until the transport finds out that nobody is there."""
        soon = self._network.chance(0.7)
        after = self._network.latency() * 10 if soon else SILENCE * world().random.random()
        call.end(ConnectionLost(f"{call.what}: reset"), after)

    def _deliver(self, call: _Call, delay: float, *, again: bool = False) -> None:
        here, network = world(), self._network

        def arrive() -> None:
            here.sleep(delay)
            server = network.servers.get(self._address)
            if server is None:
                call.end(ConnectionLost(f"{call.what}: nobody serves there"), network.latency())
            else:
                server.begin(call, again=again)

        here.spawn(network.process, f"message {call.what}", arrive)

    def over(self, call: _Call) -> None:
        if call in self._calls:
            self._calls.remove(call)

    def close(self) -> None:
        self._closed = True
        for call in list(self._calls):
            call.end(ConnectionLost(f"{call.what}: the connection was closed"), 0.0)


class _Call:
    """The meeting point of a caller and a handler."""

    _numbers = itertools.count()

    def __init__(self, process: Process, what: str, method: str, request: Frame, deadline: float) -> None:
        self.process, self.what, self.method, self.request = process, what, method, request
        self._deadline = deadline
        self._arrived: list[tuple[float, Frame | Refusal | None]] = []
        self._last = 0.0
        self._ends: float | None = None
        self._error: TransportError | None = None
        self._waiter: Task | None = None
        self.lossy = False

    def alive(self) -> bool:
        now = world().now
        return now < self._deadline and (self._ends is None or now < self._ends) and not self.process.dead

    def end(self, error: TransportError, delay: float) -> None:
        """The caller gets `error` after that time, if it has not had everything before."""
        when = world().now + delay
        if self._ends is None or when < self._ends:
            self._ends, self._error = when, error
            self._wake()

    def offer(self, item: Frame | Refusal | None) -> None:
        """An answer goes on its way; None after the last one. It is read bit by bit, as a socket does."""
        here = world()
        if self.lossy:
            self.end(ConnectionLost(f"{self.what}: reset before the answer"), here.random.uniform(0, 0.05))
            return
        if isinstance(item, Frame):
            item = Frame(bytes(item.header), memoryview(_slowly(item.body)))
        latency = here.random.uniform(0.0001, 0.002)
        self._last = max(self._last, here.now) + latency
        self._arrived.append((self._last, item))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            world().wake(self._waiter)

    def next(self) -> Frame | Refusal | None:
        """For the caller: the next answer. Blocks."""
        here = world()
        here.preempt()
        while True:
            if self._arrived and self._arrived[0][0] <= here.now:
                return self._arrived.pop(0)[1]
            if self._ends is not None and self._ends <= here.now:
                assert self._error is not None
                raise type(self._error)(str(self._error))
            if self._deadline <= here.now:
                raise DeadlineExceeded(f"{self.what}: the deadline has passed")
            until = min(
                [self._deadline]
                + ([self._arrived[0][0]] if self._arrived else [])
                + ([self._ends] if self._ends is not None else [])
            )
            self._waiter = here.task
            here.block(until - here.now)
            self._waiter = None


def _slowly(body: memoryview) -> bytes:
    """A copy that takes two turns: what changes meanwhile is torn."""
    flat = body.cast("B") if body.format != "B" else body
    half = len(flat) // 2
    first = bytes(flat[:half])
    if half:
        world().preempt()
    return first + bytes(flat[half:])


class _Received:
    """A frame as the receiver has it."""

    transport = "simulated"
    peer = None

    def __init__(self, call: _Call, frame: Frame) -> None:
        self._call, self.header, self._body = call, bytes(frame.header), frame.body
        self._read = False

    @property
    def size(self) -> int:
        return self._body.nbytes

    def view(self) -> memoryview | None:
        return None

    def read_into(self, target: memoryview) -> None:
        if self._read:
            raise ValueError("the body has been read already")
        self._read = True
        if target.nbytes != self.size:
            raise Malformed("wrong size")
        data = _slowly(self._body)
        if not self._call.alive():
            raise ConnectionLost(f"{self._call.what}: the client has gone")
        half = len(data) // 2
        flat = target.cast("B") if target.format != "B" else target
        flat[:half] = data[:half]
        if half:
            world().preempt()
        flat[half:] = data[half:]


class _Answers(Iterator[Incoming]):
    def __init__(self, call: _Call, connection: SimConnection) -> None:
        self._call, self._connection = call, connection
        self._over = False

    def __next__(self) -> _Received:
        if self._over:
            raise StopIteration
        try:
            item = self._call.next()
        except BaseException:
            self.close()
            raise
        if isinstance(item, Refusal):
            self.close()
            raise item.error()
        if item is None:
            self.close()
            raise StopIteration
        return _Received(self._call, item)

    def close(self) -> None:
        self._over = True
        self._connection.over(self._call)
        if World.current is not None:
            self._call.end(ConnectionLost(f"{self._call.what}: the client has gone"), 0.0)
