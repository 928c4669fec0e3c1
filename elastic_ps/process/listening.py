"""The addresses of this host, and the HTTP server of metrics, status and probes.

The parameter server, its transports and the operator share it.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

from elastic_ps.errors import CannotListen


class ListenAddress(NamedTuple):
    """Attributes: `both`: whether a socket of the family also accepts IPv4 connections."""

    family: socket.AddressFamily
    host: str
    both: bool

    @property
    def everywhere(self) -> bool:
        """Whether it stands for every address of the machine."""
        return not self.host


def listen_address(host: str) -> ListenAddress:
    """The address to listen on for `host`, an address or a name.

    Each wildcard ("", 0.0.0.0, ::) stands for all IPv4 and IPv6 addresses, as in gRPC, or only for IPv4 if
    the machine has no IPv6.
    """
    host = host.strip("[]")
    everywhere = host in ("", "0.0.0.0", "::")
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return ListenAddress(family, "" if everywhere else host, both)


def address_towards(address: str, prefer: socket.AddressFamily | None = None) -> str:
    """The address of this host on the way to `host:port`. Nothing is sent.

    Blocks while the host's name is looked up. Its addresses are tried in the system's order, those of the
    family `prefer` before others. Raises OSError if there is no route to any.
    """
    host, _, port = address.rpartition(":")
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    problem = OSError(f"{host} has no address")
    for family, kind, _, _, place in sorted(infos, key=lambda info: info[0] != prefer):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


REQUESTS = 128
"""The number of requests at a time. A further one cuts off the oldest, which takes too long."""

REQUEST = timedelta(seconds=10)
"""The time limit of a request with its answer."""


class HttpServer(ThreadingHTTPServer):
    """Answers each request in a thread. `address`: see `listen_address`, and a port; 0 picks one."""

    daemon_threads = True
    requests, limit = REQUESTS, REQUEST

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, float] = {}  # requests with their start times, the oldest first
        self._lock = threading.Lock()
        self._listens = listen_address(address[0])
        self.address_family = self._listens.family
        super().__init__((self._listens.host, address[1]), handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may be slow."""
        if self._listens.both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for a request, and answer it in a thread."""
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
        """Cut off requests that take too long. Called twice a second."""
        with self._lock:
            self._cut_off(time.monotonic() - self.limit.total_seconds())

    def _cut_off(self, since: float) -> None:
        """Close the requests that began before then, which ends their threads. The lock is held."""
        for request, began in [*self._open.items()]:
            if began > since:
                break
            with contextlib.suppress(OSError):  # the client has gone
                request.shutdown(socket.SHUT_RDWR)
            del self._open[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that do not wait for the answer, such as a probe with a short time-out."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


Page: TypeAlias = tuple[int, str, str]
"""An answer: its HTTP status, content type and text."""


class PageServer:
    """Serves pages in a thread of its own until closed. Requests are not logged.

    Args:
        address: see `HttpServer`.
        pages: make the answers to GET, by path; called in a thread for each request.
        name: the name of the thread.

    Raises:
        CannotListen: the address is taken, or is not this machine's.
    """

    def __init__(
        self, address: tuple[str, int], pages: Mapping[str, Callable[[], Page]], *, name: str
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                missing = f"there is no {self.path} here; this server has {', '.join(pages)}\n"
                code, kind, text = pages.get(self.path, lambda: (404, "text/plain", missing))()
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not logged."""

        try:
            self._server = HttpServer(address, Handler)
        except OSError as error:
            raise CannotListen(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()  # mutant: equal
