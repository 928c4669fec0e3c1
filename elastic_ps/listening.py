"""On which addresses a server listens, and an HTTP server that listens so.

Apart, because the parameter server, its transports and the operator of a cluster do it in the same way.
"""

from __future__ import annotations

import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Attributes: `both`: a socket of the family takes connections of IPv4, too."""

    family: socket.AddressFamily
    host: str
    both: bool

    @property
    def everywhere(self) -> bool:
        """Whether it is every address of the machine."""
        return not self.host


def place_of(host: str) -> Place:
    """Where to listen on `host`, an address or a name.

    Each word for every address ("", 0.0.0.0, ::) means those of IPv4 and of IPv6, as it does for gRPC. Where
    the machine has no IPv6, there are only the others.
    """
    host = host.strip("[]")
    everywhere = host in ("", "0.0.0.0", "::")
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return Place(family, "" if everywhere else host, both)


class HttpServer(ThreadingHTTPServer):
    """Answers in a thread for each request. `address`: see `place_of`, and a port; 0 picks one."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._place = place_of(address[0])
        self.address_family = self._place.family
        super().__init__((self._place.host, address[1]), handler)

    def server_bind(self) -> None:
        """Without looking up what the host is called, as `HTTPServer` does; that may take its time."""
        if self._place.both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that asks and does not wait for the answer, as a probe with little time, is no failure here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
