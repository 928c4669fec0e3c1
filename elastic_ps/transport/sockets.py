"""A connected socket that never blocks. `transport.sealed` has one that encrypts.

Both raise BlockingIOError when they would have to wait, and another OSError when the other side has gone.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence


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

    def receive(self, most: int) -> bytes | memoryview:
        """What is there, of `most` bytes at most; none: the other side has ended the connection."""
        return self.sock.recv(most)

    def alive(self) -> bool:
        """Whether the other side is still there, as far as can be seen. Raises as `receive_into`."""
        return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))

    def end(self) -> None:
        """Say that nothing follows, where the other side could not tell otherwise. Does not block."""

    def hang_up(self) -> None:
        """End whatever waits on this socket, in any thread."""
        with contextlib.suppress(OSError):
            # An SSLSocket's own would forget its keys: another thread would take what arrives for plain text.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self.hang_up()
        self.sock.close()


def of(sock: socket.socket | Plain) -> Plain:
    """The socket, which from now on never blocks."""
    return sock if isinstance(sock, Plain) else Plain(sock)
