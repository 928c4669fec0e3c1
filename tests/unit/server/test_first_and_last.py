"""The first version and the last are on disk before training begins and before it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.settings import Settings
from elastic_ps.core.stages import CourseEvent, Stage
from elastic_ps.errors import ConnectionLost, StorageUnavailable
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job import record
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Model
from tests.testing import machine
from tests.testing.shard import LR, one_bucket, tensor

LAYOUT = one_bucket(tensor("w", 4))
RECORDS = 4


class Disk(Store):
    """A checkpoint directory that `before_write` may find wrong."""

    before_write: Callable[[], None] = staticmethod(lambda: None)

    def write_shard(self, *arguments: Any, **named: Any) -> ShardFile:
        self.before_write()
        return super().write_shard(*arguments, **named)


class Rig:
    """One shard, told what a coordinator would tell it, and the job that it belongs to."""

    def __init__(self, directory: Path, limits: ServerLimits) -> None:
        self.now = 0.0
        self.disk = Disk(directory)
        self.term = self.disk.next_term()
        self.lost_calls = 0
        self.orders: list[Advance] = []
        hour = timedelta(hours=1)
        self.checkpoints = Checkpointer(
            self.disk, job="job", term=self.term, shards=1, times=Times(interval=hour, keep=2), limits=limits
        )
        self.node = Node(0, 1, store=self.disk, trace=Trace(None, ""))
        self.node.configure(Configuration(LAYOUT, "SGD", LR, self.term, None))
        spec = TrainingJobSpec.model_validate({"entrypoint": "train:main"})
        self.job = Guarded(spec, self.term, clock=lambda: self.now, limits=limits)
        self.job.state.model = Model(LAYOUT, "SGD")
        self.job.state.settings = Settings(LR.groups)
        self.job.state.stage = Stage.TRAINING
        self.checkpoints.serve(self.job, self)

    @contextmanager
    def turn(self) -> Iterator[Advance]:
        yield Advance(self.job.state.version, 0, {}, term=self.term)

    def tell_all(self, advance: Advance) -> None:
        if self.lost_calls:
            self.lost_calls -= 1
            raise ConnectionLost("reset")
        self.orders.append(advance)
        self.checkpoints.part(0, self.node.advance(advance))

    def finish(self) -> None:
        """All records are in the model, of version 0: here nothing is computed."""
        state = self.job.state
        state.stage = Stage.TRAINING
        state.ledger = Ledger(RECORDS, 1, RECORDS)
        state.ledger.apply(1, state.ledger.take(1, batch=RECORDS, workers=1, fresh=False))
        assert state.finished
        state.chiefs.of[state.last_epoch] = 0

    def may_finish(self) -> bool:
        with self.job.changed:
            return self.checkpoints.may_finish()

    @property
    def written(self) -> int:
        """How many checkpoints were ordered."""
        return sum(order.checkpoint > 0 for order in self.orders)

    def close(self) -> None:
        self.node.close()
        self.checkpoints.close()


@pytest.fixture
def rig(tmp_path: Path, limits: ServerLimits) -> Iterator[Rig]:
    made = Rig(tmp_path, limits)
    yield made
    made.close()


def full() -> None:
    raise StorageUnavailable("No space left on device")


def test_the_first_version_is_on_disk_before_training_begins(rig: Rig) -> None:
    rig.job.state.stage = Stage.LOADING
    rig.checkpoints.keep_what_must_be()
    assert not rig.job.state.initialised, "its values have not arrived"
    assert rig.written == 0
    rig.job.state.stage = Stage.ARRIVED
    rig.checkpoints.keep_what_must_be()
    assert rig.job.state.initialised
    assert rig.disk.newest()[0].version == 0
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 1


def test_the_last_version_is_on_disk_before_the_job_ends(rig: Rig) -> None:
    assert not rig.may_finish(), "nothing is trained"
    rig.finish()
    assert not rig.may_finish()
    rig.checkpoints.keep_what_must_be()
    assert rig.may_finish()
    assert rig.disk.newest()[0].state["ledger"] == record.to_checkpoint(rig.job.state)["ledger"]


def test_a_checkpoint_of_the_last_version_is_told_of_the_end(rig: Rig) -> None:
    """It may be on disk from before: with fewer records, and without the chief."""
    assert rig.checkpoints.write()
    rig.finish()
    assert not rig.may_finish()
    rig.checkpoints.keep_what_must_be()
    assert rig.may_finish()
    assert rig.written == 1, "the tensors are the earlier ones"
    state = rig.disk.newest()[0].state
    assert state["ledger"] == record.to_checkpoint(rig.job.state)["ledger"]
    assert state["chiefs"] == [[0, 0]]
    rig.job.state.chiefs.of[0] = 1
    assert not rig.may_finish()
    rig.checkpoints.keep_what_must_be()
    assert rig.may_finish()
    assert rig.disk.newest()[0].state["chiefs"] == [[0, 1]]


def test_a_chief_that_is_chosen_while_the_last_version_is_written_is_written_at_once(rig: Rig) -> None:
    rig.finish()
    rig.job.state.chiefs.of.clear()

    def choose() -> None:
        with rig.job.lock:
            rig.job.state.chiefs.of[rig.job.state.last_epoch] = 0

    rig.disk.before_write = choose
    rig.checkpoints.keep_what_must_be()
    assert rig.may_finish(), "no time has passed"
    assert rig.disk.newest()[0].state["chiefs"] == [[0, 0]]
    assert rig.written == 1, "the tensors are not written again"


def test_the_last_version_is_kept_before_anybody_asks_for_the_end(rig: Rig) -> None:
    rig.finish()
    rig.job.state.chiefs.of.clear()
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 1
    assert not rig.may_finish()
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 1, "once"


def test_an_end_that_cannot_be_written_is_no_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.checkpoints.write()
    rig.finish()
    with monkeypatch.context() as patch:
        machine.fails(patch, os, "fsync", machine.full())
        rig.checkpoints.keep_what_must_be()
    assert not rig.may_finish()
    assert "No space left" in rig.checkpoints.failure
    rig.now += USUAL.keep_again.total_seconds()
    rig.checkpoints.keep_what_must_be()
    assert rig.may_finish()
    assert rig.checkpoints.failure == ""


def test_a_fenced_server_writes_no_end(rig: Rig) -> None:
    assert rig.checkpoints.write()
    before = rig.disk.newest()[0].state
    rig.disk.next_term()
    rig.finish()
    rig.checkpoints.keep_what_must_be()
    assert rig.checkpoints.fenced
    assert not rig.may_finish()
    assert rig.disk.newest()[0].state == before


def test_a_full_disk_is_tried_again_after_a_pause_and_holds_the_end_up_for_a_while(rig: Rig) -> None:
    rig.finish()
    rig.disk.before_write = full
    rig.checkpoints.keep_what_must_be()
    assert "No space left" in rig.checkpoints.failure
    assert rig.written == 1
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 1, "at once"
    rig.now += USUAL.keep_again.total_seconds()
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 2
    assert not rig.may_finish()
    rig.now += USUAL.given_up.total_seconds()
    assert rig.may_finish(), "for ever"
    rig.job.state.rounds.version += 1
    assert not rig.may_finish(), "it is another end, as when a job has gone back to a checkpoint"


def test_a_disk_that_has_room_again_is_written_to(rig: Rig) -> None:
    rig.finish()
    rig.disk.before_write = full
    rig.checkpoints.keep_what_must_be()
    rig.disk.before_write = lambda: None
    rig.now += USUAL.keep_again.total_seconds()
    rig.checkpoints.keep_what_must_be()
    assert rig.checkpoints.failure == ""
    assert rig.may_finish()


def test_a_call_that_is_lost_is_made_again(rig: Rig) -> None:
    rig.lost_calls = 2
    assert rig.checkpoints.write()
    assert rig.disk.newest()[0].version == 0


@pytest.mark.parametrize("stage", [Stage.EMPTY, Stage.CONFIGURING, Stage.LAID_OUT, Stage.LOADING])
def test_a_repeated_order_is_not_about_values_that_were_lost_meanwhile(rig: Rig, stage: Stage) -> None:
    """A shard was lost before the first checkpoint, so the others have blank values."""
    rig.job.state.stage = Stage.ARRIVED

    @contextmanager
    def turn() -> Iterator[Advance]:
        if rig.lost_calls == 0:
            rig.job.state.stage = stage
        yield Advance(0, 0, {}, term=rig.term)

    rig.turn, rig.lost_calls = turn, 1  # type: ignore[method-assign]
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 0
    assert not rig.checkpoints.writing


def test_an_order_that_not_all_shards_got_is_repeated_as_it_was(rig: Rig) -> None:
    """A shard that has got it would else copy and write its values once more for each attempt."""
    told: list[int] = []
    real = rig.tell_all

    def count(advance: Advance) -> None:
        told.append(advance.checkpoint)
        real(advance)

    rig.tell_all = count  # type: ignore[method-assign]
    rig.lost_calls = 3
    assert rig.checkpoints.write()
    assert [number for number in told if number] == [1, 1, 1, 1]
    rig.job.state.rounds.version += 1
    assert not rig.checkpoints.write(), "the shard has no such version"
    assert told[-1] == 2, "another version has another number"


@pytest.mark.parametrize(
    "limits", [ServerLimits(patience=timedelta(milliseconds=50))], ids=["little patience"]
)
def test_a_part_that_takes_long_to_write_is_waited_for(rig: Rig) -> None:
    """Of a large model, on a slow volume: each new attempt would only be late again."""
    rig.disk.before_write = partial(time.sleep, 0.3)
    rig.job.state.stage = Stage.ARRIVED
    rig.checkpoints.keep_what_must_be()
    assert rig.job.state.initialised
    assert rig.written == 1


def test_a_shard_that_cannot_be_reached_is_not_waited_for_for_ever(rig: Rig) -> None:
    rig.lost_calls = 1_000_000
    real, rig.now = rig.tell_all, 0.0

    def slow(advance: Advance) -> None:
        rig.now += 30.0
        real(advance)

    rig.tell_all = slow  # type: ignore[method-assign]
    assert not rig.checkpoints.write()


def test_a_checkpoint_that_is_being_written_is_finished_first(rig: Rig) -> None:
    """Two at a time would take each other's files away."""
    number = rig.checkpoints.number()
    rig.tell_all(Advance(0, 0, {}, checkpoint=number, term=rig.term))
    rig.checkpoints.begin(0, rig.now, record.to_checkpoint(rig.job.state), number=number)
    assert rig.checkpoints.write()
    assert rig.written == 1, "the version is on disk"


def test_a_thread_that_comes_while_another_one_writes_does_not_wait(rig: Rig) -> None:
    rig.finish()
    writing, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        writing.set()
        assert go_on.wait(10)

    rig.disk.before_write = slowly
    first = threading.Thread(target=rig.checkpoints.keep_what_must_be)
    first.start()
    assert writing.wait(10)
    rig.checkpoints.keep_what_must_be()
    assert not rig.may_finish()
    go_on.set()
    first.join(10)
    assert rig.may_finish()
    assert rig.written == 1


@pytest.mark.parametrize("why", [CourseEvent.CLOSE, CourseEvent.ROLL_BACK, None])
def test_nothing_is_written_by_a_server_that_ends_or_whose_model_is_lost(
    rig: Rig, why: CourseEvent | None
) -> None:
    rig.finish()
    if why is None:
        rig.checkpoints.fenced = True
    else:
        with rig.job.lock:
            rig.job.note_course(why)
    rig.checkpoints.keep_what_must_be()
    assert rig.written == 0


def test_without_checkpoints_nothing_is_waited_for(rig: Rig) -> None:
    alone = Checkpointer(None, job="job", term=rig.term, shards=1, times=Times())
    alone.serve(rig.job, rig)
    rig.job.state.stage = Stage.ARRIVED
    alone.keep_what_must_be()
    assert rig.job.state.initialised
    rig.finish()
    with rig.job.changed:
        assert alone.may_finish()
    assert rig.written == 0
    alone.close()
