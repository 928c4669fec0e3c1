"""What the processes of one worker say to each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from elastic_ps.errors import ConnectionLost, ElasticPSError, UsageError
from elastic_ps.worker.wire.local_world import Links, LocalWorld
from tests.testing.polling import LIMIT


def test_the_others_learn_that_process_0_has_failed() -> None:
    """Whatever it was, nobody waits for an answer."""
    pairs = Pipe(), Pipe()
    first, second = (LocalWorld(rank, [Links(*(pair[rank] for pair in pairs))], size=2) for rank in range(2))
    raised: list[Exception] = []

    def ask() -> None:
        try:
            second.decide("optimizer.step()", lambda: None)
        except ElasticPSError as error:
            raised.append(error)

    def fail() -> Any:
        raise ZeroDivisionError

    other = threading.Thread(target=ask, daemon=True)
    other.start()
    with pytest.raises(ZeroDivisionError):
        first.decide("optimizer.step()", fail)
    other.join(LIMIT)
    first.close()
    second.close()
    assert "process 0 of this worker has failed at optimizer.step()" in str(raised[0])


@pytest.fixture
def worlds() -> Iterator[list[LocalWorld]]:
    """Of the two processes of a worker, which wait for no end."""
    pairs = Pipe(), Pipe()
    links = [[Links(*(pair[rank] for pair in pairs))] for rank in range(2)]
    worlds = [LocalWorld(rank, links[rank], size=2, ending=timedelta(0)) for rank in range(2)]
    yield worlds
    for world in worlds:
        world.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_ends_while_memory_is_shared_out_is_named(worlds: list[LocalWorld], rank: int) -> None:
    worlds[1 - rank].close()
    with pytest.raises(
        UsageError, match=rf"process {1 - rank} of this worker has ended.* session\.optimizer"
    ):
        worlds[rank].allocate([64])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_has_left_blames_no_other_one(worlds: list[LocalWorld], rank: int) -> None:
    """Its session may be closed by a thread while another one is at a question."""
    worlds[rank].close()
    with pytest.raises(ConnectionLost, match="this process has left the job"):
        worlds[rank].decide("the end of its loop", lambda: None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_leaves_between_two_reads_of_an_answer_blames_no_other_one(
    worlds: list[LocalWorld], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is read in two pieces: another thread closes the session before the second one."""
    read, pieces = Connection._recv, list[int]()  # type: ignore[attr-defined]  # noqa: SLF001 (no other way)

    def one_piece(connection: Any, size: int, *given: Any) -> Any:
        pieces.append(size)
        if len(pieces) == 2:
            worlds[rank].close()
        return read(connection, size, *given)

    monkeypatch.setattr(Connection, "_recv", one_piece)
    worlds[1 - rank].links[0].questions.send("an answer")
    with pytest.raises(ConnectionLost, match="this process has left the job"):
        worlds[rank].decide("the end of its loop", lambda: None)


def test_a_process_knows_what_it_was_asked_before_the_others_do() -> None:
    """SIGTERM comes within a step, and the parameter server is gone: no question is asked any more."""
    world = LocalWorld(0, [], size=2)
    world.propose("drain", "asked to leave")
    assert world.proposed("drain")
    assert not world.agreed("drain")
    assert not world.proposed("stop")
