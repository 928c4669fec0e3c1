"""The relays of a drill."""

from __future__ import annotations

import socket

import pytest

from elastic_ps.drill.wire import Wires


def test_relays_that_pass_something_on_are_closed_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        wires = Wires()
        (relay,) = wires.route(0, [f"{host}:{port}"])
        with socket.create_connection((host, int(relay.rpartition(":")[2]))) as client:
            there, _ = server.accept()
            with there:
                client.sendall(b"question")
                assert there.recv(100) == b"question"
                there.sendall(b"answer")
                assert client.recv(100) == b"answer"
                wires.close()
    assert not caplog.records
