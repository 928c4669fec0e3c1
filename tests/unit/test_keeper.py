"""When a checkpoint is due."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.checkpoint.store import Store
from elastic_ps.server.keeper import Keeper

STATE = {"tensors": [], "optimizer": "SGD"}


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    store = Store(tmp_path)
    made = Keeper(
        store,
        job="job",
        epoch=store.next_epoch(),
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
    keeper.begin(150, 10.0, dict(STATE))
    assert not keeper.due(1000, 1000.0, wanted=True), "one at a time"
    keeper._pending = None
    assert not keeper.due(249, 11.0)
    assert keeper.due(250, 11.0)


def test_a_disk_that_fails_is_not_tried_for_a_standby_again_and_again(keeper: Keeper) -> None:
    keeper.problem = "No space left on device"
    assert not keeper.due(1, 0.1, wanted=True)
    assert keeper.due(1, 30.0, wanted=True)
