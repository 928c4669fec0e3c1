"""Records on a connection whose bytes an attacker holds: what was changed on the way is never handed out."""

from __future__ import annotations

import itertools
import os
import random
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elastic_ps.transport.sealed import FIRST, HEADER, RECORD, TAG, Sealed, keys_from

KEYS = keys_from(b"c" * 32, b"s" * 32)


class Ends:
    """A client and a server, each connected to the attacker's socket beside it."""

    def __init__(self, *, server: tuple[bytes, bytes] = (KEYS.server, KEYS.client)) -> None:
        mine, self.of_client = socket.socketpair()
        theirs, self.of_server = socket.socketpair()
        self.client = Sealed(mine, KEYS.client, KEYS.server)
        self.server = Sealed(theirs, *server)
        for sock in (mine, self.of_client, theirs, self.of_server):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * RECORD)

    def records(self, *contents: bytes) -> list[bytes]:
        """What the client sends for each of these."""
        return [self._sent(content) for content in contents]

    def _sent(self, content: bytes) -> bytes:
        assert self.client.send([content]) == len(content)
        return self.of_client.recv(HEADER.size + len(content) + TAG, socket.MSG_WAITALL)

    def hear(self, *records: bytes) -> bytes:
        """What the server makes of these, up to the end; raises what the server does."""
        for record in records:
            self.of_server.sendall(record)
        return everything(self.server)

    def close(self) -> None:
        for each in (self.client, self.server):
            each.close()
        self.of_client.close()
        self.of_server.close()


def everything(end: Sealed) -> bytes:
    """All that has arrived there, until it would block, or the other side has ended."""
    heard = b""
    try:
        while part := end.receive(1 << 30):
            heard += part
    except BlockingIOError:
        pass
    return heard


@contextmanager
def ends(**more: tuple[bytes, bytes]) -> Iterator[Ends]:
    made = Ends(**more)
    try:
        yield made
    finally:
        made.close()


def test_what_is_sent_arrives() -> None:
    with ends() as pair:
        contents = [b"a", bytes(FIRST), b"b" * RECORD, b"c"]
        for record in pair.records(*contents):
            pair.of_server.sendall(record)
            assert everything(pair.server) == contents.pop(0)


@pytest.mark.parametrize("at", [0, 3, 4, HEADER.size, HEADER.size + 5, -TAG, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_that_is_flipped(at: int, bit: int) -> None:
    """In the length, the kind, the content and the tag."""
    with ends() as pair:
        record = bytearray(*pair.records(b"0123456789"))
        record[at] ^= 1 << bit
        try:
            heard = pair.hear(bytes(record), bytes(RECORD))
        except ConnectionAbortedError:
            return
        assert not heard, "a record that is said to be longer is waited for"
        pair.of_server.close()
        with pytest.raises(ConnectionError):
            everything(pair.server)


DISORDERS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "reordered": lambda records: [records[1], records[0], records[2]],
    "left out": lambda records: [records[0], records[2]],
    "repeated": lambda records: [records[0], records[0]],
    "divided": lambda records: [HEADER.pack(1, 0) + records[0][HEADER.size :]],
}


@pytest.mark.parametrize("disorder", DISORDERS)
def test_records_in_another_order(disorder: str) -> None:
    with ends() as pair, pytest.raises(ConnectionAbortedError, match="changed, repeated or left out"):
        pair.hear(*DISORDERS[disorder](pair.records(b"one", b"two", b"three")))


def test_a_connection_that_is_cut_off_has_not_ended() -> None:
    with ends() as pair:
        [record] = pair.records(b"one")
        assert pair.hear(record) == b"one"
        pair.of_server.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="cut off"):
            everything(pair.server)


def test_a_connection_that_is_closed_has_ended() -> None:
    with ends() as pair:
        pair.client.close()
        last = pair.of_client.recv(100)
        pair.of_server.sendall(last)
        assert pair.server.receive_into(memoryview(bytearray(1))) == 0
        with pytest.raises(ConnectionAbortedError):
            pair.hear(last)


def test_a_record_of_another_connection() -> None:
    """Each connection has keys of its own: both sides tell each other new secrets."""
    others = keys_from(b"c" * 32, b"t" * 32)
    with ends() as pair, ends(server=(others.server, others.client)) as other:
        [record] = pair.records(b"one")
        with pytest.raises(ConnectionAbortedError):
            other.hear(record)


def test_a_record_that_comes_back_to_its_sender() -> None:
    with ends() as pair:
        [record] = pair.records(b"one")
        pair.of_client.sendall(record)
        with pytest.raises(ConnectionAbortedError):
            everything(pair.client)


def test_two_that_both_think_they_are_the_client() -> None:
    with ends(server=(KEYS.client, KEYS.server)) as pair, pytest.raises(ConnectionAbortedError):
        pair.hear(*pair.records(b"one"))


@pytest.mark.parametrize("size", [RECORD + 1, (1 << 32) - 1])
def test_a_record_that_is_too_long_takes_no_memory(size: int) -> None:
    with ends() as pair, pytest.raises(ConnectionAbortedError, match=f"a record of {size} bytes"):
        pair.hear(HEADER.pack(size, 0))


def test_keys_depend_on_both_secrets_and_differ_by_direction() -> None:
    secrets = [b"a" * 32, b"b" * 32]
    keys = [key for pair in itertools.product(secrets, secrets) for key in keys_from(*pair)]
    assert len(set(keys)) == 8


def test_however_it_is_divided_on_the_way() -> None:
    """And whether the receiver asks for less than a record carries, or for more."""
    draw = random.Random(0)
    with ends() as pair:
        said = b"".join(bytes([number]) * draw.choice([1, 10, 5000]) for number in range(40))
        left, wire = memoryview(said), b""
        while left:
            size = draw.choice([1, 100, 10_000])
            wire += pair.records(bytes(left[:size]))[0]
            left = left[size:]
        heard = b""
        while wire:
            size = draw.choice([1, 7, 100, 20_000])
            pair.of_server.sendall(wire[:size])
            wire = wire[size:]
            try:
                while True:
                    target = bytearray(draw.choice([1, 50, 20_000]))
                    heard += target[: pair.server.receive_into(memoryview(target))]
            except BlockingIOError:
                continue
        assert heard == said
        assert not pair.server.pending


def test_a_sender_goes_on_where_the_kernel_had_no_room() -> None:
    with ends() as pair:
        pair.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
        body, wire, taken = bytes(range(256)) * 512, b"", 0
        while taken < len(body):
            try:
                taken += pair.client.send([memoryview(body)[taken:]])
            except BlockingIOError:
                wire += pair.of_client.recv(1 << 20)
        wire += pair.of_client.recv(1 << 20)
        for at in range(0, len(wire), FIRST):
            pair.of_server.sendall(wire[at : at + FIRST])
        assert everything(pair.server) == body


def test_an_idle_connection_holds_no_record() -> None:
    with ends() as pair:
        tracemalloc.start()
        for _ in range(2):
            pair.of_server.sendall(pair.records(b"b" * RECORD)[0])
            assert len(everything(pair.server)) == RECORD
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < RECORD / 2


def test_a_fork_sends_nothing_on_its_parents_connection() -> None:
    """It would use keys and numbers of records that its parent uses, too."""
    with ends() as pair:
        child = os.fork()
        if not child:
            try:
                pair.client.send([b"one"])
            except ConnectionAbortedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
