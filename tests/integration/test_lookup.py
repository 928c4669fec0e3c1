"""A name that DNS does not know yet, as that of a pod on its way, is no more than a refused connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from elastic_ps.errors import ConnectionLost
from elastic_ps.transport import tcp, ways
from elastic_ps.transport.base import Frame, Incoming, unary
from tests.testing import machine
from tests.testing.addresses import addresses
from tests.testing.transports import LONG

NAME = "digits-ps-0.digits-servers"


def answer(method: str, incoming: Incoming) -> Iterator[Frame]:
    yield Frame(b"here")


@pytest.mark.parametrize("scheme", ["", "tcp:", "grpc:"])
def test_a_name_that_nobody_knows_is_a_lost_connection(scheme: str) -> None:
    with (
        contextlib.closing(ways.connect(f"{scheme}digits-ps-0.invalid:2222")) as connection,
        pytest.raises(ConnectionLost),
    ):
        unary(connection, "ask", b"", timeout=LONG)


def test_a_name_is_looked_up_again_for_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so a server is found that has come back with another address."""
    known: dict[str, str] = {}
    machine.knows_names(monkeypatch, known, NAME)
    (address,) = addresses(1)
    _, port = tcp.split(address)
    with contextlib.closing(ways.connect(f"tcp:{NAME}:{port}")) as connection:
        for place in ("127.0.0.2", "127.0.0.3"):
            with pytest.raises(ConnectionLost):
                unary(connection, "ask", b"", timeout=LONG)
            server = ways.listen(f"tcp:{place}:{port}")
            server.serve(answer)
            known[NAME] = place
            try:
                assert unary(connection, "ask", b"", timeout=LONG) == b"here"
            finally:
                server.close()
