"""An encrypted connection between hosts: TLS authenticates both ends, AES-256-GCM carries the data.

TLS delivers 16 KiB at a time, so a GB takes four times the CPU time of a plain socket. Both ends therefore
use TLS only to check certificates and to exchange secrets. Then they close it, and send larger records,
sealed with keys that are derived from the secrets:

1. Client and server make a TLS 1.3 handshake. Both check the other's certificate.
2. Each sends the other 32 random bytes, its secret, within TLS. The server also sends the port that it
   belongs to.
3. Both close TLS with close_notify, and wait for the other's. Neither reads beyond it.
4. HKDF-SHA256 derives two keys from both secrets, one for each direction.
5. Records follow: a length and a kind (5 bytes), the content encrypted with AES-256-GCM, and its tag (16
   bytes). The nonce is the record's number, from 0. The length and the kind are authenticated.

Nobody else knows the keys. The secrets travel only within TLS, whose forward secrecy protects recorded
traffic from a private key that is stolen later.

A record is accepted once, in its place. If a record is changed, repeated, left out, moved, sent back to its
sender, or taken from another connection, the tag does not fit. The connection is closed, the call fails, and
the part of its body that has arrived is discarded.

A nonce is used once. Each direction of each connection has its own key, and counts its records. Secrets are
random on both sides, so a key repeats only if both repeat theirs. A forked process does not send on a
connection of its parent. After 256 GiB in one direction, the next call uses a new connection.

A truncated connection is not mistaken for one that was closed. The end that closes an idle connection sends a
last record of another kind. Frames also have a length.

As with TLS, an attacker can see how much is sent and when, and can end a connection. The call is then
repeated on another one.
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
"""The bytes of the secret that each end sends within TLS."""

RECORD = 256 * 1024
"""The most bytes that a record carries. They stay in a core's cache from the cipher to the kernel."""

FIRST = 64 * 1024
"""The bytes of a record whose first part is smaller: a call with a small body then fits one record."""

TAG = 16
HEADER = struct.Struct("<IB")
"""The number of bytes that the record carries, and its kind."""

DATA, END = 0, 1

_KEY = 32
_PURPOSE = b"elastic-ps records"
_AT_ONCE = 0.001  # seconds; 0 would make the socket non-blocking


class Keys(NamedTuple):
    """The keys of AES-256-GCM, one for each direction."""

    client: bytes
    server: bytes


def keys_from(client: bytes, server: bytes) -> Keys:
    """Derive the keys for what the client and the server send from their secrets, by HKDF (RFC 5869)."""
    both = HKDF(SHA256(), 2 * _KEY, salt=None, info=_PURPOSE).derive(client + server)
    return Keys(both[:_KEY], both[_KEY:])


def hear(sock: socket.socket, size: int, until: float) -> bytes:
    """Receive `size` bytes on a socket that may block, or fewer if the other side ends. Raises OSError.

    Args:
        until: the time of `time.monotonic` at which to raise TimeoutError.
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
    """On a server, after the handshake, send `hello`, agree on keys, close TLS. Blocks. Raises OSError."""
    theirs, mine = hear(sock, SECRET, until), os.urandom(SECRET)
    if len(theirs) < SECRET:
        raise ConnectionResetError("the client has gone")
    sock.sendall(hello + mine)
    keys = keys_from(theirs, mine)
    return _closed(sock, keys.server, keys.client, until)


def begin(sock: ssl.SSLSocket) -> bytes:
    """On a client, after the handshake, send the server a secret, and return it. Raises OSError.

    A server that refuses the client's certificate says why, and may be gone before the secret is sent.
    """
    mine = os.urandom(SECRET)
    try:
        sock.sendall(mine)
    except ssl.SSLError:
        sock.recv(1)
        raise
    return mine


def finish(sock: ssl.SSLSocket, mine: bytes, theirs: bytes, until: float) -> Sealed:
    """On a client that has the server's secret, close TLS. Blocks. Raises OSError."""
    keys = keys_from(mine, theirs)
    return _closed(sock, keys.client, keys.server, until)


def _closed(sock: ssl.SSLSocket, sends: bytes, receives: bytes, until: float) -> Sealed:
    sock.settimeout(max(until - time.monotonic(), _AT_ONCE))
    sock.unwrap()  # neither end reads beyond the other's close_notify
    return Sealed(sock, sends, receives)


class Sealed(Plain):
    """A socket that sends records, each encrypted and authenticated with its position. See `Plain`.

    Args:
        sends, receives: the keys of both directions.
    """

    most_bytes = 1 << 38
    """The most bytes that a key seals before the connection is replaced; no more than TLS (RFC 8446, 5.5)."""

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes) -> None:
        super().__init__(sock)
        self._sends, self._receives = AESGCM(sends), AESGCM(receives)
        self._process = os.getpid()  # a fork with a copy of the keys would reuse nonces
        self._sent = self._received = 0  # records
        self._bytes_sent = self._bytes_received = 0
        self._unsent, self._covers = EMPTY, 0  # the rest of a record, and the bytes that it carries
        self._arrived = EMPTY  # not opened yet: less than a record, or several small ones
        self._arriving: memoryview | None = None  # a record that is being received into its own buffer
        self._filled = 0
        self._opened = EMPTY  # opened, but not taken yet

    @property
    def worn(self) -> bool:
        """See `Plain.worn`."""
        return max(self._bytes_sent, self._bytes_received) >= self.most_bytes

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
        record = np.empty(_sealed_size(len(content)), np.uint8).data
        record[: HEADER.size] = header
        self._sends.encrypt_into(_nonce(self._sent), content, header, record[HEADER.size :])
        self._sent += 1
        self._bytes_sent += len(content)
        return record

    def end(self) -> None:
        """See `Plain.end`. Without this last record, the other side knows that the connection was cut off."""
        if not self._unsent:
            with contextlib.suppress(OSError):
                self.sock.send(self._seal(b"", END), socket.MSG_NOSIGNAL)

    def receive_into(self, target: memoryview) -> int:
        """See `Plain.receive_into`. A record is opened directly into `target` if it fits."""
        if self._opened:
            taken = self._take(len(target))
            target[: len(taken)] = taken
            return len(taken)
        record = self._record()
        size = _content_size(record)
        if size > len(target):
            self._opened = self._open(record, np.empty(size, np.uint8).data)
            return self.receive_into(target)
        self._open(record, target[:size])
        return size

    def receive(self, most: int) -> bytes | memoryview:
        """See `Plain.receive`."""
        if not self._opened:
            record = self._record()
            self._opened = self._open(record, np.empty(_content_size(record), np.uint8).data)
        return self._take(most)

    def _take(self, most: int) -> memoryview:
        taken, self._opened = self._opened[:most], _after(self._opened, most)
        return taken

    def _open(self, record: memoryview, target: memoryview) -> memoryview:
        """Check a record, and write its content into `target`, which has its size; returns `target`."""
        header, content = bytes(record[: HEADER.size]), record[HEADER.size :]
        try:
            self._receives.decrypt_into(_nonce(self._received), content, header, target)
        except InvalidTag:
            raise ConnectionAbortedError("a record was changed, repeated or left out on the way") from None
        self._received += 1
        self._bytes_received += len(target)
        size, kind = HEADER.unpack(header)
        if (kind, size > 0) not in ((DATA, True), (END, False)):
            raise ConnectionAbortedError(
                f"received a record of kind {kind} with {size} bytes, which is not allowed"
            )
        return target

    def _record(self) -> memoryview:
        """The next sealed record. Raises BlockingIOError if it is not complete yet."""
        if self._arriving is None:
            if len(self._arrived) < HEADER.size:
                self._arrived = memoryview(b"".join((self._arrived, self._some())))
                if len(self._arrived) < HEADER.size:
                    raise BlockingIOError
            size, _ = HEADER.unpack_from(self._arrived)
            if size > RECORD:
                raise ConnectionAbortedError(f"received a record of {size} bytes; expected at most {RECORD}")
            whole = _sealed_size(size)
            if len(self._arrived) >= whole:
                record, self._arrived = self._arrived[:whole], _after(self._arrived, whole)
                return record
            # With room for the next header, so that the next record is also received into its own buffer.
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
        received = self.sock.recv(_sealed_size(FIRST))
        if not received:
            raise self._cut_off()
        return received

    @staticmethod
    def _cut_off() -> ConnectionResetError:
        return ConnectionResetError("the connection was cut off")

    @staticmethod
    def _whole(arrived: memoryview) -> bool:
        header = len(arrived) >= HEADER.size
        return header and len(arrived) >= _sealed_size(HEADER.unpack_from(arrived)[0])


def _sealed_size(content: int) -> int:
    """The bytes of a record that carries `content` bytes."""
    return HEADER.size + content + TAG


def _content_size(record: memoryview) -> int:
    """The bytes that a whole record carries."""
    return len(record) - _sealed_size(0)


def _after(view: memoryview, size: int) -> memoryview:
    """The rest after `size` bytes. An empty slice would keep the whole buffer alive."""
    return view[size:] if size < len(view) else EMPTY


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
