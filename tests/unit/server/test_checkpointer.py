"""When a checkpoint is due, and what becomes of it."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.tables import TableStatus
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import (
    ConnectionLost,
    Fenced,
    NoCheckpoint,
    RefusalCode,
    Refused,
    StorageUnavailable,
)
from elastic_ps.evaluation import results
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.limits import SLOWEST, ServerLimits
from elastic_ps.server.orders import Report, Written
from tests.testing import machine
from tests.testing.polling import eventually

STATE = {"tensors": [], "optimizer": "SGD"}
SHORT = timedelta(milliseconds=50)


class Volume(Store):
    """A store that `looks` at the term as a test says."""

    looks: Callable[[int], None] | None = None

    def require_term(self, term: int) -> None:
        (self.looks or super().require_term)(term)


@pytest.fixture
def store(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.fixture
def checkpoints(store: Store, limits: ServerLimits) -> Iterator[Checkpointer]:
    made = Checkpointer(
        store,
        job="job",
        term=store.next_term(),
        shards=1,
        times=Times(interval=timedelta(seconds=30), every_versions=100, keep=2),
        limits=limits,
    )
    yield made
    made.close()


def write(store: Store, checkpoints: Checkpointer, version: int) -> None:
    """Write a checkpoint of a version, which is then being finished."""
    number = checkpoints.number()
    checkpoints.begin(version, 0.0, dict(STATE), number=number)
    file = store.write_shard(checkpoints.term, version, 0, 1, iter(()), number=number)
    checkpoints.part(0, Report(Written(checkpoints.term, number, version, file, "", timedelta(0))))


def keep(store: Store, checkpoints: Checkpointer, version: int) -> None:
    """Write a checkpoint of a version, and wait until it is on disk."""
    write(store, checkpoints, version)
    eventually(lambda: checkpoints.durable_version == version, f"version {version} is on disk")


@pytest.mark.parametrize(
    ("version", "now", "due"),
    [
        (99, 29.9, False),
        (99, 30.0, True),  # by time
        (100, 0.1, True),  # by versions
    ],
)
def test_a_checkpoint_is_due_by_time_and_by_versions(
    checkpoints: Checkpointer, version: int, now: float, due: bool
) -> None:
    assert checkpoints.due(version, now) is due


def test_versions_count_from_the_last_checkpoint(store: Store, checkpoints: Checkpointer) -> None:
    number = checkpoints.number()
    checkpoints.begin(150, 10.0, dict(STATE), number=number)
    assert not checkpoints.due(1000, 1000.0), "one at a time"
    file = store.write_shard(checkpoints.term, 150, 0, 1, iter(()), number=number)
    checkpoints.part(0, Report(Written(checkpoints.term, number, 150, file, "", timedelta(0))))
    eventually(lambda: checkpoints.durable_version == 150, "version 150 is on disk")
    assert not checkpoints.due(249, 11.0)
    assert checkpoints.due(250, 11.0)


def test_versions_that_are_made_again_are_kept_again(store: Store, checkpoints: Checkpointer) -> None:
    """The checkpoint of 200 was begun, and given up because the job went back to 100."""
    keep(store, checkpoints, 100)
    checkpoints.begin(200, 1.0, dict(STATE), number=2)
    checkpoints.begin_term()
    assert checkpoints.newest().version == 100
    assert not checkpoints.due(199, 2.0)
    assert checkpoints.due(200, 2.0)


def test_a_volume_that_is_away_for_a_moment_fences_nobody(store: Store, checkpoints: Checkpointer) -> None:
    aside = store.directory.rename(store.directory.parent / "away")
    assert not checkpoints.leads()
    assert not checkpoints.fenced
    assert "training waits until it is known" in checkpoints.problem(1, 0.0)
    shutil.rmtree(store.directory, ignore_errors=True)
    aside.rename(store.directory)
    assert checkpoints.leads()


def test_a_roll_back_is_not_taken_for_a_rival(store: Store, checkpoints: Checkpointer) -> None:
    """A checkpoint that was being finished in the term before is given up; the process is not fenced."""
    for version in (1, 2):
        checkpoints.begin(version, 0.0, dict(STATE), number=version)
        file = store.write_shard(checkpoints.term, version, 0, 1, iter(()), number=version)
        written = Written(checkpoints.term, version, version, file, "", timedelta(0))
        if version == 1:
            checkpoints.part(0, Report(written))
            eventually(lambda: checkpoints.durable_version == 1, "version 1 is on disk")
    with files.locked(store.directory / "lock"):  # version 2 waits here to be finished
        checkpoints.part(0, Report(written))
        rolled = threading.Thread(target=checkpoints.begin_term)
        rolled.start()
    rolled.join()
    assert checkpoints.term == 2
    assert checkpoints.leads()


def test_whoever_was_replaced_cannot_begin_a_term_and_stops(store: Store, checkpoints: Checkpointer) -> None:
    """An old leader that meets a restarted shard would take the job from the rightful one."""
    assert store.next_term() == 2  # the one that has taken over
    with pytest.raises(Fenced):
        checkpoints.begin_term()
    assert checkpoints.fenced
    store.require_term(2)


def test_a_part_that_was_ordered_before_a_roll_back_is_none_of_the_checkpoint_after_it(
    store: Store, checkpoints: Checkpointer
) -> None:
    """The same version is made twice, of other records."""
    old = Written(
        checkpoints.term,
        1,
        10,
        store.write_shard(checkpoints.term, 10, 0, 1, iter(()), number=1),
        "",
        timedelta(0),
    )
    checkpoints.begin(10, 0.0, dict(STATE), number=1)
    checkpoints.begin_term()
    checkpoints.begin(10, 0.0, dict(STATE), number=2)
    checkpoints.part(0, Report(old))
    new = store.write_shard(checkpoints.term, 10, 0, 1, iter(()), number=2)
    assert checkpoints.writing
    checkpoints.part(0, Report(Written(checkpoints.term, 2, 10, new, "", timedelta(0))))
    eventually(lambda: checkpoints.durable_version == 10, "version 10 is on disk")
    assert store.manifest(10).term == checkpoints.term


def test_an_older_look_does_not_hide_what_a_newer_one_has_found(
    store: Volume, checkpoints: Checkpointer
) -> None:
    """Two threads look who leads; the one that began before the volume went away ends last."""
    began, go_on = threading.Event(), threading.Event()

    def slowly(term: int) -> None:
        if not began.is_set():
            began.set()
            assert go_on.wait(10)
            return
        raise StorageUnavailable("the volume is away")

    store.looks = slowly
    older = threading.Thread(target=checkpoints.leads)
    older.start()
    assert began.wait(10)
    assert not checkpoints.leads()
    go_on.set()
    older.join(10)
    assert "the volume is away" in checkpoints.problem(0, 0.0)
    store.looks = None
    assert checkpoints.leads()
    assert checkpoints.problem(0, 0.0) == ""


def test_an_old_checkpoint_is_a_problem_whatever_the_reason(store: Store, checkpoints: Checkpointer) -> None:
    """For whatever reason none comes, it must not go unseen."""
    keep(store, checkpoints, 1)
    now = time.monotonic()
    assert not checkpoints.problem(version=2, now=now), "it has just been made"
    assert not checkpoints.problem(version=2, now=now + 149), "three intervals and a minute are granted"
    assert "of version 1, is 1" in checkpoints.problem(version=2, now=now + 151)
    assert not checkpoints.problem(version=1, now=now + 10_000), "there is nothing newer to write"
    assert not checkpoints.problem(version=2, now=now + 10_001), "a step has taken long, and is being written"
    assert "of version 1, is 1" in checkpoints.problem(version=3, now=now + 10_152)


def test_a_checkpoint_whose_parts_do_not_come_is_given_up_and_another_one_begun(
    checkpoints: Checkpointer,
) -> None:
    checkpoints.begin(1, 0.0, dict(STATE), number=1)
    checkpoints.give_up_late(599.0)
    assert checkpoints.writing
    checkpoints.give_up_late(601.0)
    assert not checkpoints.writing
    assert "version 1 was given up: shards [0]" in checkpoints.failure
    assert checkpoints.due(2, 601.0)


def test_the_part_of_a_large_model_may_take_longer(two_shards: Checkpointer) -> None:
    """Else it would never be on disk: each new attempt is as late."""
    tensors = [{"dtype": "bfloat16", "shape": [60, SLOWEST]}, {"dtype": "json", "shape": [1 << 40]}]
    two_shards.begin(1, 0.0, {"tensors": tensors, "optimizer": "SGD"}, number=1)
    two_shards.give_up_late(899.0)
    assert two_shards.writing
    two_shards.give_up_late(901.0)
    assert "after 900 s" in two_shards.failure


def test_the_part_of_a_shard_with_many_rows_may_take_longer(two_shards: Checkpointer) -> None:
    """Rows of tables are beside the model: a job of nothing else had ten minutes for hundreds of GB."""
    two_shards.part(0, Report(tables=(TableStatus(name="a", size_bytes=60 * SLOWEST),)))
    two_shards.part(1, Report(tables=tuple(TableStatus(name=n, size_bytes=150 * SLOWEST) for n in "ab")))
    two_shards.begin(1, 0.0, dict(STATE), number=1)
    two_shards.give_up_late(899.0)
    assert two_shards.writing
    two_shards.give_up_late(901.0)
    assert "after 900 s" in two_shards.failure


def test_the_best_version_of_an_earlier_evaluator_is_kept(store: Store, checkpoints: Checkpointer) -> None:
    """A job that goes on without the evaluator must not delete what `elastic-ps export best` takes."""
    (store.directory / results.FILE).write_text(json.dumps({"best": 1}))
    for version in range(1, 5):
        keep(store, checkpoints, version)
    assert store.versions() == [1, 3, 4]


def test_nothing_is_deleted_while_it_is_not_known_which_version_is_the_best(
    store: Store, checkpoints: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.directory / results.FILE).write_text(json.dumps({"best": 1}))
    for version in (1, 2):
        keep(store, checkpoints, version)
    away = StorageUnavailable("Input/output error")
    unreadable = iter((True, False))
    machine.fails(monkeypatch, files, "read_text_if_any", away, lambda: next(unreadable, False))
    write(store, checkpoints, 3)
    eventually(lambda: not checkpoints.writing, "the checkpoint is given up")
    assert "Input/output error" in checkpoints.failure
    keep(store, checkpoints, 4)
    assert store.versions() == [1, 2, 4]


def test_checkpoints_that_have_gone_are_waited_for(store: Store, checkpoints: Checkpointer) -> None:
    """A volume that is away for a moment must not make the job begin anew."""
    with pytest.raises(NoCheckpoint):
        checkpoints.newest()
    keep(store, checkpoints, 1)
    aside = store.path(1).rename(store.directory.parent / "aside")
    with pytest.raises(StorageUnavailable, match="the checkpoint of version 1 has disappeared"):
        checkpoints.newest()
    aside.rename(store.path(1))
    assert checkpoints.newest().version == 1


@pytest.fixture
def two_shards(store: Store) -> Iterator[Checkpointer]:
    made = Checkpointer(
        store,
        job="job",
        term=store.next_term(),
        shards=2,
        times=Times(interval=timedelta(seconds=30), keep=2),
    )
    yield made
    made.close()


def part_of(store: Store, checkpoints: Checkpointer, version: int, shard: int, *, number: int) -> Written:
    file = store.write_shard(checkpoints.term, version, shard, 2, iter(()), number=number)
    return Written(checkpoints.term, number, version, file, "", timedelta(seconds=shard + 1))


def test_a_checkpoint_is_whole_when_each_shard_has_written_its_part(
    store: Store, two_shards: Checkpointer
) -> None:
    checkpoints = two_shards
    number = checkpoints.number()
    checkpoints.begin(5, 0.0, {**STATE, "chief": 3}, number=number)
    assert checkpoints.due(6, 1000.0) is False, "one at a time"
    first, second = (part_of(store, checkpoints, 5, shard, number=number) for shard in (0, 1))
    checkpoints.part(1, Report(second))
    checkpoints.part(1, Report(second))
    assert checkpoints.writing
    assert checkpoints.durable_version is None
    checkpoints.part(0, Report(None))
    checkpoints.part(0, Report(first))
    eventually(lambda: checkpoints.durable_version == 5, "it is whole")
    manifest = store.manifest(5)
    assert [file.file for file in manifest.files] == [
        file.file for file in (first.file, second.file) if file is not None
    ]
    assert (manifest.state, manifest.job, manifest.number) == ({"chief": 3}, "job", number)
    assert checkpoints.paused == timedelta(seconds=1.5), "the mean over the shards"
    assert not checkpoints.writing
    assert checkpoints.number() == number + 1
    durable = checkpoints.durable
    assert durable is not None
    assert abs(time.time() - durable[1]) < 60


def test_a_part_that_cannot_be_written_ends_its_checkpoint_and_is_told(two_shards: Checkpointer) -> None:
    checkpoints = two_shards
    checkpoints.begin(5, 0.0, dict(STATE), number=1)
    checkpoints.part(
        0, Report(Written(checkpoints.term, 1, 5, None, "No space left on device", timedelta(0)))
    )
    assert not checkpoints.writing
    assert checkpoints.failure == checkpoints.problem(5, 0.0) == "No space left on device"
    assert not checkpoints.due(6, 29.0)
    assert checkpoints.due(6, 30.0), "it is tried again after the interval"
    checkpoints.tune(Times(interval=timedelta(hours=1), every_versions=None, keep=2))
    checkpoints.begin(6, 100.0, dict(STATE), number=2)
    checkpoints.part(0, Report(Written(checkpoints.term, 2, 6, None, "Stale file handle", timedelta(0))))
    assert not checkpoints.due(7, 159.0)
    assert checkpoints.due(7, 160.0), "or after a minute"


def test_a_checkpoint_that_cannot_be_finished_is_told_until_one_can(
    store: Store, checkpoints: Checkpointer
) -> None:
    checkpoints.begin(1, 0.0, dict(STATE), number=1)
    missing = ShardFile("shard-0-of-1.safetensors", "0" * 64, 3)
    checkpoints.part(0, Report(Written(checkpoints.term, 1, 1, missing, "", timedelta(0))))
    eventually(lambda: not checkpoints.writing, "it is given up")
    assert checkpoints.durable_version is None
    assert checkpoints.failure
    checkpoints.begin(2, 0.0, dict(STATE), number=2)
    file = store.write_shard(checkpoints.term, 2, 0, 1, iter(()), number=2)
    checkpoints.part(0, Report(Written(checkpoints.term, 2, 2, file, "", timedelta(0))))
    eventually(lambda: checkpoints.durable_version == 2, "the next one is whole")
    eventually(lambda: not checkpoints.failure, "and nothing is wrong any more")


def test_whoever_waits_for_a_checkpoint_asks_until_it_is_whole(
    store: Store, checkpoints: Checkpointer
) -> None:
    checkpoints.await_whole(lambda: pytest.fail("there is none under way"))
    checkpoints.begin(1, 0.0, dict(STATE), number=1)
    file = store.write_shard(checkpoints.term, 1, 0, 1, iter(()), number=1)
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ConnectionLost("reset")
        if asked == 3:
            checkpoints.part(0, Report(Written(checkpoints.term, 1, 1, file, "", timedelta(0))))

    checkpoints.await_whole(ask)
    assert (asked, checkpoints.durable_version) == (3, 1)


def test_whoever_waits_for_a_checkpoint_learns_that_a_shard_has_lost_the_model(
    checkpoints: Checkpointer,
) -> None:
    checkpoints.begin(1, 0.0, dict(STATE), number=1)

    def ask() -> None:
        raise Refused(RefusalCode.NOT_READY, "shard 0 does not know the model yet")

    with pytest.raises(Refused, match="does not know the model"):
        checkpoints.await_whole(ask)
    assert not checkpoints.writing
    assert "version 1 was given up: shard 0 does not know the model yet" in checkpoints.failure


@pytest.mark.parametrize(
    ("limits", "answers", "why"),
    [
        (ServerLimits(given_up=SHORT), True, r"a shard has not written its part after \d+ s"),
        (ServerLimits(patience=SHORT), False, r"a shard has not answered for \d+ s"),
    ],
)
def test_whoever_waits_for_a_checkpoint_gives_it_up_in_the_end(
    checkpoints: Checkpointer, answers: bool, why: str
) -> None:
    checkpoints.begin(1, 0.0, dict(STATE), number=1)

    def ask() -> None:
        if not answers:
            raise ConnectionLost("reset")

    checkpoints.await_whole(ask)
    assert re.search(why, checkpoints.failure)
    assert not checkpoints.writing


@pytest.mark.parametrize("limits", [ServerLimits(patience=SHORT)], ids=["short"])
def test_a_process_that_is_about_to_end_waits_less_long_for_a_checkpoint(checkpoints: Checkpointer) -> None:
    """Also if it is asked to end while it waits."""
    checkpoints.begin(1, 0.0, dict(STATE), number=1)
    looks = 0

    def closing() -> bool:
        nonlocal looks
        looks += 1
        return looks > 10

    checkpoints.await_whole(lambda: None, closing=closing)
    assert looks > 10
    assert "a shard has not written its part after 0 s" in checkpoints.failure


def test_a_broken_checkpoint_is_told_until_a_new_one_is_written(
    store: Store, checkpoints: Checkpointer
) -> None:
    for version in (1, 2):
        checkpoints.begin(version, 0.0, dict(STATE), number=version)
        file = store.write_shard(checkpoints.term, version, 0, 1, iter(()), number=version)
        checkpoints.part(0, Report(Written(checkpoints.term, version, version, file, "", timedelta(0))))
        eventually(lambda v=version: checkpoints.durable_version == v, "it is on disk")  # type: ignore[misc]
    part = next(path for path in store.path(2).iterdir() if path.suffix == ".safetensors")
    part.write_bytes(b"damaged")
    assert checkpoints.newest().version == 1
    assert checkpoints.durable_version == 1
    assert f"{store.path(2)} is broken and was set aside" in checkpoints.failure
    assert checkpoints.problem(1, 0.0) == checkpoints.failure


def test_a_failure_to_go_back_is_told_until_it_has_worked(store: Store, checkpoints: Checkpointer) -> None:
    keep(store, checkpoints, 1)
    checkpoints.failed("the other shard does not answer")
    assert checkpoints.problem(1, 0.0) == "the other shard does not answer"
    assert checkpoints.newest().version == 1
    assert checkpoints.problem(1, 0.0) == ""
