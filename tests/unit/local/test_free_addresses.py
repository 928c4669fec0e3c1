"""The ports that a job on this machine gets."""

from __future__ import annotations

import contextlib
import socket

import pytest

from elastic_ps.errors import CannotListen
from elastic_ps.local.processes import PORTS, free_addresses, free_ports


def test_they_differ_and_are_not_those_of_outgoing_connections() -> None:
    addresses = free_addresses(20)
    assert len(set(addresses)) == 20
    assert {int(address.removeprefix("127.0.0.1:")) in PORTS for address in addresses} == {True}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as outgoing,
    ):
        assert outgoing.getsockname()[1] not in PORTS


def test_what_somebody_listens_on_is_left_out() -> None:
    address, other = free_addresses(2)
    taken = int(address.removeprefix("127.0.0.1:"))
    only = range(taken, taken + 1)
    message = f"needs 1 free ports from {taken} to {taken}.* 0 are free"
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(CannotListen, match=message):
        free_addresses(1, only)
    assert free_addresses(1, only) == [address]
    assert other != address


def test_another_launcher_gets_none_of_them_before_the_first_one_is_over() -> None:
    """Its parameter servers may not listen yet."""
    with contextlib.ExitStack() as held:
        (port,) = free_ports(1, held=held)
        with pytest.raises(CannotListen):
            free_ports(1, range(port, port + 1))
    assert free_ports(1, range(port, port + 1)) == [port]
