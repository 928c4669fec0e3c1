"""Messages of JSON and file descriptors between two processes of a host."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MESSAGE = 1 << 20
"""The largest message, in bytes."""

DESCRIPTORS = 8
"""The most descriptors in a message."""


class Packets:
    """Sends JSON and descriptors over a socket that preserves message boundaries (SOCK_SEQPACKET)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        self.sock = sock

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. Blocks for a moment. Raises OSError if it is too large, or nobody receives it."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE:  # the system may accept it, but the receiver would cut it
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        socket.send_fds(self.sock, [data], descriptors)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Receive the next message. Blocks. Raises EOFError if the other side has gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, MESSAGE, DESCRIPTORS)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return json.loads(data), descriptors

    def hang_up(self) -> None:
        """Show the end to the other side. `close` does not while a forked process has the socket."""
        with contextlib.suppress(OSError):  # the other side has gone already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
