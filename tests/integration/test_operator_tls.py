"""What the operator issues, read as a pod mounts it, is what the processes of a job take from each other."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic_operator.plan import Options
from elastic_ps.contract import env
from elastic_ps.errors import ConnectionLost
from elastic_ps.transport import tcp
from elastic_ps.transport.base import Connection, Frame, Incoming, Server, unary
from elastic_ps.transport.credentials import Credentials, of_process
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from tests.testing.api_server import JOBS, ApiServer
from tests.testing.transports import LONG
from tests.unit.operator.test_cluster import Operator

PLACE = ("system", "authority")
DAY = timedelta(days=1)
SERVERS: dict[str, Any] = {"tcp": tcp.TcpServer, "grpc": GrpcServer}


def mounted(server: ApiServer, pod: str, directory: Path) -> Credentials:
    """The credentials of the process in a pod, as the kubelet would bring its Secret to it."""
    spec = server.get("pods", pod)["spec"]
    (secret,) = (volume["secret"] for volume in spec["volumes"] if "secret" in volume)
    directory.mkdir(exist_ok=True)
    data = server.get("secrets", secret["secretName"])["stringData"]
    for item in secret["items"]:
        (directory / item["path"]).write_text(data[item["key"]])
    told = env.read({item["name"]: item.get("value", "") for item in spec["containers"][0]["env"]})
    found = of_process(replace(told, tls=directory))
    assert found is not None
    return found


def issuer() -> dict[str, Any]:
    """The Secret of a platform's intermediate authority, with its root."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("root", "between")]
    made = []
    for name, key in zip(names, keys, strict=True):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(names[0])
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - DAY).not_valid_after(now + 30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    own = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {"ca.crt": made[0], "tls.crt": made[1], "tls.key": own}
    data = {name: base64.b64encode(text).decode() for name, text in files.items()}
    return {"kind": "Secret", "metadata": {"name": PLACE[1], "namespace": PLACE[0]}, "data": data}


def who(method: str, incoming: Incoming) -> Iterator[Frame]:
    yield Frame(str(incoming.peer).encode())


def ask(address: str, kind: str, credentials: Credentials | None) -> str:
    make = tcp.connect if kind == "tcp" else GrpcConnection
    connection: Connection = make(address, credentials=credentials)
    with contextlib.closing(connection):
        return unary(connection, "ask", b"", timeout=LONG).decode()


@pytest.mark.parametrize("kind", ["tcp", "grpc"])
@pytest.mark.parametrize("signs", ["seed", "issuer"])
def test_the_processes_of_a_job_know_each_other(kind: str, signs: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(contextlib.closing(ApiServer()))
        if signs == "issuer":
            api.put("secrets", issuer())
        for name in ("digits", "other"):
            api.add_job(name, worker={"replicas": 2})
        settings: dict[str, Any] = {"tls_secret": PLACE, "options": Options(secured=True)}
        operator = Operator(api, tmp_path, **settings)
        operator.controller.list_all()
        for name in ("digits", "other"):
            snapshot, _ = operator.controller.look(("default", name))
            assert snapshot is not None
            operator.controller.run_pass(("default", name), snapshot, None)
        credentials = mounted(api, "digits-ps-0", tmp_path / "server")
        serve = SERVERS[kind]
        server: Server = stack.enter_context(
            contextlib.closing(serve("127.0.0.1:0", credentials=credentials))
        )
        server.serve(who)
        worker = mounted(api, "digits-worker-1", tmp_path / "worker")
        assert ask(server.address, kind, worker) == "worker 1"
        with pytest.raises(ConnectionLost):
            ask(server.address, kind, mounted(api, "other-worker-1", tmp_path / "other"))
        # Another operator renews them, and one of the two has its new files earlier.
        api.get(JOBS, "digits")["status"]["certificates"]["expires"] = "2026-01-01T00:00:00Z"
        Operator(api, tmp_path, **settings).turns(1)
        before = worker.current().certificate
        renewed = mounted(api, "digits-worker-1", tmp_path / "renewed")
        assert renewed.current().certificate != before
        assert ask(server.address, kind, renewed) == "worker 1"
