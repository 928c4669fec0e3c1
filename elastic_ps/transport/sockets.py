"""A connected socket that never blocks. `transport.sealed` has one that encrypts.

Both raise BlockingIOError when they would have to wait, and another OSError when the other side has gone.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence


class Plain:
    """A plain socket. Data goes to the kernel without a copy."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    @property
    def worn(self) -> bool:
        """Whether the connection has to be replaced by one with new keys."""
        return False

    @property
    def pending(self) -> bool:
        """Whether data has arrived that is no longer in the kernel's buffer."""
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send bytes of the parts, none of which is empty; returns how many bytes were taken."""
        return self.sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)

    def receive_into(self, target: memoryview) -> int:
        """Receive into `target`; returns how many bytes. 0: the other side has ended the connection."""
        return self.sock.recv_into(target)

    def receive(self, most: int) -> bytes | memoryview:
        """Receive at most `most` bytes. None at all: the other side has ended the connection."""
        return self.sock.recv(most)

    def end(self) -> None:
        """Tell the other side that nothing follows, if it cannot know otherwise. Does not block."""

    def hang_up(self) -> None:
        """End every wait on this socket, in any thread."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would drop the keys, and another thread would read ciphertext as plain text.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self.hang_up()
        self.sock.close()


def of(sock: socket.socket | Plain) -> Plain:
    """The socket, which from now on never blocks."""
    return sock if isinstance(sock, Plain) else Plain(sock)
