"""When a checkpoint is due, and what becomes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import Fenced, NoCheckpoint, StorageUnavailable
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
    ("version", "now", "due"),
    [
        (99, 29.9, False),
        (99, 30.0, True),  # by time
        (100, 0.1, True),  # by versions
    ],
)
def test_due(keeper: Keeper, version: int, now: float, due: bool) -> None:
    assert keeper.due(version, now) is due


def test_versions_count_from_the_last_checkpoint(keeper: Keeper) -> None:
    keeper.begin(150, 10.0, dict(STATE), number=keeper.number())
    assert not keeper.due(1000, 1000.0), "one at a time"
    keeper._pending = None
    assert not keeper.due(249, 11.0)
    assert keeper.due(250, 11.0)


def test_a_roll_back_is_not_taken_for_a_rival(store: Store, keeper: Keeper) -> None:
    """A checkpoint that was being finished in the term before is given up; the process is not fenced."""
    for version in (1, 2):
        keeper.begin(version, 0.0, dict(STATE), number=version)
        file = store.write_shard(keeper.term, version, 0, 1, iter(()), number=version)
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
    assert keeper.leads()


def test_whoever_was_replaced_cannot_begin_a_term_and_stops(store: Store, keeper: Keeper) -> None:
    """An old leader that meets a restarted shard would take the job from the rightful one."""
    assert store.next_term() == 2  # the one that has taken over
    with pytest.raises(Fenced):
        keeper.begin_term()
    assert (keeper.fenced, store.term()) == (True, 2)


def test_a_part_that_was_ordered_before_a_roll_back_is_none_of_the_checkpoint_after_it(
    store: Store, keeper: Keeper
) -> None:
    """The same version is made twice, of other records."""
    old = Written(
        keeper.term, 1, 10, store.write_shard(keeper.term, 10, 0, 1, iter(()), number=1), "", timedelta(0)
    )
    keeper.begin(10, 0.0, dict(STATE), number=1)
    keeper.begin_term()
    keeper.begin(10, 0.0, dict(STATE), number=2)
    keeper.part(0, old)
    new = store.write_shard(keeper.term, 10, 0, 1, iter(()), number=2)
    assert keeper.writing
    keeper.part(0, Written(keeper.term, 2, 10, new, "", timedelta(0)))
    eventually(lambda: keeper.durable_version == 10, "version 10 is on disk")
    assert store.manifest(10).term == keeper.term


def test_an_old_checkpoint_is_a_problem_whatever_the_reason(store: Store, keeper: Keeper) -> None:
    """For whatever reason none comes, it must not go unseen."""
    keeper.begin(1, 0.0, dict(STATE), number=1)
    file = store.write_shard(keeper.term, 1, 0, 1, iter(()), number=1)
    keeper.part(0, Written(keeper.term, 1, 1, file, "", timedelta(0)))
    eventually(lambda: keeper.durable_version == 1, "version 1 is on disk")
    now = time.monotonic()
    assert not keeper.problem(version=2, now=now + 149), "three intervals and a minute are granted"
    assert "of version 1, is 1" in keeper.problem(version=2, now=now + 151)
    assert not keeper.problem(version=1, now=now + 10_000), "there is nothing newer to write"


def test_a_checkpoint_whose_parts_do_not_come_is_given_up_and_another_one_begun(keeper: Keeper) -> None:
    keeper.begin(1, 0.0, dict(STATE), number=1)
    keeper.give_up_late(599.0)
    assert keeper.writing
    keeper.give_up_late(601.0)
    assert not keeper.writing
    assert "version 1 was given up: shards [0]" in keeper.failure
    assert keeper.due(2, 601.0)


def test_checkpoints_that_have_gone_are_waited_for(store: Store, keeper: Keeper) -> None:
    """A volume that is away for a moment must not make the job begin anew."""
    with pytest.raises(NoCheckpoint):
        keeper.newest()
    keeper.begin(1, 0.0, dict(STATE), number=1)
    file = store.write_shard(keeper.term, 1, 0, 1, iter(()), number=1)
    keeper.part(0, Written(keeper.term, 1, 1, file, "", timedelta(0)))
    eventually(lambda: keeper.durable_version == 1, "version 1 is on disk")
    aside = store.path(1).rename(store.directory.parent / "aside")
    with pytest.raises(StorageUnavailable, match="the checkpoint of version 1 has disappeared"):
        keeper.newest()
    aside.rename(store.path(1))
    assert keeper.newest().version == 1
