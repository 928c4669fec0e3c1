"""A socket as frames travel on it: how they are told apart, and when it gives up."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from elastic_ps.errors import ConnectionLost, DeadlineExceeded, Malformed
from elastic_ps.transport.base import Frame, Limits
from elastic_ps.transport.line import AHEAD, HEAD, SMALL, Line, LineKind
from elastic_ps.transport.memory import SharedMemory


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


def test_frames_that_have_arrived_together_are_read_one_by_one() -> None:
    """Also with shared memory that is handed over between them, and a body longer than what is read ahead."""
    ours, theirs = socket.socketpair()
    memory = SharedMemory(2 * SMALL)
    shared = memory.take(2 * SMALL)
    shared[:5] = b"there"
    sent: list[bytes | memoryview] = [b"first", shared, b"third", bytes(AHEAD) + b"long", b"last"]
    sender, receiver = Line(theirs, "a worker"), Line(ours, "a server")
    for number, body in enumerate(sent):
        parts, _ = sender.encode(LineKind.ANSWER, Frame(b"%d" % number, memoryview(body)))
        sender.send(parts, time.monotonic() + 10)
    for number, body in enumerate(sent):
        deadline = time.monotonic() + 10
        received = receiver.frame(receiver.head(deadline), Limits(), deadline)
        assert received.header == b"%d" % number
        assert received.shared == (body is shared)
        target = bytearray(received.size)
        received.read_into(memoryview(target))
        assert bytes(target) == bytes(body)
    sender.close()
    with pytest.raises(ConnectionLost):
        receiver.head(time.monotonic() + 10)
    receiver.close()


def test_a_client_that_has_called_and_gone_is_not_there() -> None:
    """Also if its call is still to be read."""
    ours, theirs = socket.socketpair()
    with theirs:
        line = Line(ours, "a server")
        theirs.sendall(b"call")
        assert line.alive()
    assert not line.alive()
    assert line.receive(4, time.monotonic() + 10) == b"call"
    assert not line.alive()
    line.close()


def test_memory_that_no_frame_names_is_not_kept() -> None:
    ours, theirs = socket.socketpair()
    before = descriptors()
    line = Line(ours, "a server")
    with theirs, TemporaryFile() as file:
        socket.send_fds(theirs, [bytes(HEAD.size)], [file.fileno()] * 2)
        with pytest.raises(Malformed, match="2 shared memories"):
            line.head(time.monotonic() + 10)
        line.close()
    assert descriptors() == before - 2, "both ends of the pair are closed, and nothing else is open"


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
