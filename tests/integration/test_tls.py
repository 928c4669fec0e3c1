"""Who is not let in at the ports of a parameter server that has certificates, and how they are replaced."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from elastic_ps.contract.certificates import KeyPair, issue, uris_of
from elastic_ps.contract.identity import Identity
from elastic_ps.errors import ConnectionLost, TransportError, UsageError
from elastic_ps.transport import shares, tcp, ways
from elastic_ps.transport.base import Connection, Frame, Incoming, Limits, Server, unary
from elastic_ps.transport.credentials import Credentials, Loaded
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.transport.sealed import Sealed
from elastic_ps.transport.stream import StreamConnection
from elastic_ps.transport.tcp import TcpServer
from tests.testing import machine
from tests.testing.certificates import HOUR, JOB, authority, write
from tests.testing.polling import eventually
from tests.testing.transports import LONG, read

SOON = timedelta(seconds=8)


def who(method: str, incoming: Incoming) -> Iterator[Frame]:
    """Answer with what the connection says of the caller."""
    read(incoming)
    yield Frame(str(incoming.peer).encode())


class Port:
    """A server with certificates, by one of the two ways between hosts."""

    def __init__(
        self, kind: str, directory: Path, stack: contextlib.ExitStack, limits: Limits | None = None
    ) -> None:
        self.kind, self.directory, self.stack = kind, directory, stack
        self.ca = authority()
        self.credentials = Credentials(write(directory / "server", self.ca, "server"))
        self.server: Server = (TcpServer if kind == "tcp" else GrpcServer)(
            "127.0.0.1:0", credentials=self.credentials, limits=limits
        )
        stack.callback(self.server.close)
        self.server.serve(who)

    def connect(self, credentials: Credentials | None) -> Connection:
        connect: Callable[..., Connection] = tcp.connect if self.kind == "tcp" else GrpcConnection
        connection = connect(self.server.address, credentials=credentials)
        self.stack.callback(connection.close)
        return connection

    def ask(self, credentials: Credentials | None) -> str:
        connection = self.connect(credentials)
        with contextlib.closing(connection):
            return unary(connection, "ask", b"", timeout=SOON).decode()

    def worker(self, name: str = "worker", index: int = 3, ca: KeyPair | None = None) -> Credentials:
        return Credentials(write(self.directory / name, ca or self.ca, "worker", index))


@pytest.fixture(params=["tcp", "grpc"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    with contextlib.ExitStack() as stack:
        yield Port(request.param, tmp_path, stack)


def test_a_server_knows_who_calls(port: Port) -> None:
    assert port.ask(port.worker(index=3)) == "worker 3"
    assert port.ask(port.worker("other", index=12)) == "worker 12"
    assert port.ask(port.credentials) == "server 0"


def forged(ca: KeyPair, directory: Path) -> None:
    """A server's certificate in `directory`, whose URI has become a DNS name, as an issuer may sign it."""
    made = issue(ca, Identity(JOB, "server"), now=datetime.now(UTC), lifetime=HOUR)
    found = x509.load_pem_x509_certificate(made.certificate)
    builder = x509.CertificateBuilder(
        found.issuer,
        found.subject,
        found.public_key(),
        found.serial_number,
        found.not_valid_before_utc,
        found.not_valid_after_utc,
    )
    for each in found.extensions:
        value = each.value
        if isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName([x509.DNSName(name.value) for name in value])
        builder = builder.add_extension(value, critical=each.critical)
    key: Any = serialization.load_pem_private_key(ca.key, None)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert uris_of(certificate) == []
    (directory / "tls.crt").write_bytes(certificate)
    (directory / "tls.key").write_bytes(made.key)


class Shown(Credentials):
    """Shows the files as they are. Others refuse to show what names no identity."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def current(self) -> Loaded:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(self.directory / "ca.crt")
        chain, key = self.directory / "tls.crt", self.directory / "tls.key"
        client.load_cert_chain(chain, key)
        shown = replace(super().current(), client=client)
        return replace(shown, certificate=chain.read_bytes(), key=key.read_bytes())


def test_a_name_of_another_type_is_no_identity(port: Port) -> None:
    """Who may ask an issuer for any DNS name gets no identity for it."""
    directory = write(port.directory / "worker", port.ca, "worker")
    worker = Shown(directory)
    assert port.ask(worker) == "worker 0"
    forged(port.ca, directory)
    with pytest.raises(TransportError):
        port.ask(worker)


def test_who_has_no_certificate_of_the_job_is_not_answered(port: Port) -> None:
    other = authority()
    strangers = {
        "no certificate": None,
        "another authority": port.worker("other", ca=other),
        "another authority, but it trusts ours": Credentials(
            write(port.directory / "trusting", other, "worker", trusts=[port.ca])
        ),
        "another job of the same authority": Credentials(
            write(port.directory / "job", port.ca, "worker", job="job-2")
        ),
        "it has ended": Credentials(write(port.directory / "old", port.ca, "worker", lifetime=-HOUR / 2)),
    }
    for name, credentials in strangers.items():
        with pytest.raises(TransportError):
            pytest.fail(f"{name} was answered: {port.ask(credentials)}")
    assert port.ask(port.worker()) == "worker 3"


def test_a_stranger_who_calls_himself_a_process_of_the_job_is_not_answered(port: Port) -> None:
    """It looks for the server's name, so only the server can find out that it is of another job."""

    class Calling(Credentials):
        @property
        def server_name(self) -> str:
            return port.credentials.server_name

    with pytest.raises(TransportError):
        port.ask(Calling(write(port.directory / "job", port.ca, "worker", job="job-2")))
    assert port.ask(Calling(write(port.directory / "worker", port.ca, "worker", 3))) == "worker 3"


@pytest.mark.parametrize("kind", ["tcp", "grpc"])
def test_no_worker_passes_for_a_server(kind: str, tmp_path: Path) -> None:
    ca = authority()
    worker = Credentials(write(tmp_path / "worker", ca, "worker"))
    with pytest.raises(UsageError, match="belongs to worker 0, but this process is a server"):
        ways.listen(f"{kind}:127.0.0.1:0", credentials=worker)


def test_a_client_talks_to_no_worker_and_to_no_other_job(tmp_path: Path) -> None:
    """The listener does all that a worker who has taken a server's address could do."""
    ca = authority()
    me = Credentials(write(tmp_path / "me", ca, "worker"))
    other_job = write(tmp_path / "other", ca, "server", job="job-2")
    for directory in (write(tmp_path / "thief", ca, "worker", 1), other_job):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            got: list[bytes] = []

            def serve(context: ssl.SSLContext = context, got: list[bytes] = got) -> None:
                for _ in range(2):
                    raw, _ = listener.accept()
                    raw.settimeout(10)
                    with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as sock:
                        sock.sendall(b"elastic-ps/2 00000\n")
                        got.append(sock.recv(100))

            thread = threading.Thread(target=serve)
            thread.start()
            for connection in (
                tcp.connect(address, credentials=me),
                GrpcConnection(address, credentials=me),
            ):
                stack.callback(connection.close)
                with pytest.raises(ConnectionLost):
                    unary(connection, "Push", b"secret", timeout=SOON)
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
        assert not any(got), "nothing was told"


def test_a_certificate_that_is_replaced_is_used_for_the_next_connection(port: Port) -> None:
    """All the while one connection stays, and nobody notices."""
    worker = port.worker(index=3)
    stays = port.connect(worker)
    assert unary(stays, "ask", b"", timeout=LONG) == b"worker 3"
    write(port.directory / "worker", port.ca, "worker", 3, lifetime=-timedelta(minutes=1))
    with pytest.raises(TransportError):
        port.ask(worker)
    write(port.directory / "worker", port.ca, "worker", 3)
    assert port.ask(worker) == "worker 3"
    write(port.directory / "server", port.ca, "server")
    assert port.ask(worker) == "worker 3"
    assert unary(stays, "ask", b"", timeout=LONG) == b"worker 3"


def test_an_authority_is_replaced_without_a_break(port: Port) -> None:
    worker, new = port.worker(), authority()
    server, both = port.directory / "server", [port.ca, new]
    steps: list[Callable[[], Path]] = [
        lambda: write(server, port.ca, "server", trusts=both),
        lambda: write(port.directory / "worker", port.ca, "worker", 3, trusts=both),
        lambda: write(server, new, "server", trusts=both),
        lambda: write(port.directory / "worker", new, "worker", 3, trusts=both),
        lambda: write(server, new, "server"),
        lambda: write(port.directory / "worker", new, "worker", 3),
    ]
    old = port.worker("old")
    for step in steps:
        assert port.ask(worker) == "worker 3"
        step()
    assert port.ask(worker) == "worker 3"
    with pytest.raises(TransportError):
        port.ask(old)


def test_a_channel_takes_the_new_certificate_when_the_old_one_has_ended(port: Port) -> None:
    directory = write(port.directory / "worker", port.ca, "worker", lifetime=-HOUR / 2)
    connection = port.connect(Credentials(directory))
    with pytest.raises(TransportError):
        unary(connection, "ask", b"", timeout=SOON)
    write(directory, port.ca, "worker")

    def answered() -> bool:
        with contextlib.suppress(TransportError):
            return unary(connection, "ask", b"", timeout=SOON) == b"worker 0"
        return False

    eventually(answered, "the new certificate is used")


def test_files_that_do_not_fit_together_leave_the_old_ones_in_use(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    worker = port.worker()
    caplog.set_level(logging.WARNING)
    (port.directory / "worker" / "tls.key").unlink()
    for _ in range(3):
        assert port.ask(worker) == "worker 3"
    port.worker("other", index=7)
    (port.directory / "worker" / "tls.key").write_bytes((port.directory / "other" / "tls.key").read_bytes())
    for _ in range(3):
        assert port.ask(worker) == "worker 3"
    said = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(said) == 2, "once for each"
    assert "do not fit together" in said[1]


def test_the_certificate_of_another_process_leaves_the_old_one_in_use(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with that of a worker would take no connection any more."""
    caplog.set_level(logging.WARNING)
    worker = port.worker()
    write(port.directory / "server", port.ca, "worker", 1)
    write(port.directory / "worker", port.ca, "worker", 4)
    for _ in range(2):
        assert port.ask(worker) == "worker 3"
    write(port.directory / "server", port.ca, "server")
    assert port.ask(worker) == "worker 3"
    said = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(said) == 2, "once for each"
    assert all("belongs to another process" in text for text in said)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tls\.crt: No such file"):
        Credentials(tmp_path)
    write(tmp_path / "a", authority(), "worker")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        path = tmp_path / "a" / name
        content = path.read_bytes()
        path.write_bytes(b"nonsense")
        with pytest.raises(UsageError, match="cannot use the certificates in"):
            Credentials(tmp_path / "a")
        path.write_bytes(content)
    Credentials(tmp_path / "a")


def test_strangers_bytes_and_half_handshakes_leave_nothing_behind(port: Port) -> None:
    worker = port.worker()
    assert port.ask(worker) == "worker 3"
    me, generator = psutil.Process(), random.Random(1)
    hello = client_hello()
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", b"elastic-ps/2\n", generator.randbytes(500), hello, hello[:60]]
    host, number = tcp.split(port.server.address)

    def storm() -> None:
        sockets = []
        for index in range(120):
            sock = socket.create_connection((host, number), timeout=5)
            with contextlib.suppress(OSError):
                sock.sendall(said[index % len(said)])
            sockets.append(sock)
        assert port.ask(worker) == "worker 3", "while they are there"
        for sock in sockets[::2]:
            sock.close()
        if port.kind == "tcp":  # gRPC is more patient with those who say nothing: 20 s
            silent = sockets[1]
            silent.settimeout(30)
            with contextlib.suppress(ConnectionError):
                while silent.recv(4096):
                    pass
        for sock in sockets:
            sock.close()

    storm()
    threads, memory, descriptors = me.num_threads(), me.memory_info().rss, me.num_fds()
    for _ in range(3):
        storm()
    eventually(lambda: me.num_threads() <= threads + 2, "the threads come back")
    eventually(lambda: me.num_fds() <= descriptors + 10, "the sockets go")
    assert me.memory_info().rss < memory + 32 * 1024 * 1024
    assert port.ask(worker) == "worker 3"


def test_half_handshakes_from_many_addresses_leave_sockets_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address holds its share, and all of them together hold everything."""
    machine.lacks_descriptors(monkeypatch, 8 * shares.PART)
    with contextlib.ExitStack() as stack:
        port = Port("tcp", tmp_path, stack, Limits(share=2, handshake=timedelta(hours=1)))
        worker, place = port.worker(), tcp.split(port.server.address)
        for index in range(8):
            source = (f"127.0.0.{10 + index // 2}", 0)
            half = stack.enter_context(socket.create_connection(place, 10, source_address=source))
            half.sendall(client_hello()[:60])

        def answered() -> bool:
            with contextlib.suppress(TransportError):
                return port.ask(worker) == "worker 3"
            return False

        eventually(answered, "a worker of the job is answered")


def client_hello() -> bytes:
    """The first bytes of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    talks = context.wrap_bio(incoming, outgoing, server_hostname="server.job-1.elastic-ps")
    with contextlib.suppress(ssl.SSLWantReadError):
        talks.do_handshake()
    return outgoing.read()


def test_an_older_tls_is_refused(port: Port) -> None:
    worker = port.worker()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    directory = port.directory / "worker"
    context.load_verify_locations(directory / "ca.crt")
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    if port.kind == "tcp":
        with socket.create_connection(tcp.split(port.server.address), timeout=10) as raw:
            with pytest.raises(OSError), context.wrap_socket(raw, server_hostname=worker.server_name) as sock:
                sock.recv(1)
            return
    # gRPC's client cannot be told to talk an older one.
    shown = {"x509_pem_cert": [worker.current().certificate], "ssl_tls_version": [b"TLSv1.2"]}
    said: list[str] = []

    def abort(code: object, text: str) -> None:
        said.append(text)
        raise ConnectionAbortedError

    context_of_call: Any = SimpleNamespace(auth_context=lambda: shown, abort=abort)
    assert isinstance(port.server, GrpcServer)
    with pytest.raises(ConnectionAbortedError):
        port.server._identify(context_of_call)  # noqa: SLF001
    assert said == ["TLS 1.3 is expected"]
    shown["ssl_tls_version"] = [b"TLSv1.3"]
    assert port.server._identify(context_of_call) == worker.identity  # noqa: SLF001


def test_a_connection_gets_new_keys_in_time(tmp_path: Path) -> None:
    """After 1.5 MB, as 256 GiB take too long."""
    dialled: list[Sealed] = []

    def dial() -> Sealed:
        sealed = tcp.dial(address, speaks=LONG, credentials=worker)
        assert isinstance(sealed, Sealed)
        sealed.most_bytes = 1_500_000
        dialled.append(sealed)
        return sealed

    with contextlib.ExitStack() as stack:
        port = Port("tcp", tmp_path, stack)
        address, worker = port.server.address, port.worker()
        connection = stack.enter_context(contextlib.closing(StreamConnection(dial, address)))
        for _ in range(10):
            list(connection.call("ask", Frame(b"", memoryview(bytes(1_000_000))), timeout=LONG))
    assert len(dialled) == 5


def test_a_certificate_that_has_ended_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ca = authority()
    old = Credentials(write(tmp_path / "worker", ca, "worker", lifetime=-HOUR / 2))
    for _ in range(3):
        old.current()
    assert [record.message for record in caplog.records if "expired" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    write(tmp_path / "worker", ca, "worker")
    old.current()
    assert len(caplog.messages) == 1


def test_a_new_certificate_is_read_again_if_the_system_could_not_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority()
    worker = Credentials(write(tmp_path / "worker", ca, "worker"))
    before = worker.current().certificate
    write(tmp_path / "worker", ca, "worker")
    exhausted = iter((True, False))
    too_many = OSError(errno.EMFILE, "Too many open files")
    machine.fails(monkeypatch, Credentials, "_read", too_many, lambda: next(exhausted, False))
    assert worker.current().certificate == before
    assert worker.current().certificate != before


def test_the_loopback_port_is_closed_to_strangers_and_the_socket_open_to_the_user(tmp_path: Path) -> None:
    ca = authority()
    server = ways.listen("127.0.0.1:0", credentials=Credentials(write(tmp_path / "s", ca, "server")))
    worker = Credentials(write(tmp_path / "w", ca, "worker", 2))
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        server.serve(who)
        near = stack.enter_context(contextlib.closing(ways.connect(server.address, credentials=worker)))
        assert unary(near, "ask", b"", timeout=LONG) == b"None", "over the socket within the host"
        far = f"grpc:{server.address}"
        known = stack.enter_context(contextlib.closing(ways.connect(far, credentials=worker)))
        assert unary(known, "ask", b"", timeout=LONG) == b"worker 2"
        stranger = stack.enter_context(contextlib.closing(ways.connect(far)))
        with pytest.raises(TransportError):
            unary(stranger, "ask", b"", timeout=SOON)


def test_an_open_port_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca = Credentials(write(tmp_path / "s", authority(), "server"))
    caplog.set_level(logging.WARNING)
    for bind, credentials, times in (
        ("127.0.0.1:0", None, 0),
        ("0.0.0.0:0", ca, 0),
        ("0.0.0.0:0", None, 1),
    ):
        ways.listen(bind, credentials=credentials).close()
        assert len([record for record in caplog.records if "is unprotected" in record.message]) == times
