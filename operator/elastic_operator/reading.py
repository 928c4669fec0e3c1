"""Reads pages of pods. They run other people's code, so a read is bounded in time and size, and not led on.

All pods that did not answer in time before share a few places, and are turned away while these are taken. So
they keep each other waiting, and not the jobs that answer.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time
from typing import cast

LIMIT = 1024 * 1024
"""Bytes of an answer, its head included, at the most."""

SLOW_PLACES = 2
"""How many pods that have kept us waiting are asked at the same time."""

_REMEMBERED = 10_000


class Unreadable(Exception):
    """There is no answer of use; the message says why."""


class PageReader:
    """Reads pages. Blocking, for `timeout` seconds at the most; thread-safe."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._slow: dict[str, None] = {}
        self._places = threading.Semaphore(SLOW_PLACES)

    def read(self, owner: str, address: tuple[str, int], path: str) -> bytes:
        """The body of `GET path`.

        Args:
            owner: who is to blame if the answer does not come in time.

        Raises:
            Unreadable: no answer in time, one that is too long, or another than 200; or this owner is one of
                many that did not answer in time, and it is not its turn.
        """
        slow = owner in self._slow
        if slow and not self._places.acquire(blocking=False):
            raise Unreadable("it did not answer in time before, and others that did not are asked now")
        try:
            body = get(address, path, timeout=self._timeout)
        except TimeoutError as error:
            self._remember(owner)
            raise Unreadable(f"no answer within {self._timeout:g} s") from error
        except OSError as error:
            raise Unreadable(str(error)) from error
        finally:
            if slow:
                self._places.release()
        with self._lock:
            self._slow.pop(owner, None)
        return body

    def _remember(self, owner: str) -> None:
        with self._lock:
            self._slow.pop(owner, None)
            self._slow[owner] = None
            if len(self._slow) > _REMEMBERED:
                del self._slow[next(iter(self._slow))]


def get(address: tuple[str, int], path: str, *, timeout: float, limit: int = LIMIT) -> bytes:
    """The body of `GET path` from `address`; a redirection is not followed.

    Raises:
        TimeoutError: the whole answer was not there after `timeout` seconds.
        OSError: nobody listens there.
        Unreadable: the answer is longer than `limit` bytes, is not HTTP, or is another than 200.
    """
    deadline = time.monotonic() + timeout
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    question = f"GET {path} HTTP/1.0\r\nHost: {host}:{address[1]}\r\nAccept: application/json\r\n\r\n"
    received = bytearray()
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.settimeout(_left(deadline))
        connection.sendall(question.encode())
        while True:
            connection.settimeout(_left(deadline))
            part = connection.recv(65536)
            if not part:
                break
            received += part
            if len(received) > limit:
                raise Unreadable(f"the answer has more than {limit} bytes")
    return _body(bytes(received))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the whole answer did not come in time")
    return left


class _Received:
    """What `HTTPResponse` takes for a socket."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def _body(received: bytes) -> bytes:
    answer = http.client.HTTPResponse(cast(socket.socket, _Received(received)), method="GET")
    try:
        answer.begin()
        body = answer.read()
    except (http.client.HTTPException, ValueError) as error:
        raise Unreadable(f"the answer is not HTTP: {error!r}") from error
    if answer.status != 200:
        raise Unreadable(f"the answer is {answer.status} {answer.reason}")
    return body
