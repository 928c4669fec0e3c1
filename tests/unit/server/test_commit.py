"""Orders to shards that do not answer: at the job's end, and when it has to go back to a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.compression import Compression
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.state import Stored
from elastic_ps.core.stages import Course, CourseEvent
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.process.telemetry import History
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.job.reconfiguration import DesiredConfiguration
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Report, Written
from tests.testing.coordinator import AskedShardZero, Notes, finish, join, start, take, unwritten
from tests.testing.polling import eventually

TWO_SHARDS = TrainingJobSpec.model_validate({"entrypoint": "train:main", "parameterServer": {"replicas": 2}})
INT8 = MutableFields.of(
    TWO_SHARDS.model_copy(update={"compression": Compression(codec="int8")}), generation=1
).to_json()


class Part(Notes):
    """Shard `index` of two: it writes its part of each checkpoint at once, and fails when told to."""

    def __init__(self, store: Store, index: int) -> None:
        super().__init__()
        self._store, self._index = store, index
        self._written: Written | None = None
        self.loaded: list[tuple[int | None, int]] = []
        self.broken = False

    def configure(self, configuration: Configuration) -> None:
        if self.broken:
            raise ConnectionLost("nobody serves there")
        self.loaded.append((configuration.load_version, configuration.load_bytes))

    def advance(self, advance: Advance) -> Report:
        super().advance(advance)
        if (number := advance.checkpoint) and not advance.prepare:
            place = (advance.term, advance.version, self._index, 2)
            tensors = [Stored(0, 0, "value", torch.zeros(4))] if self._index == 0 else []
            file = self._store.write_shard(*place, iter(tensors), number=number)
            self._written = Written(advance.term, number, advance.version, file, "", timedelta(0))
        return Report(self._written)


class Job:
    """Shard 0 of a job of two shards, with checkpoints of the first and the last version."""

    def __init__(self, directory: Path, limits: ServerLimits = USUAL) -> None:
        self.store = Store(directory)
        self.shards = [Part(self.store, index) for index in range(2)]
        self.checkpoints = Checkpointer(
            self.store,
            job="job",
            term=self.store.next_term(),
            shards=2,
            times=Times(interval=timedelta(hours=1), keep=2),
        )
        self.zero = AskedShardZero(
            "job", TWO_SHARDS, 1, self.shards, checkpoints=self.checkpoints, limits=limits
        )
        self.zero.start(None)
        self._closed = False

    def close(self, *, keep: bool = False) -> None:
        """As when the process is asked to end."""
        if not self._closed:
            self._closed = True
            self.zero.close(keep=keep)

    def decide(self) -> None:
        """A worker's step is decided, but shard 1 cannot be reached to apply it."""
        coordinator = self.zero.coordinator
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        self.shards[1].refuse = unreachable
        finish(coordinator, member, taken)
        assert self.zero.status().progress.version == 0


def unreachable(advance: Advance) -> None:
    if advance.apply is not None or advance.last:
        raise ConnectionLost("reset")


@pytest.fixture
def job(tmp_path: Path, limits: ServerLimits) -> Iterator[Job]:
    job = Job(tmp_path, limits)
    yield job
    for shard in job.shards:
        shard.refuse = lambda _: None
    job.close()


def test_a_round_that_is_decided_is_made_and_kept_before_the_job_ends(job: Job) -> None:
    """Some shards may have applied it."""
    job.decide()
    ending = threading.Thread(target=job.close, kwargs={"keep": True})
    ending.start()
    tried = len(job.shards[1].orders)
    eventually(lambda: len(job.shards[1].orders) > tried + 1, "it is tried again")
    assert ending.is_alive()
    job.shards[1].refuse = lambda _: None
    ending.join(30)
    assert not ending.is_alive()
    assert [shard.applied[-1:] for shard in job.shards] == [[1], [1]]
    assert job.store.versions() == [0, 1]
    assert job.shards[1].orders[-1].last, "shard 1 may end"


@pytest.mark.parametrize(
    "limits", [ServerLimits(patience=timedelta(milliseconds=50))], ids=["little patience"]
)
def test_a_job_ends_although_a_shard_is_not_reached_any_more(job: Job) -> None:
    """The round is not kept: nobody knows whether that shard has applied it."""
    job.decide()
    job.close(keep=True)
    assert job.shards[0].applied == []
    assert job.store.versions() == [0]
    assert job.shards[1].orders[-1].last, "it was tried to tell it that it may end"


def test_a_job_that_was_taken_over_keeps_nothing_and_ends_nobody(job: Job) -> None:
    job.decide()
    job.store.next_term()
    eventually(lambda: job.zero.checkpoints.fenced, "it knows that it was replaced")
    job.close(keep=True)
    assert job.store.versions() == [0]
    assert not any(order.last for order in job.shards[1].orders)


@pytest.mark.parametrize("limits", [ServerLimits(settled=timedelta(milliseconds=10))], ids=["soon"])
def test_going_back_to_a_checkpoint_is_tried_until_it_works_and_the_status_says_so(job: Job) -> None:
    coordinator = job.zero.coordinator
    member = start(coordinator)
    job.shards[1].broken = True

    def lost(advance: Advance) -> None:
        if job.shards[1].broken:
            raise Refused(RefusalCode.NOT_READY, "shard 1 does not know the model yet")

    job.shards[1].refuse = lost
    words = "the job has to go back to a checkpoint, and that failed so far: nobody serves there"
    eventually(lambda: job.zero.status().problem == words, "the status says so")
    with pytest.raises(Refused, match="is still going back to a checkpoint") as refused:
        coordinator.is_applied(0, member.incarnation, 0)
    assert refused.value.code is RefusalCode.NOT_READY
    job.shards[1].broken = False
    eventually(lambda: job.zero.status().term > 1 and not job.zero.job.rolling_back, "it has worked")
    assert job.zero.status().problem == ""
    size = sum(file.size for file in job.store.manifest(0).files)
    assert size > 0
    assert [shard.loaded[-1] for shard in job.shards] == [(0, size)] * 2
    joined = join(coordinator, 1)
    assert not joined.pending
    assert not joined.initialise


def test_a_commit_coordinator_that_is_closed_lets_nobody_give_orders() -> None:
    job = Guarded(TrainingJobSpec.model_validate({"entrypoint": "train:main"}), 1)
    checkpoints = unwritten()
    commit = CommitCoordinator(job, [Notes()], checkpoints=checkpoints, history=History(None, ""))
    with commit.turn() as order:
        assert order == Advance(0, 0, {}, term=1)
        assert job.behind, "one at a time"
    assert not job.behind
    commit.close()
    with pytest.raises(Refused, match="is stopping") as refused, commit.turn():
        pass
    assert refused.value.code is RefusalCode.NOT_READY
    checkpoints.close()


def test_a_worker_that_joins_while_the_parameter_server_ends_is_refused() -> None:
    shards = [Notes(), Notes()]
    zero = AskedShardZero("job", TWO_SHARDS, 1, shards, checkpoints=unwritten())
    zero.start(None)
    shards[0].lay_out = partial(zero.close, keep=False)  # while the model is distributed
    with pytest.raises(Refused, match="is stopping") as refused:
        join(zero.coordinator, 0)
    assert refused.value.code is RefusalCode.NOT_READY


def go_back(zero: AskedShardZero) -> None:
    """A shard has lost the model."""
    with zero.job.lock:
        zero.job.note_course(CourseEvent.ROLL_BACK)
    zero.commit.drive()


class GoingBack(Checkpointer):
    """While a change is being written to disk, the job goes back to a checkpoint, and makes a version."""

    zero: AskedShardZero | None = None

    def write(self, *, amend: bool = False) -> bool:
        kept, zero = super().write(amend=amend), self.zero
        if amend and zero is not None:
            self.zero = None
            go_back(zero)
            member = start(zero.coordinator)
            finish(zero.coordinator, member, take(zero.coordinator, member, call=1))
        return kept


class Failing(Checkpointer):
    """The first time that a change is to be written, it cannot be."""

    tried = False

    def write(self, *, amend: bool = False) -> bool:
        if amend and not self.tried:
            self.tried = True
            return False
        return super().write(amend=amend)


C = TypeVar("C", bound=Checkpointer)


@contextmanager
def changing(directory: Path, kind: type[C], **job: Any) -> Iterator[tuple[AskedShardZero, C, Path]]:
    """A job of two shards with a model. Its file of wanted fields, which is not there yet, is to say int8."""
    store = Store(directory / "checkpoints")
    shards = [Part(store, index) for index in range(2)]
    times = Times(interval=timedelta(hours=1), keep=2)
    checkpoints = kind(store, job="job", term=store.next_term(), shards=2, times=times)
    file, desired = directory / "wanted.json", DesiredConfiguration(directory / "wanted.json", "")
    zero = AskedShardZero("job", TWO_SHARDS, 1, shards, checkpoints=checkpoints, desired=desired, **job)
    zero.start(None)
    try:
        start(zero.coordinator)
        yield zero, checkpoints, file
    finally:
        zero.close(keep=False)


def test_a_job_that_goes_back_during_a_change_loses_no_version_by_that(tmp_path: Path) -> None:
    with changing(tmp_path, GoingBack) as (zero, checkpoints, wanted):
        checkpoints.zero = zero
        wanted.write_text(INT8)
        eventually(lambda: zero.status().progress.version == 1, "a version is made during the change")
    assert zero.status().progress.version == 1
    assert zero.job.course is Course.CLOSING, "and is to be kept"
    assert zero.status().tuning.generation == 1


def test_a_change_that_could_not_be_written_is_made_at_once_after_the_job_has_gone_back(
    tmp_path: Path,
) -> None:
    """It could not because a shard was lost. The clock stands still."""
    with changing(tmp_path, Failing, clock=lambda: 0.0) as (zero, _, wanted):
        wanted.write_text(INT8)
        eventually(lambda: bool(zero.status().tuning.problem), "the change could not be written")
        assert zero.status().tuning.generation == 0
        go_back(zero)
        eventually(lambda: zero.status().tuning.generation == 1, "it is made")
