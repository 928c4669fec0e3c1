"""The transport between hosts: gRPC over TCP, with the messages of frame.proto.

The flow-control window of a call (`WINDOW`) bounds how much of an unread body gRPC buffers on both sides.
With credentials, both sides show a certificate before the first call (TLS 1.3); without, the server answers
everybody in plain text.

A process may fork while calls are in flight as long as the child leaves its copies of these objects alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

from elastic_ps.contract.env import disable_grpc_fork_hooks

disable_grpc_fork_hooks()
# To free a channel waits for threads, which a forked process, such as a DataLoader's, does not have.
os.register_at_fork(after_in_child=gc.freeze)

import grpc  # noqa: E402

from elastic_ps.contract.certificates import uris_of  # noqa: E402
from elastic_ps.contract.identity import Identity  # noqa: E402
from elastic_ps.errors import (  # noqa: E402
    CannotListen,
    ConnectionLost,
    DeadlineExceeded,
    Malformed,
    TransportError,
)
from elastic_ps.transport.base import JOIN, STALL, Connection, Frame, Handler, Incoming, Limits, Server  # noqa: E402
from elastic_ps.transport.credentials import Credentials, Loaded  # noqa: E402
from elastic_ps.transport.refusal import Refusal, answers  # noqa: E402
from elastic_ps.transport.shares import Shares, descriptors_for  # noqa: E402
from elastic_ps.transport.stall import SLOWEST, Watchdog  # noqa: E402
from elastic_ps.transport.wire import (  # noqa: E402
    MESSAGE_BYTES,
    ReceivedFrame,
    Receiver,
    encode_refusal,
    fits,
    messages,
)

_LOG = logging.getLogger(__name__)

CALLS = 4096
"""The number of calls that a server answers at the same time, each in a thread; the next ones wait. A worker
has two calls that wait most of the time: for records or a round, and for a version. Calls of one address
beyond its share, see `transport.shares`, fail at once."""

CALLS_OF_ONE = 128
"""The number of calls of one connection, so that none takes all threads. A worker needs eight."""

CONNECTIONS = 2048
"""The number of connections of a server, each with some 20 KB; further ones are closed. Clients that use the
data port need none of them."""

IDLE = timedelta(minutes=2)
"""A connection without a call is closed after this time. Its client makes another one when it has a call."""

WINDOW = 1024 * 1024
"""The bytes that a sender may send in one call before the receiver asks for them. A server with n calls whose
bodies are unread holds about 1.2 n MiB; a larger window is no faster within a machine."""

_SERVICE, _METHOD = "elastic_ps.transport.Transport", "Call"

_CERTIFICATE = "x509_pem_cert"
"""gRPC's key of the certificate. It also has the certificate's names, but without their types."""

_uris_of = functools.lru_cache(maxsize=1024)(uris_of)

_VERSION = b"TLSv1.3"
"""gRPC would also accept TLS 1.2. Its older versions do not tell which version a connection uses."""

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # With probing on, gRPC lets the window grow to several times the bandwidth-delay product, per call.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.http2.max_frame_size", MESSAGE_BYTES),
    # A host that vanished without closing its connections is noticed after time plus timeout.
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", CALLS_OF_ONE),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_connection_idle_ms", int(IDLE.total_seconds() * 1000)),
)
_CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    # A restarted server is found again quickly, also when its name now means another address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # The caller retries; gRPC's own retries would keep a copy of what was sent.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # A connection of its own, which `close` closes.
    ("grpc.use_local_subchannel_pool", 1),
)


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """The credentials of a server, from the files at each handshake."""
    credentials.accepting()  # a process without a server's certificate cannot serve
    shown = credentials.current()

    def configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
        pairs = [(loaded.key, loaded.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=loaded.ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        loaded = credentials.current()
        if loaded is shown:
            return None
        shown = loaded
        return configuration(loaded)

    return grpc.dynamic_ssl_server_credentials(
        configuration(shown),
        changed,  # type: ignore[arg-type]  # None says that nothing has changed
        require_client_authentication=True,
    )


class GrpcServer(Server):
    """Listens on a TCP port. Thread-safe."""

    def __init__(
        self,
        bind: str,
        *,
        limits: Limits | None = None,
        calls: int = CALLS,
        connections: int = CONNECTIONS,
        stall: timedelta = STALL,
        credentials: Credentials | None = None,
    ) -> None:
        """Listen on `bind`, `host:port`; port 0 picks one. Clients wait until `serve` is called.

        Args:
            limits: the limits for clients.
            calls: the number of calls that are answered at the same time, each in a thread; the next ones
            wait. connections: the number of connections, as far as there are descriptors for them.
            stall: how long a client may send nothing in the middle of a frame.
            credentials: for TLS with clients that have a certificate of the job; None: the server answers
                everybody in plain text.

        Raises:
            CannotListen: the port is taken, or the host is not an address of this machine.
            UsageError: the credentials are not those of a server.
        """
        self._credentials = credentials
        security = _server_credentials(credentials) if credentials is not None else None
        self.limits = limits or Limits()
        self._handler: Handler | None = None
        self._pool = ThreadPoolExecutor(calls, thread_name_prefix=f"grpc-{bind}")
        limited = (
            ("grpc.max_allowed_incoming_connections", descriptors_for(connections)),
            ("grpc.server_handshake_timeout_ms", int(self.limits.handshake.total_seconds() * 1000)),
        )
        self._server = grpc.server(self._pool, options=(*_SERVER_OPTIONS, *limited))
        method = grpc.stream_stream_rpc_method_handler(self._answer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),)
        )
        host, _, _ = bind.rpartition(":")
        try:
            if security is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, security)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on {bind}: the port is taken or the host is not an address of this machine. "
                "Stop the other process or choose another port"
            ) from error
        self._address = f"{'127.0.0.1' if host in ('', '0.0.0.0', '[::]') else host}:{port}"
        self._watchdog = Watchdog(stall)  # not before: the port may be taken
        self._idle = threading.Condition()
        self._running = 0
        self._shares = Shares(calls, self.limits.share)
        self._closed = False

    @property
    def address(self) -> str:
        """`host:port`. If it listens on every address, one that works on this machine."""
        return self._address

    def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`. Does not block."""
        self._handler = handler
        self._server.start()

    def close(self, grace: timedelta = timedelta(0)) -> None:
        """Take no new calls, and end the running ones; see `Server.close`."""
        if self._closed:
            return
        self._closed = True
        if self._handler is None:
            # gRPC gives the port back only if the server had been started.
            self._server.start()
        stopped = self._server.stop(grace.total_seconds())
        stopped.wait((grace + JOIN).total_seconds())
        with self._idle:
            idle = self._idle.wait_for(lambda: self._running == 0, JOIN.total_seconds())
        if not idle:
            _LOG.warning("%d handlers on %s did not end; their threads go on", self._running, self._address)
        self._pool.shutdown(wait=idle)
        self._watchdog.close()

    def _answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one call, in a thread of the pool. gRPC drops and so closes it if the client goes."""
        client = context.peer().rpartition(":")[0]  # without the port
        if not self._shares.take(client):
            context.abort(grpc.StatusCode.UNAVAILABLE, "too many calls from this address")
        with self._idle:
            self._running += 1
        try:
            peer = self._identify(context)
            yield from self._messages(_Requests(requests, context, self._watchdog), peer)
        finally:
            self._shares.give_back(client)
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _identify(self, context: grpc.ServicerContext) -> Identity | None:
        """The caller's identity; None without TLS. gRPC has checked the certificate, but not its job."""
        if self._credentials is None:
            return None
        shown = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
        peer = self._credentials.accept(uri for one in shown.get(_CERTIFICATE, ()) for uri in _uris_of(one))
        if any(version != _VERSION for version in shown.get("ssl_tls_version", ())):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "TLS 1.3 is expected")
        if peer is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate does not belong to this job")
        return peer

    def _messages(self, requests: _Requests, peer: Identity | None) -> Iterator[bytes]:
        assert self._handler is not None, "gRPC calls this only after `serve`"
        try:
            frame = Receiver(requests.next, self.limits, peer).next()
            if frame is None:
                raise Malformed("the call has no frame")
        except Malformed as error:
            yield encode_refusal(Refusal.of(error))
            return
        except TransportError:
            return  # the client has gone
        with contextlib.closing(answers(self._handler, frame.method, frame, alive=requests.alive)) as items:
            for item in items:
                if isinstance(item, Refusal):
                    yield encode_refusal(item)
                else:
                    yield from messages(item)


class _Requests:
    """The messages of one call as its server receives them."""

    def __init__(self, messages: Iterator[bytes], context: grpc.ServicerContext, watchdog: Watchdog) -> None:
        self._messages = messages
        self._context = context
        self._watchdog = watchdog
        self._stalled = False
        self._waited, self._received = 0.0, 0  # seconds and bytes of the whole call

    def alive(self) -> bool:
        return bool(self._context.is_active())

    def next(self) -> bytes | None:
        limit, began = self._watchdog.limit.total_seconds(), time.monotonic()
        try:
            with self._watchdog.waiting(self._cut_off):
                message = next(self._messages, None)
            self._waited += time.monotonic() - began
            self._received += len(message or b"")
            if self._waited > limit + self._received / SLOWEST:
                self._cut_off()
                raise self._lost()
        except Exception as error:  # gRPC raises bare RpcError or Exception when a call was cancelled
            raise self._lost() from error
        if message is None and (self._stalled or not self.alive()):
            raise self._lost()
        return message

    def _cut_off(self) -> None:
        self._stalled = True
        self._context.cancel()  # type: ignore[no-untyped-call]

    def _lost(self) -> TransportError:
        if self._stalled:
            seconds = self._watchdog.limit.total_seconds()
            return ConnectionLost(
                f"the client has sent nothing for {seconds:g} s in the middle of a frame, or next to nothing"
            )
        remaining = self._context.time_remaining()
        if remaining is not None and remaining <= 0:
            return DeadlineExceeded("the client's deadline has passed")
        return ConnectionLost("the client has gone")


class GrpcConnection(Connection):
    """Calls to one server over a TCP connection of its own, which is made when needed. Thread-safe.

    After the server went away, calls fail at once with `ConnectionLost` until it is reachable again. If
    something else answers meanwhile, such as a proxy in the place of a Service without pods, the next call
    makes another TCP connection: the proxy would keep the old one, and answer it, when the server is back.
    """

    def __init__(
        self, address: str, *, limits: Limits | None = None, credentials: Credentials | None = None
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            address: `host:port`.
            limits: what is accepted from the server.
            credentials: to talk TLS with.
        """
        self._address, self._credentials = address, credentials
        self._limits = limits or Limits()
        self._line = _Line(address, credentials)
        self._calls: weakref.WeakSet[_Answers] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        """Send `frame` and iterate over the answers; see `Connection.call`."""
        what, seconds = f"{method} at {self._address}", timeout.total_seconds()
        if seconds <= 0:
            raise DeadlineExceeded(f"{what}: no time is left to call")
        outgoing, sending, line = messages(frame, method), None, self._line
        try:
            if fits(frame):
                call = line.send_one(next(outgoing), timeout=seconds)
            else:
                sending = _Sending(outgoing)
                call = line.send_many(sending, timeout=seconds)
        except ValueError as error:
            if self._closed or line is not self._line:
                raise ConnectionLost(f"{what}: the connection was closed") from error
            raise
        answers = _Answers(
            what, call, sending, self._limits, lambda: self._hang_up(line), lambda: self._renew(line)
        )
        with self._lock:
            self._calls.add(answers)
        return answers

    def _hang_up(self, line: _Line) -> None:
        """A stranger has answered on this line: end it with all its calls, and use another one."""
        with self._lock:
            if self._closed or line is not self._line:
                return
            self._line = _Line(self._address, self._credentials)
        line.channel.close()

    def _renew(self, line: _Line) -> None:
        """The connection was lost. A channel keeps the certificate that it was made with."""
        if self._credentials is not None and self._credentials.current() is not line.shown:
            self._hang_up(line)

    def close(self) -> None:
        """Cancel the calls that are under way, close the TCP connection and join the threads."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        self._line.channel.close()
        for call in calls:
            call.close()


class _Line:
    """A TCP connection, made when it is needed, and how to call over it."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        if credentials is None:
            self.shown = None
            self.channel = grpc.insecure_channel(address, options=_CLIENT_OPTIONS)
        else:
            self.shown = shown = credentials.current()
            security = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
            name = ("grpc.ssl_target_name_override", credentials.server_name)
            self.channel = grpc.secure_channel(address, security, options=(*_CLIENT_OPTIONS, name))
        # On the wire both are the same RPC; a frame of one message needs no thread to send it.
        self.send_one = self.channel.unary_stream(f"/{_SERVICE}/{_METHOD}", None, None)
        self.send_many = self.channel.stream_stream(f"/{_SERVICE}/{_METHOD}", None, None)


class _Sending(Iterator[bytes]):
    """The messages of a frame, which a thread of gRPC takes until the call ends."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._ended = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> bytes:
        self._thread = threading.current_thread()
        if self._ended:
            raise StopIteration
        return next(self._messages)

    def end(self) -> None:
        """Stop reading the frame; returns when nobody reads its body any more."""
        self._ended = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN.total_seconds())


class _Answers(Iterator[Incoming]):
    """The answers to one call. Closing or dropping it cancels the call."""

    def __init__(
        self,
        what: str,
        call: grpc.CallIterator[bytes],
        sending: _Sending | None,
        limits: Limits,
        on_stranger: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._process = os.getpid()
        self._call = call
        self._sending = sending
        # Nothing below refers to this object, so that it is freed as soon as it is dropped.
        self._receiver = Receiver(_Responses(what, call, on_stranger, on_lost).next, limits)

    def __next__(self) -> ReceivedFrame:
        try:
            frame = self._receiver.next()
        except BaseException:
            self.close()
            raise
        if frame is None:
            self.close()
            raise StopIteration
        return frame

    def close(self) -> None:
        """Cancel the call if it has not ended; the body of its frame is not read after that."""
        self._call.cancel()  # type: ignore[no-untyped-call]
        if self._sending is not None:
            self._sending.end()

    def __del__(self) -> None:
        # A forked child must not touch its copy: gRPC's locks may be held by threads that it does not have.
        if os.getpid() == self._process:
            self._call.cancel()  # type: ignore[no-untyped-call]


class _Responses:
    """The messages of one call as its client receives them."""

    def __init__(
        self,
        what: str,
        call: grpc.CallIterator[bytes],
        on_stranger: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._what = what
        self._call = call
        self._on_stranger, self._on_lost = on_stranger, on_lost
        self._messages = iter(call)

    def next(self) -> bytes | None:
        try:
            return next(self._messages, None)
        except grpc.RpcError as error:
            # The error is the call itself: chained, or with a traceback, it would be part of a cycle.
            error.__traceback__ = None
        raise self._lost()

    def _lost(self) -> TransportError:
        code, details = self._call.code(), self._call.details() or ""
        message = f"{self._what}: {details} ({code.name})"
        if code is grpc.StatusCode.UNIMPLEMENTED or "http2 header with status" in details:
            # No server of ours says so: while a Service has no pod behind it, a proxy on the way may answer.
            self._on_stranger()
            return ConnectionLost(f"something else than a server of this job answers: {message}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            self._on_lost()
            return ConnectionLost(message)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL):
            return Malformed(message)
        return TransportError(message)
