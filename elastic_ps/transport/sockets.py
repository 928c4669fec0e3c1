"""A connected socket that never blocks, with and without TLS.

Both raise BlockingIOError when they would have to wait, and another OSError when the other side has gone.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence

RECORD = 16 * 1024
"""Bytes of a record of TLS at most."""

RECORDS = 1 << 24
"""How many of them one connection carries: AES-GCM is safe for 2^24.5 with one key (RFC 8446, 5.5)."""


class Plain:
    """What is sent is what the kernel takes; nothing is copied on the way to it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    @property
    def worn(self) -> bool:
        """Whether the connection is to be replaced by a new one, with new keys."""
        return False

    @property
    def pending(self) -> bool:
        """Whether something has arrived that the kernel knows nothing of any more."""
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send from the parts, which are not empty; returns how many bytes were taken."""
        return self.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)

    def receive_into(self, target: memoryview) -> int:
        """Returns how many bytes were received; 0: the other side has ended the connection."""
        return self.sock.recv_into(target)

    def receive(self, most: int) -> bytes:
        """What is there, of `most` bytes at most; none: the other side has ended the connection."""
        return self.sock.recv(most)

    def alive(self) -> bool:
        """Whether the other side is still there, as far as can be seen. Raises as `receive_into`."""
        return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))

    def hang_up(self) -> None:
        """End whatever waits on this socket, in any thread."""
        with contextlib.suppress(OSError):
            # An SSLSocket's own would forget its keys: another thread would take what arrives for plain text.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self.sock.close()


class Encrypted(Plain):
    """TLS. OpenSSL encrypts from where the bytes lie, and decrypts to where they are used, by the record."""

    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._records = 0

    @property
    def pending(self) -> bool:
        """See `Plain.pending`: the rest of a record."""
        return self.sock.pending() > 0

    @property
    def worn(self) -> bool:
        """See `Plain.worn`."""
        return self._records > RECORDS

    def handshake(self) -> int:
        """Go on with it; returns the event of `select.poll` that it waits for, 0 if none. Raises OSError."""
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        return 0

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """See `Plain.send`. After BlockingIOError, the same bytes have to come next."""
        first = parts[0]
        if len(parts) > 1 and len(first) < RECORD:  # one record, and one packet, for a call with a small body
            first = b"".join((first, parts[1][: RECORD - len(first)]))
        try:
            sent = self.sock.send(first)
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        self._records += 1 + sent // RECORD
        return sent

    def receive_into(self, target: memoryview) -> int:
        """See `Plain.receive_into`."""
        self._records += 1
        try:
            return self.sock.recv_into(target)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def receive(self, most: int) -> bytes:
        """See `Plain.receive`."""
        self._records += 1
        try:
            return self.sock.recv(most)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None

    def alive(self) -> bool:
        """See `Plain.alive`."""
        return bool(socket.socket.recv(self.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))


def of(sock: socket.socket) -> Plain:
    """The socket, which from now on never blocks."""
    return Encrypted(sock) if isinstance(sock, ssl.SSLSocket) else Plain(sock)
