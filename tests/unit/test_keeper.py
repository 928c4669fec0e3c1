"""When a checkpoint is due, and what becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.checkpoint.store import Store
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.orders import Written
from tests.polling import eventually

STATE = {"tensors": [], "optimizer": "SGD"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def keeper(store: Store) -> Iterator[Keeper]:
    made = Keeper(
        store,
        job="job",
        term=store.next_term(),
        shards=1,
        interval=timedelta(seconds=30),
        every=100,
        keep=2,
        now=0.0,
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("version", "now", "wanted", "due"),
    [
        (99, 29.9, False, False),
        (99, 30.0, False, True),  # by time
        (100, 0.1, False, True),  # by versions
        (1, 0.1, True, True),  # because somebody needs one
    ],
)
def test_due(keeper: Keeper, version: int, now: float, wanted: bool, due: bool) -> None:
    assert keeper.due(version, now, wanted=wanted) is due


def test_versions_count_from_the_last_checkpoint(keeper: Keeper) -> None:
    keeper.begin(150, 10.0, dict(STATE), number=keeper.number())
    assert not keeper.due(1000, 1000.0, wanted=True), "one at a time"
    keeper._pending = None
    assert not keeper.due(249, 11.0)
    assert keeper.due(250, 11.0)


def test_a_disk_that_fails_is_not_tried_for_a_standby_again_and_again(keeper: Keeper) -> None:
    keeper._problem = "No space left on device"
    assert not keeper.due(1, 0.1, wanted=True)
    assert keeper.due(1, 30.0, wanted=True)


def test_a_roll_back_is_not_taken_for_a_rival(store: Store, keeper: Keeper) -> None:
    """A checkpoint that was being finished in the term before is given up; the process is not fenced."""
    for version in (1, 2):
        keeper.begin(version, 0.0, dict(STATE), number=version)
        file = store.write_shard(keeper.term, version, 0, 1, iter(()))
        written = Written(keeper.term, version, version, file, "", timedelta(0))
        if version == 1:
            keeper.part(0, written)
            eventually(lambda: keeper.durable_version == 1, "version 1 is on disk")
    with store._locked():  # version 2 waits here to be finished
        keeper.part(0, written)
        rolled = threading.Thread(target=keeper.begin_term)
        rolled.start()
    rolled.join()
    assert keeper.term == 2
    assert not keeper.check_fence()
