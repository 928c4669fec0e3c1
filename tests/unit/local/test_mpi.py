"""What the ranks of an `mpirun` know of each other's hosts, and what rank 0 does about a silent one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.errors import UserError
from elastic_ps.local import mpi
from elastic_ps.local.mpi import Slots, World

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


class Silent(World):
    """Two ranks that answer nothing."""

    def __init__(self) -> None:
        self.size, self.hosts = 3, ["here.invalid"] * 3
        self.orders: list[tuple[int, Any]] = []

    def post(self, message: object, rank: int) -> Callable[[], bool]:
        self.orders.append((rank, message))
        return lambda: True

    def receive(self) -> None:
        return None


def test_a_rank_that_starts_nothing_in_time_kills_it_later_and_another_one_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpi, "ANSWER", timedelta(0))  # nobody waits for half a minute
    world = Silent()
    slots = Slots(world)
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match=f"rank {rank} has not started worker 0 within"):
            slots.start(0, ["python"], variables={}, log=Path("log"))
    assert [rank for rank, _ in world.orders] == [1, 1, 2, 2]
    start, kill = (order for _, order in world.orders[:2])
    assert kill.kill
    assert kill.number == start.number
