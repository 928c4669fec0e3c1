"""A server on localhost that says what it is told to say, also what no HTTP server would."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Talk = Callable[[socket.socket, threading.Event], None]
"""What is said on a connection, after it has been asked; the event is set when the server is closed."""


class Server:
    """Takes connections on localhost, and says on each of them what `talk` says until closed."""

    def __init__(self, talk: Talk, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.asked = 0
        self.open = 0
        self._talk = talk
        self._ended = threading.Event()
        self._listener = socket.create_server(address, backlog=64)
        self.address = (address[0], int(self._listener.getsockname()[1]))
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self.asked += 1
            self.open += 1
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            self._talk(connection, self._ended)
        with self._lock:
            self.open -= 1

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def saying(answer: bytes) -> Talk:
    return lambda connection, _: connection.sendall(answer)


def dripping(connection: socket.socket, ended: threading.Event) -> None:
    """A byte now and then, for ever."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not ended.wait(0.02):
        connection.sendall(b" ")
