"""A connection between hosts: TLS shows who is on the other side, AES-256-GCM carries what is said.

TLS hands out 16 KiB at a time, so a GB takes four times the processor of a plain socket. Both ends therefore
use it for as long as it is needed, to check certificates and to tell each other a secret. Then they close it,
and seal larger records with keys that follow from the secrets. docs/guides/security.md says why that is safe.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from elastic_ps.transport.base import EMPTY
from elastic_ps.transport.sockets import Plain

SECRET = 32
"""Bytes of what each end tells the other within TLS."""

RECORD = 256 * 1024
"""Bytes that a record carries at most. They stay in a core's cache from the cipher to the kernel."""

FIRST = 64 * 1024
"""Bytes of a record that begins with a part smaller than that: a call with a small body is one record."""

MOST_BYTES = 1 << 38
"""What one key seals before the next call has a new connection: no more than TLS (RFC 8446, 5.5)."""

TAG = 16
HEADER = struct.Struct("<IB")
"""Bytes that the record carries, and its kind."""

DATA, END = 0, 1

_KEY = 32
_PURPOSE = b"elastic-ps records"
_AT_ONCE = 0.001  # seconds; zero would mean that a socket does not block


class Keys(NamedTuple):
    """Of AES-256-GCM; nobody uses one for both directions."""

    client: bytes
    server: bytes


def keys_from(client: bytes, server: bytes) -> Keys:
    """The keys of what the client and the server send, from their secrets, by HKDF (RFC 5869)."""
    both = HKDF(SHA256(), 2 * _KEY, salt=None, info=_PURPOSE).derive(client + server)
    return Keys(both[:_KEY], both[_KEY:])


def hear(sock: socket.socket, size: int, until: float) -> bytes:
    """Receive `size` bytes on a socket that may block, less if the other side ends. Raises OSError.

    Args:
        until: the time, of `time.monotonic`, after which it raises TimeoutError.
    """
    said = b""
    while len(said) < size:
        sock.settimeout(max(until - time.monotonic(), _AT_ONCE))
        received = sock.recv(size - len(said))
        if not received:
            break
        said += received
    return said


def greet(sock: ssl.SSLSocket, hello: bytes, until: float) -> Sealed:
    """As a server, after the handshake: say `hello`, agree on keys and close TLS. Blocks. Raises OSError."""
    theirs, mine = hear(sock, SECRET, until), os.urandom(SECRET)
    if len(theirs) < SECRET:
        raise ConnectionResetError("the client has gone")
    sock.sendall(hello + mine)
    keys = keys_from(theirs, mine)
    return _closed(sock, keys.server, keys.client, until)


def begin(sock: ssl.SSLSocket) -> bytes:
    """As a client, after the handshake: tell the server a secret; returns it. Raises OSError.

    A server that refuses the client's certificate says why, and may be gone before this is sent.
    """
    mine = os.urandom(SECRET)
    try:
        sock.sendall(mine)
    except ssl.SSLError:
        sock.recv(1)
        raise
    return mine


def finish(sock: ssl.SSLSocket, mine: bytes, theirs: bytes, until: float) -> Sealed:
    """As a client that has the server's secret: close TLS. Blocks. Raises OSError."""
    keys = keys_from(mine, theirs)
    return _closed(sock, keys.client, keys.server, until)


def _closed(sock: ssl.SSLSocket, sends: bytes, receives: bytes, until: float) -> Sealed:
    sock.settimeout(max(until - time.monotonic(), _AT_ONCE))
    sock.unwrap()  # neither end reads beyond the other's last word
    return Sealed(sock, sends, receives)


class Sealed(Plain):
    """Records, each encrypted and authenticated, with its place in the order. See `Plain`.

    Args:
        sends, receives: the keys of both directions.
    """

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes) -> None:
        super().__init__(sock)
        self._sends, self._receives = AESGCM(sends), AESGCM(receives)
        self._process = os.getpid()  # a copy of the keys in a fork would use each nonce once more
        self._sent = self._received = 0  # records
        self._bytes_sent = self._bytes_received = 0
        self._unsent, self._covers = EMPTY, 0  # the rest of a record, and how many bytes it carries
        self._arrived = EMPTY  # and not opened: less than a record, or several small ones
        self._arriving: memoryview | None = None  # a record that is received where it has room
        self._filled = 0
        self._opened = EMPTY  # and not taken

    @property
    def worn(self) -> bool:
        """See `Plain.worn`."""
        return max(self._bytes_sent, self._bytes_received) >= MOST_BYTES

    @property
    def pending(self) -> bool:
        """See `Plain.pending`."""
        return bool(self._opened) or self._whole(self._arrived)

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """See `Plain.send`. After BlockingIOError, the same bytes have to come next."""
        if not self._unsent:
            content = parts[0]
            if len(parts) > 1 and len(content) < FIRST:
                content = b"".join((content, parts[1][: FIRST - len(content)]))
            content = memoryview(content)[:RECORD]
            self._unsent, self._covers = self._seal(content, DATA), len(content)
        self._unsent = _after(self._unsent, self.sock.send(self._unsent, socket.MSG_NOSIGNAL))
        if self._unsent:
            raise BlockingIOError
        return self._covers

    def _seal(self, content: bytes | memoryview, kind: int) -> memoryview:
        if os.getpid() != self._process:
            raise ConnectionAbortedError("a forked process cannot use its parent's connection")
        header = HEADER.pack(len(content), kind)
        record = np.empty(HEADER.size + len(content) + TAG, np.uint8).data
        record[: HEADER.size] = header
        self._sends.encrypt_into(_nonce(self._sent), content, header, record[HEADER.size :])
        self._sent += 1
        self._bytes_sent += len(content)
        return record

    def end(self) -> None:
        """See `Plain.end`: who finds the connection closed without this record knows that it was cut off."""
        if not self._unsent:
            with contextlib.suppress(OSError):
                self.sock.send(self._seal(b"", END), socket.MSG_NOSIGNAL)

    def receive_into(self, target: memoryview) -> int:
        """See `Plain.receive_into`. A record is opened to where it is used if it has room there."""
        if self._opened:
            taken = self._take(len(target))
            target[: len(taken)] = taken
            return len(taken)
        record = self._record()
        size = len(record) - HEADER.size - TAG
        if size > len(target):
            self._opened = self._open(record, np.empty(size, np.uint8).data)
            return self.receive_into(target)
        self._open(record, target[:size])
        return size

    def receive(self, most: int) -> bytes | memoryview:
        """See `Plain.receive`."""
        if not self._opened:
            record = self._record()
            size = len(record) - HEADER.size - TAG
            self._opened = self._open(record, np.empty(size, np.uint8).data)
        return self._take(most)

    def _take(self, most: int) -> memoryview:
        taken, self._opened = self._opened[:most], _after(self._opened, most)
        return taken

    def _open(self, record: memoryview, target: memoryview) -> memoryview:
        """Check a record and write what it carries into `target`, which has its size; returns that."""
        header, content = bytes(record[: HEADER.size]), record[HEADER.size :]
        try:
            self._receives.decrypt_into(_nonce(self._received), content, header, target)
        except InvalidTag:
            raise ConnectionAbortedError("a record was changed, repeated or left out on the way") from None
        self._received += 1
        self._bytes_received += len(target)
        size, kind = HEADER.unpack(header)
        if (kind, size > 0) not in ((DATA, True), (END, False)):
            raise ConnectionAbortedError(f"a record of kind {kind} with {size} bytes")
        return target

    def _record(self) -> memoryview:
        """The next record, sealed. Raises BlockingIOError if it is not whole yet."""
        if self._arriving is None:
            if len(self._arrived) < HEADER.size:
                self._arrived = memoryview(b"".join((self._arrived, self._some())))
                if len(self._arrived) < HEADER.size:
                    raise BlockingIOError
            size, _ = HEADER.unpack_from(self._arrived)
            if size > RECORD:
                raise ConnectionAbortedError(f"a record of {size} bytes; expected at most {RECORD}")
            whole = HEADER.size + size + TAG
            if len(self._arrived) >= whole:
                record, self._arrived = self._arrived[:whole], _after(self._arrived, whole)
                return record
            # With room for the header of the next one: it is received as a whole then, too.
            self._arriving = np.empty(whole + HEADER.size, np.uint8).data
            self._filled = len(self._arrived)
            self._arriving[: self._filled] = self._arrived
            self._arrived = EMPTY
        whole = len(self._arriving) - HEADER.size
        while self._filled < whole:
            received = self.sock.recv_into(self._arriving[self._filled :])
            if not received:
                raise self._cut_off()
            self._filled += received
        record, rest = self._arriving[:whole], bytes(self._arriving[whole : self._filled])
        self._arriving, self._arrived = None, memoryview(rest)
        return record

    def _some(self) -> bytes:
        received = self.sock.recv(FIRST + HEADER.size + TAG)
        if not received:
            raise self._cut_off()
        return received

    @staticmethod
    def _cut_off() -> ConnectionResetError:
        return ConnectionResetError("the connection was cut off")

    @staticmethod
    def _whole(arrived: memoryview) -> bool:
        if len(arrived) < HEADER.size:
            return False
        size, _ = HEADER.unpack_from(arrived)
        return len(arrived) >= HEADER.size + int(size) + TAG

    def alive(self) -> bool:
        """See `Plain.alive`. The other side's last record counts as its end."""
        if self._opened or self._arriving is not None:
            return True
        first = self._arrived or self.sock.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return bool(first) and not (len(first) >= HEADER.size and HEADER.unpack_from(first)[1] == END)


def _after(view: memoryview, size: int) -> memoryview:
    """What comes after so many bytes. An empty slice would keep all the memory that it is of."""
    return view[size:] if size < len(view) else EMPTY


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
