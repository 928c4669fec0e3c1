"""How connections are relayed between two ranks, without MPI."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from elastic_ps.local import relay as relays
from elastic_ps.local.relay import HEAD, Relay, pause
from elastic_ps.transport import local, mpi
from tests.testing.polling import LIMIT
from tests.testing.relays import two

PORT = os.getpid() % 50_000
MUCH = 64 * 1024 * 1024


class Rig(NamedTuple):
    """Two relays, a server's listener behind rank 0's, and the address at which rank 1's listens."""

    zero: Relay
    one: Relay
    listener: socket.socket
    address: str

    def step(self) -> None:
        self.zero.step(0)
        self.one.step(0)

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not what():
            assert time.monotonic() < deadline
            self.step()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """A client's socket, and the server's."""
        client = local.connected(mpi.name_of(self.address), self.address)
        client.setblocking(False)
        found: list[socket.socket] = []

        def accepted() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.append(self.listener.accept()[0])
            return bool(found)

        self.until(accepted)
        found[0].setblocking(False)
        return client, found[0]

    def received(self, sock: socket.socket, size: int) -> bytes:
        """What arrives, up to so many bytes or the end."""
        data = bytearray()
        ended = False

        def enough() -> bool:
            nonlocal ended
            with contextlib.suppress(BlockingIOError):
                piece = sock.recv(size - len(data))
                ended = not piece
                data.extend(piece)
            return ended or len(data) == size

        self.until(enough)
        return bytes(data)

    def fill(self, sock: socket.socket) -> int:
        """Send until nothing more is taken, or `MUCH`; returns how much was."""
        sent, quiet = 0, 0
        while quiet < 100 and sent < MUCH:
            quiet += 1
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(bytes(65_536))
                quiet = 0
            self.step()
        return sent


@pytest.fixture
def rig() -> Iterator[Rig]:
    zero, one = two()
    address = f"rank1-{os.getpid()}:{PORT}"
    server = f"127.0.0.1:{PORT}"
    one.listen(address)
    with contextlib.closing(local.listening(mpi.name_of(server), server)) as listener:
        listener.setblocking(False)
        yield Rig(zero, one, listener, address)
        zero.close([1])
        one.close([0])


def test_what_one_end_sends_the_other_receives_in_both_directions(rig: Rig) -> None:
    client, server = rig.connect()
    with client, server:
        for sender, receiver in ((client, server), (server, client)):
            data = os.urandom(150_000)
            sender.send(data)
            assert rig.received(receiver, len(data)) == data


def test_what_is_not_taken_is_not_sent_and_others_go_on(rig: Rig) -> None:
    client, server = rig.connect()
    other, beside = rig.connect()
    with client, server, other, beside:
        sent = rig.fill(client)
        assert sent < 2 * relays.WINDOW + 4 * mpi.BUFFER, "the window, and what the sockets hold"
        other.send(b"goes on")
        assert rig.received(beside, 7) == b"goes on"
        assert len(rig.received(server, sent)) == sent
        client.send(b"and again")
        assert rig.received(server, 9) == b"and again"


@pytest.mark.parametrize("first", ["client", "server"])
def test_when_one_end_closes_the_other_does_after_what_was_on_the_way(rig: Rig, first: str) -> None:
    client, server = rig.connect()
    closes, stays = (client, server) if first == "client" else (server, client)
    with stays:
        with closes:
            sent = rig.fill(closes)
        for _ in range(100):
            rig.step()
        assert len(rig.received(stays, sent + 1)) == sent


def test_an_end_that_takes_nothing_any_more_and_closes_ends_the_connection(rig: Rig) -> None:
    client, server = rig.connect()
    with client:
        with server:
            rig.fill(client)

        def hung_up() -> bool:
            with contextlib.suppress(BlockingIOError):
                try:
                    client.send(b"more")
                except BrokenPipeError:
                    return True
            return False

        rig.until(hung_up)


def test_without_a_server_a_client_is_hung_up(rig: Rig) -> None:
    rig.listener.close()
    with local.connected(mpi.name_of(rig.address), rig.address) as client:
        client.setblocking(False)
        assert rig.received(client, 1) == b""


def test_where_no_descriptor_is_left_a_client_is_hung_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with local.connected(mpi.name_of(rig.address), rig.address) as client:
        client.setblocking(False)
        rig.one.step(0)
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", refuse)
            rig.zero.step(0)
        assert rig.received(client, 1) == b""


def test_memory_that_waits_is_little_more_than_what_it_holds() -> None:
    buffers = relays.Buffers()
    for size in (1, 1024, 70_000, relays.CHUNK // 2, relays.CHUNK):
        assert size <= len(buffers.take(size)) <= max(4 * size, relays.LEAST) + HEAD.size


def test_a_relay_that_has_ended_takes_nobody_and_says_so(rig: Rig) -> None:
    client, server = rig.connect()
    with client, server:
        rig.one.close([0])
        rig.until(lambda: rig.zero.left == {1})
        assert client.recv(1) == b""
        with pytest.raises(OSError):
            local.connected(mpi.name_of(rig.address), rig.address)
    rig.zero.close([1])
    rig.until(lambda: rig.one.left == {0} and rig.zero.idle and rig.one.idle)


def test_it_sleeps_longer_the_longer_nothing_happens() -> None:
    assert pause(0.0, connections=1) == 0
    assert pause(0.0016, connections=1) == pytest.approx(0.0001)
    assert pause(60.0, connections=1) == relays.LONGEST.total_seconds()
    assert pause(60.0, connections=0) == relays.ALONE.total_seconds()
