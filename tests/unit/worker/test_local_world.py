"""What the processes of one worker say to each other."""

from __future__ import annotations

import threading
from datetime import timedelta
from multiprocessing import Pipe
from typing import Any

import pytest

from elastic_ps.errors import ElasticPSError, UsageError
from elastic_ps.worker.local_world import Links, LocalWorld
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_ends_while_memory_is_shared_out_is_named(rank: int) -> None:
    pairs = Pipe(), Pipe()
    links = [[Links(*(pair[r] for pair in pairs))] for r in range(2)]
    worlds = [LocalWorld(r, links[r], size=2, ending=timedelta(0)) for r in range(2)]
    worlds[1 - rank].close()
    with pytest.raises(
        UsageError, match=rf"process {1 - rank} of this worker has ended.* session\.optimizer"
    ):
        worlds[rank].allocate([64])
    worlds[rank].close()


def test_a_process_knows_what_it_was_asked_before_the_others_do() -> None:
    """SIGTERM comes within a step, and the parameter server is gone: no question is asked any more."""
    world = LocalWorld(0, [], size=2)
    world.propose("drain", "asked to leave")
    assert world.proposed("drain")
    assert not world.agreed("drain")
    assert not world.proposed("stop")
