"""What the ranks of an `mpirun` know of each other's hosts."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from elastic_ps.errors import UserError
from elastic_ps.local.mpi import World

PLACES = {socket.AF_INET: ("127.0.0.2", 9), socket.AF_INET6: ("::1", 9, 0, 0)}


@pytest.mark.parametrize(
    ("families", "address"),
    [
        ([socket.AF_INET6], "[::1]"),
        ([socket.AF_INET], "127.0.0.1"),
        ([socket.AF_INET6, socket.AF_INET], "127.0.0.1"),
        ([], None),
    ],
)
def test_other_ranks_reach_this_host_by_its_ipv4_or_ipv6_address(
    monkeypatch: pytest.MonkeyPatch, families: list[socket.AddressFamily], address: str | None
) -> None:
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("there.invalid", 9)
        if not families:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, socket.SOCK_DGRAM, 0, "", PLACES[family]) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    world = object.__new__(World)
    world.rank, world.hosts = 0, ["here.invalid", "there.invalid"]
    if address is not None:
        assert world.address == address
        return
    with pytest.raises(UserError, match=r"rank 0 finds no address of the host there\.invalid .*not known"):
        _ = world.address
