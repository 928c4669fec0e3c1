"""A client that does not wait for a page, and what the server of the page says of that."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import urllib.request
from typing import NoReturn

import pytest

from tests.testing.polling import LIMIT, eventually


class Slow:
    """A page that is made only when its client has gone."""

    def __init__(self) -> None:
        self._asked, self._gone = threading.Event(), threading.Event()
        self._maker: threading.Thread

    def make(self) -> None:
        """What the server calls for the page, in a thread for it. Blocks until the client has gone."""
        self._maker = threading.current_thread()
        self._asked.set()
        assert self._gone.wait(LIMIT)

    def ask_and_go(self, port: int, path: str) -> None:
        """Ask localhost for the page, and reset the connection while it is being made.

        Blocks until the server is done with the page, so that what it says of that has been said.
        """
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert self._asked.wait(LIMIT)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._gone.set()
        self._maker.join(LIMIT)
        assert not self._maker.is_alive()


def broken() -> NoReturn:
    """Another page, of which the server says that it fails."""
    raise ValueError("this page is broken")


def assert_only_what_fails_is_told(port: int, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Ask for the page that is `broken`: it is logged, and nothing of a client that went before is."""
    with pytest.raises(http.client.RemoteDisconnected):
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
    told = ""

    def logged() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return "this page is broken" in told

    eventually(logged, "what fails here is logged")
    assert told.count("Traceback") == 1
    assert "ConnectionResetError" not in told
    assert "BrokenPipeError" not in told
