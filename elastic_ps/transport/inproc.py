"""The transport within one process: `server = InprocServer()`, `connection = connect(server)`.

A body is copied once, from the sender's memory to the receiver's target. Errors, deadlines, cancellation and
limits are those of a transport between processes. A closed server may serve again, like a process that is
restarted at the same address; connections to it then work again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from datetime import timedelta

from elastic_ps.errors import ConnectionLost, DeadlineExceeded, TransportError
from elastic_ps.transport.base import JOIN, Connection, Frame, Handler, Incoming, Limits, Server
from elastic_ps.transport.refusal import Refusal, answers
from elastic_ps.transport.views import flat, target_of

_LOG = logging.getLogger(__name__)
_NUMBERS = itertools.count()


class InprocServer(Server):
    """Answers calls in threads of this process; a thread goes from call to call. Thread-safe."""

    def __init__(self, *, limits: Limits | None = None) -> None:
        """`limits`: the limits for clients."""
        self.limits = limits or Limits()
        self._address = f"inproc:{next(_NUMBERS)}"
        self._handler: Handler | None = None
        self._lock = threading.Lock()
        self._calls: dict[_Call, threading.Thread] = {}
        self._idle: dict[threading.Thread, _Work] = {}

    @property
    def address(self) -> str:
        """A name, for messages; clients connect with `connect(server)`."""
        return self._address

    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`; possible again after `close`. Does not block."""
        with self._lock:
            self._handler = handler

    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new calls, and end the running ones; see `Server.close`."""
        with self._lock:
            self._handler = None
            running, idle, self._idle = dict(self._calls), self._idle, {}
        for work in idle.values():
            work.put(None)
        _join(running.values(), grace)
        for call in running:
            call.end(ConnectionLost(f"{call.what}: the server was closed"))
        left = _join([*running.values(), *idle], JOIN)
        if left:
            _LOG.warning("%d handlers on %s did not end; their threads go on", left, self._address)

    def start(self, call: _Call) -> None:
        """Answer `call` in a thread.

        Raises:
            ConnectionLost: the server does not serve.
        """
        with self._lock:
            handler = self._handler
            if handler is None:
                raise ConnectionLost(f"{call.what}: nobody serves there")
            if self._idle:
                thread, work = self._idle.popitem()
            else:
                work = queue.SimpleQueue()
                thread = threading.Thread(target=self._run, args=(work,), daemon=True)
                thread.start()
            thread.name = f"{self._address} {call.what}"
            self._calls[call] = thread
            work.put((call, handler))

    def _run(self, work: _Work) -> None:
        while item := work.get():
            self._answer(*item)
            with self._lock:
                del self._calls[item[0]], item
                if self._handler is None:
                    return
                self._idle[threading.current_thread()] = work

    def _answer(self, call: _Call, handler: Handler) -> None:
        try:
            incoming = _Received(call, call.request, self.limits)
        except TransportError as error:
            call.offer(Refusal.of(error))
        else:
            with contextlib.closing(answers(handler, call.method, incoming, alive=call.alive)) as items:
                for item in items:
                    if not call.offer(item):
                        break
        call.finish()


class InprocConnection(Connection):
    """Calls to an `InprocServer`. Thread-safe."""

    def __init__(self, server: InprocServer, *, limits: Limits | None = None) -> None:
        """`limits`: the limits for the server."""
        self._server = server
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[_Answers] = weakref.WeakSet()
        self._closed = False

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers; see `Connection.call`."""
        call = _Call(f"{method} at {self._server.address}", method, frame, timeout)
        if timeout <= timedelta(0):
            raise DeadlineExceeded(f"{call.what}: no time is left to call")
        answers = _Answers(call, self._limits)
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"{call.what}: the connection was closed")
            self._calls.add(answers)
        self._server.start(call)
        return answers

    def close(self) -> None:
        """Cancel the calls that are under way."""
        with self._lock:
            self._closed = True
            calls = [answers.call for answers in self._calls]
        for call in calls:
            call.end(ConnectionLost(f"{call.what}: the connection was closed"))


def connect(server: InprocServer, *, limits: Limits | None = None) -> InprocConnection:
    """A connection to `server`. `limits`: the limits for its answers."""
    return InprocConnection(server, limits=limits)


class _Call:
    """One call: the meeting point of the client's thread and the handler's."""

    def __init__(self, what: str, method: str, request: Frame, timeout: timedelta) -> None:
        self.what = what
        self.method = method
        self.request = request
        self._deadline = time.monotonic() + timeout.total_seconds()
        # Reentrant, because a call may be dropped, and so ended, by a garbage collection anywhere.
        self._changed = threading.Condition(threading.RLock())
        self._offered: Frame | Refusal | None = None
        self._finished = False
        self._error: TransportError | None = None
        self._readers: set[int] = set()  # threads

    def alive(self) -> bool:
        """Whether the client still waits for answers."""
        with self._changed:
            return self._error is None and self._remaining() > 0

    def end(self, error: TransportError) -> None:
        """Cancel the call: both sides get `error`. Returns when nobody reads the other's memory any more.

        A call whose last answer has been taken is over; the client then finds its normal end.
        """
        with self._changed:
            if self._error is None and not self._finished:
                self._error = error
            self._changed.notify_all()
            # A garbage collection in a reader may drop the call, too, and must not wait for itself.
            self._changed.wait_for(lambda: self._readers <= {threading.get_ident()})

    def offer(self, item: Frame | Refusal) -> bool:
        """On the server, hand `item` to the client, and wait until it is done; False if it has left."""
        with self._changed:
            if self._error is None:
                self._offered = item
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._offered is None or self._error is not None, self._remaining()
                )
            self._changed.wait_for(lambda: not self._readers)
            return self._error is None and self._offered is None

    def finish(self) -> None:
        """On the server, say that there are no more answers."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def wait(self) -> Frame | Refusal | None:
        """On the client, return the next answer, None after the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._offered is not None or self._finished or self._error is not None,
                self._remaining(),
            )
            if self._offered is None and self._finished and self._error is None:
                return None
            self._check()
            return self._offered

    def taken(self) -> None:
        """On the client, release its present answer."""
        with self._changed:
            self._offered = None
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While it is entered, the other side's memory may be read: the call does not end meanwhile."""
        with self._changed:
            self._check()
            self._readers.add(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._readers.discard(threading.get_ident())
                self._changed.notify_all()

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _check(self) -> None:
        if self._error is None and not self._remaining():
            self._error = DeadlineExceeded(f"{self.what}: the deadline has passed")
            self._changed.notify_all()
        if self._error is not None:
            raise type(self._error)(str(self._error))


_Work = queue.SimpleQueue[tuple[_Call, Handler] | None]
"""Calls for a thread of a server to answer. None ends the thread."""


class _Received:
    """A frame for the receiver; the body is still in the sender's memory."""

    transport = "inproc"
    peer = None

    def __init__(self, call: _Call, frame: Frame, limits: Limits) -> None:
        self._call = call
        with call.reading():
            self._body = flat(frame.body)
        self.header, self.size = frame.header, len(self._body)
        limits.check(call.what, header=len(self.header), body=self.size)
        self._available = True

    def view(self) -> memoryview | None:
        """None: the body has to be copied."""
        return None

    def read_into(self, target: memoryview) -> None:
        """Copy the body; see `Incoming.read_into`."""
        target = target_of(target, self.size)
        if not self._available:
            raise ValueError("the body has been read or discarded already")
        self._available = False
        with self._call.reading():
            target[:] = self._body

    def discard(self) -> None:
        """The sender may change its memory from now on."""
        self._available = False


class _Answers(Iterator[Incoming]):
    """The answers to one call. Closing or dropping it cancels the call."""

    def __init__(self, call: _Call, limits: Limits) -> None:
        self.call = call
        self._limits = limits
        self._frame: _Received | None = None

    def __next__(self) -> _Received:
        if self._frame is not None:
            self._frame.discard()
            self._frame = None
            self.call.taken()
        try:
            item = self.call.wait()
            if isinstance(item, Refusal):
                raise item.error()
            if item is not None:
                self._frame = _Received(self.call, item, self._limits)
                return self._frame
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Cancel the call if it has not ended; the body of its frame is not read after that."""
        self.call.end(ConnectionLost(f"{self.call.what}: the client has gone"))

    def __del__(self) -> None:
        self.close()


def _join(threads: Collection[threading.Thread], within: timedelta) -> int:
    """Join `threads` as far as they end `within`; returns how many did not."""
    until = time.monotonic() + within.total_seconds()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)
