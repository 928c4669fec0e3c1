"""Messages between two processes of a host: JSON, and descriptors with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MESSAGE = 1 << 20
"""Bytes of a message at most."""

DESCRIPTORS = 8
"""That come with one at most."""


class Packets:
    """JSON, and descriptors with it, over a socket that keeps messages apart (SOCK_SEQPACKET)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        self.sock = sock

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Blocks for a moment. Raises OSError if the other side has gone, or the message is too large."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE:  # the system may let it pass, but it would be cut where it is received
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        socket.send_fds(self.sock, [data], descriptors)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next one. Blocks. Raises EOFError if the other side has gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, MESSAGE, DESCRIPTORS)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return json.loads(data), descriptors

    def hang_up(self) -> None:
        """Let the other side see the end. `close` does not, while a forked process has the socket."""
        with contextlib.suppress(OSError):  # it has gone already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
