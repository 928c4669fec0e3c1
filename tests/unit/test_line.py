"""A socket as frames travel on it: when it gives up."""

from __future__ import annotations

import socket
import time

import pytest

from elastic_ps.errors import DeadlineExceeded
from elastic_ps.transport.line import Line


def test_after_the_deadline_nothing_is_read_although_it_has_arrived() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        line = Line(ours, "a server")
        theirs.sendall(bytes(10))
        line.receive_into(memoryview(bytearray(5)), time.monotonic() + 60)
        # Who reads slower than the other side sends never waits, so a deadline that only ends waits is none.
        with pytest.raises(DeadlineExceeded):
            line.receive_into(memoryview(bytearray(5)), time.monotonic() - 1)
        line.close()
