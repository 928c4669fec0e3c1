"""On which addresses a server listens, and an HTTP server that listens so.

Apart, because the parameter server, its transports and the operator of a cluster do it in the same way.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class ListenAddress(NamedTuple):
    """Attributes: `both`: a socket of the family takes connections of IPv4, too."""

    family: socket.AddressFamily
    host: str
    both: bool

    @property
    def everywhere(self) -> bool:
        """Whether it is every address of the machine."""
        return not self.host


def listen_address(host: str) -> ListenAddress:
    """Where to listen on `host`, an address or a name.

    Each word for every address ("", 0.0.0.0, ::) means those of IPv4 and of IPv6, as it does for gRPC. Where
    the machine has no IPv6, there are only the others.
    """
    host = host.strip("[]")
    everywhere = host in ("", "0.0.0.0", "::")
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return ListenAddress(family, "" if everywhere else host, both)


REQUESTS = 128
"""How many requests an `HttpServer` has at a time. For the next one the oldest is cut off: it takes long."""

REQUEST = timedelta(seconds=10)
"""How long a request and its answer may take, however often something of it comes."""


class HttpServer(ThreadingHTTPServer):
    """Answers in a thread for each request. `address`: see `listen_address`, and a port; 0 picks one."""

    daemon_threads = True
    requests, limit = REQUESTS, REQUEST

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, float] = {}  # requests, and since when, the oldest first
        self._lock = threading.Lock()
        self._listens = listen_address(address[0])
        self.address_family = self._listens.family
        super().__init__((self._listens.host, address[1]), handler)

    def server_bind(self) -> None:
        """Without looking up what the host is called, as `HTTPServer` does; that may take its time."""
        if self._listens.both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread, and make room for it before."""
        with self._lock:
            if len(self._open) >= self.requests:
                self._cut_off(next(iter(self._open.values())))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second."""
        with self._lock:
            self._cut_off(time.monotonic() - self.limit.total_seconds())

    def _cut_off(self, since: float) -> None:
        """End the requests that have begun by then; their threads find them closed. The lock is held."""
        for request, began in [*self._open.items()]:
            if began > since:
                break
            with contextlib.suppress(OSError):  # the client has gone
                request.shutdown(socket.SHUT_RDWR)
            del self._open[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that asks and does not wait for the answer, as a probe with little time, is no failure here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
