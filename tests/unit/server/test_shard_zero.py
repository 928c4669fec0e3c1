"""Shard 0 put together: what becomes of silent and hung workers, lost orders, and what must be on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.checkpoints import Times
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.status import MemberStatus
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.stages import CourseEvent
from elastic_ps.errors import ConnectionLost, Fenced, InvalidModel, RefusalCode, Refused, TransportError
from elastic_ps.process.retrying import RETRY
from elastic_ps.server.job import record
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Report, Written
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import ranges_from_message
from tests.testing.coordinator import (
    SETTINGS,
    AskedShardZero,
    Notes,
    at_version,
    finish,
    join,
    start,
    take,
    unwritten,
)
from tests.testing.polling import LIMIT, eventually


@contextmanager
def leading(
    shards: Sequence[Notes],
    *,
    checkpoints: Checkpointer | None = None,
    clock: Callable[[], float] | None = None,
    crowded: bool = False,
    limits: ServerLimits = USUAL,
    **fields: Any,
) -> Iterator[AskedShardZero]:
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", **fields})
    checkpoints = checkpoints or unwritten()
    given: dict[str, Any] = {"checkpoints": checkpoints, "clock": clock, "crowded": crowded, "limits": limits}
    zero = AskedShardZero("job", spec, 1, shards, **given)
    zero.start(None)
    try:
        yield zero
    finally:
        for shard in shards:
            shard.refuse = lambda _: None
        zero.close(keep=False)


@pytest.fixture
def shard() -> Notes:
    return Notes()


@pytest.fixture
def zero(shard: Notes) -> Iterator[AskedShardZero]:
    with leading([shard]) as zero:
        yield zero


def members(zero: AskedShardZero) -> dict[int, MemberStatus]:
    """The newest stay of each worker."""
    return {member.worker: member for member in zero.status().members}


class Clock:
    """A time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Refused(RefusalCode.STALE_TERM, "this is an order of term 2; term 3 gives the orders now"), Fenced),
        (Refused(RefusalCode.INVALID, "this cannot be trained in term 3"), InvalidModel),
        (Refused(RefusalCode.STALE_CALL, "this cannot be, but in term 3"), Refused),
    ],
    ids=["replaced", "not to be trained", "refused"],
)
def test_a_parameter_server_whose_shard_refuses_the_checkpoint_does_not_start(
    refusal: Refused, expected: type[Exception]
) -> None:
    """If it has been configured in a newer term, the parameter server was replaced while it started."""

    class Refusing(Notes):
        def configure(self, configuration: Configuration) -> None:
            raise refusal

    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", "parameterServer": {"replicas": 2}})
    zero = AskedShardZero("job", spec, 2, [Notes(), Refusing()], checkpoints=unwritten(2))
    tensors = [asdict(TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0))]
    state = {"settings": SETTINGS.to_json(), "bucket_bytes": 0, "tuning": MutableFields().to_json()}
    found = Manifest(job="job", version=1, term=1, tensors=tensors, optimizer="SGD", state=state)
    with pytest.raises(expected, match="term 3"):
        zero.start(found)


def test_a_worker_that_is_silent_for_its_lease_is_lost_and_one_that_speaks_is_not(clock: Clock) -> None:
    with leading([Notes()], clock=clock, worker={"leaseDuration": "10s"}) as zero:
        coordinator = zero.coordinator
        silent, alive = start(coordinator, 0), start(coordinator, 1)
        clock.now += 9.0
        coordinator.heartbeat(1, alive.incarnation)
        clock.now += 2.0
        eventually(lambda: members(zero)[0].state == "lost", "worker 0 is declared lost")
        assert members(zero)[1].state == "idle"
        assert members(zero)[0].reason == "silent for 10 s"
        with pytest.raises(Refused, match="was declared gone") as refused:
            coordinator.heartbeat(0, silent.incarnation)
        assert refused.value.code is RefusalCode.STALE_INCARNATION


def test_a_model_that_has_gone_meanwhile_is_not_missed() -> None:
    """The worker that brings it is lost while an order is under way, which a shard that is new refuses."""
    ordered = threading.Event()

    def lose(advance: Advance) -> None:
        if not ordered.is_set():
            ordered.set()
            running.coordinator.gone(0, "first")
            raise Refused(RefusalCode.NOT_READY, "shard 1 does not know the model yet")

    new = Notes()
    with leading([Notes(), new], parameterServer={"replicas": 2}) as running:
        new.refuse = lose
        joined = join(running.coordinator, 0, instance="first", call=1)
        assert not joined.pending
        assert joined.initialise
        assert ordered.wait(10)
        joined = join(running.coordinator, 0, instance="second", call=1)
        assert not joined.pending
        assert joined.initialise


def test_a_model_that_goes_before_the_job_can_go_back_is_not_missed() -> None:
    """A shard has lost it; then the worker that was bringing it is lost, too."""
    new = Notes()
    with leading([Notes(), new], parameterServer={"replicas": 2}) as running:
        job = running.coordinator.job
        joined = join(running.coordinator, 0, instance="first", call=1)
        assert not joined.pending
        with job.changed:
            job.note_course(CourseEvent.ROLL_BACK)
            job.drop(0, "lost")
        joined = join(running.coordinator, 0, instance="second", call=1)
        assert not joined.pending
        assert joined.initialise


def test_a_model_that_is_laid_out_while_the_job_begins_anew_is_brought_once_more() -> None:
    """A shard has lost it, and there is no checkpoint; its worker is lost, and another one comes."""
    looked, laid_out, may_go_on = threading.Event(), threading.Event(), threading.Event()

    class Slow(Checkpointer):
        def begin_term(self, *, above: int = 0) -> None:
            looked.set()
            assert laid_out.wait(10)
            super().begin_term(above=above)

    class Waiting(Notes):
        def configure(self, configuration: Configuration) -> None:
            if looked.is_set() and not laid_out.is_set():
                laid_out.set()
                assert may_go_on.wait(10)

    slow = Slow(None, job="job", term=1, shards=1, times=Times())
    with leading([Waiting()], checkpoints=slow) as running, ThreadPoolExecutor(1) as threads:
        coordinator = running.coordinator
        assert join(coordinator, 0, instance="first", call=1).initialise
        with coordinator.job.changed:
            coordinator.job.note_course(CourseEvent.ROLL_BACK)
        assert looked.wait(10)
        with coordinator.job.changed:
            coordinator.job.drop(0, "lost")
        joining = threads.submit(join, coordinator, 1, instance="second", call=1)
        eventually(lambda: running.status().term == 2, "the job begins anew")
        may_go_on.set()
        with pytest.raises(Refused) as refused:
            joining.result(LIMIT)
        assert refused.value.code is RefusalCode.NOT_READY
        joined = join(coordinator, 1, instance="second", call=2)
        assert (joined.initialise, joined.term) == (True, 2)


def test_without_a_checkpoint_a_lost_model_is_brought_anew_by_a_worker_that_has_not_trained() -> None:
    """A shard has lost it and says so when a round is to be applied. There is nothing to go back to."""
    first, second = Notes(), Notes()
    with leading([first, second], parameterServer={"replicas": 2}) as running:
        coordinator = running.coordinator
        member = start(coordinator, 0)
        taken = take(coordinator, member, call=1)

        def lost(advance: Advance) -> None:
            if advance.apply is not None:
                raise Refused(RefusalCode.NOT_READY, "shard 1 does not know the model yet")

        second.refuse = lost
        finish(coordinator, member, taken)
        eventually(lambda: coordinator.job.state.model is None, "the model is given up")
        assert coordinator.job.state.term == 2
        assert first.applied == []
        with pytest.raises(Refused) as refused:
            coordinator.heartbeat(0, member.incarnation)
        assert refused.value.code is RefusalCode.STALE_INCARNATION
        joined = join(coordinator, 0, instance="another", call=1)
        assert not joined.pending
        assert (joined.initialise, joined.term) == (True, 2)


def test_other_shards_are_told_that_they_may_end_if_they_know_a_model() -> None:
    told, untold = [Notes(), Notes()], [Notes(), Notes()]
    for shards, begins in ((told, True), (untold, False)):
        with leading(shards, parameterServer={"replicas": 2}) as running:
            if begins:
                start(running.coordinator, 0)
    assert [order.last for order in told[1].orders][-1:] == [True]
    assert not any(order.last for order in told[0].orders), "shard 0 ends by itself"
    assert untold[1].orders == []


def test_how_long_a_worker_s_steps_take_is_reported_after_the_first_one(clock: Clock) -> None:
    with leading([Notes()], clock=clock) as zero:
        coordinator = zero.coordinator
        member = start(coordinator, 0)
        seen: list[float | None] = []
        for step in range(3):
            taken = take(coordinator, member, call=step + 1, wait=step == 0)
            clock.now += 3.0
            finish(coordinator, member, at_version(taken, step), step=step)
            eventually(lambda: coordinator.job.state.version == len(seen) + 1, "the next version")
            seen.append(members(zero)[0].step_seconds)
        assert seen == [None, 3.0, 3.0]


def test_a_worker_that_keeps_others_waiting_is_declared_hung_and_its_records_go_to_others(
    clock: Clock,
) -> None:
    patience = {"progressTimeout": "20s", "leaseDuration": "10h"}
    with leading([Notes()], clock=clock, worker=patience) as zero:
        coordinator, state = zero.coordinator, zero.coordinator.job.state
        first = start(coordinator, 0)
        taken = take(coordinator, first, call=1)
        take(coordinator, first, call=2, wait=False)
        second = start(coordinator, 1)
        joining: dict[str, pb.TakeReply] = {}
        thread = threading.Thread(target=lambda: joining.update(taken=take(coordinator, second, call=1)))
        thread.start()
        eventually(lambda: state.rounds.waiting, "the second waits for the next round")
        finish(coordinator, first, taken)
        thread.join(10)
        assert joining["taken"].version == 1
        contribution = Contribution(
            worker=1,
            incarnation=second.incarnation,
            step=0,
            samples=10,
            records=ranges_from_message(joining["taken"].ranges),
            settings=SETTINGS.to_json(),
        )
        coordinator.finish(contribution, version=1, attempt=0)
        eventually(lambda: state.rounds.held_up, "it is noticed that the second waits")

        def hung() -> bool:
            clock.now += 0.5
            return members(zero)[0].state == "hung"

        eventually(hung, "the first is declared hung")
        assert "have waited for its step for" in members(zero)[0].reason
        assert members(zero)[1].state != "hung"
        with pytest.raises(Refused) as refused:
            coordinator.heartbeat(0, first.incarnation)
        assert refused.value.code is RefusalCode.HUNG


def test_shards_know_who_takes_part_before_a_worker_may_push(shard: Notes, zero: AskedShardZero) -> None:
    coordinator = zero.coordinator
    member = start(coordinator)
    take(coordinator, member, call=1)
    last = shard.orders[-1]
    assert (last.version, last.attempt, last.expected) == (0, 0, {0: member.incarnation})
    coordinator.release(0, member.incarnation, call=2)
    eventually(lambda: not shard.orders[-1].expected, "nobody takes part any more")
    before = len(shard.orders)
    coordinator.release(0, member.incarnation, call=2)
    assert len(shard.orders) == before, "a repeated call changes nothing"


def test_a_round_is_ordered_with_its_contributors_samples_and_settings(
    shard: Notes, zero: AskedShardZero
) -> None:
    coordinator = zero.coordinator
    member = start(coordinator)
    taken = take(coordinator, member, call=1)
    assert not coordinator.is_applied(0, member.incarnation, 0)
    assert finish(coordinator, member, taken)
    assert coordinator.is_applied(0, member.incarnation, 0)
    assert not finish(coordinator, member, taken), "it is known"
    order = next(order for order in shard.orders if order.apply is not None)
    assert order.apply is not None
    assert (order.version, order.term, order.checkpoint) == (1, 1, 0)
    assert order.apply.contributors == [(0, member.incarnation, 0)]
    assert (order.apply.weight, order.apply.attempt) == (10, 0)
    assert order.apply.settings.groups == ({"lr": 0.1},)
    assert zero.coordinator.job.state.settings.to_json() == order.apply.settings.to_json()


def test_an_order_that_was_not_delivered_is_given_again(shard: Notes, zero: AskedShardZero) -> None:
    coordinator = zero.coordinator
    member = start(coordinator)
    taken = take(coordinator, member, call=1)
    failures = 0

    def lose(advance: Advance) -> None:
        nonlocal failures
        if advance.apply is not None and failures < 2:
            failures += 1
            raise ConnectionLost("reset")

    shard.refuse = lose
    finish(coordinator, member, taken)
    eventually(lambda: zero.status().progress.version == 1, "it arrives in the end")
    assert failures == 2
    assert zero.status().progress.records_applied == sum(r.stop - r.start for r in taken.ranges)
    assert coordinator.job.state.settings.position.steps == 1, "schedules count a version as one step"


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("my optimizer"), TransportError("the server failed: ZeroDivisionError: my")]
)
def test_a_step_that_raises_an_error_is_a_problem_until_it_is_made(
    shard: Notes, zero: AskedShardZero, error: Exception
) -> None:
    """An optimizer of the user's own may always raise one: the job would go back for ever without a word."""

    def raising(advance: Advance) -> None:
        if advance.apply is not None:
            raise error

    coordinator = zero.coordinator
    member = start(coordinator)
    taken = take(coordinator, member, call=1)
    shard.refuse = raising
    finish(coordinator, member, taken, step=0)
    said = "the step that makes version 1 has raised an error, and is made again: "
    eventually(lambda: zero.status().problem == said + repr(error), "it is told")
    shard.refuse = lambda _: None
    eventually(lambda: not zero.status().problem, "it is made")
    assert zero.status().progress.version == 1


def test_a_shard_that_is_not_reached_is_not_tried_by_every_call(shard: Notes, zero: AskedShardZero) -> None:
    """Each of them would try at once, and wake up the others, which would do so, too."""
    coordinator = zero.coordinator
    member = start(coordinator)
    taken = take(coordinator, member, call=1)

    def lose(advance: Advance) -> None:
        raise ConnectionLost("reset")

    shard.orders.clear()
    shard.refuse = lose
    began = time.monotonic()
    finish(coordinator, member, taken)
    for _ in range(500):
        coordinator.gone(7, "nobody")
    allowed = 3 + (time.monotonic() - began) / RETRY.total_seconds()
    assert 1 <= len(shard.orders) <= allowed
    shard.refuse = lambda _: None
    eventually(lambda: zero.status().progress.version == 1, "it arrives in the end")


def test_a_round_that_starts_again_has_the_settings_that_it_was_opened_with() -> None:
    shards = [Notes(), Notes()]
    with leading(shards) as zero:
        coordinator, state = zero.coordinator, zero.coordinator.job.state
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        before = state.settings.to_json()
        seen: list[tuple[str, str]] = []

        def refuse(advance: Advance) -> None:
            if advance.prepare and not seen:
                seen.append((state.settings.to_json(), record.to_checkpoint(state)["settings"]))
                raise Refused(RefusalCode.INVALID, "its sums are others")

        shards[1].refuse = refuse
        finish(coordinator, member, taken)
        eventually(lambda: state.rounds.attempt == 1, "the round starts again")
        [(decided, checkpoint)] = seen
        assert decided != before, "who pulls the version that is made gets its settings"
        assert checkpoint == before, "the version that there is has them not"
        assert state.settings.to_json() == before
        finish(coordinator, member, taken)
        eventually(lambda: state.version == 1, "it is made")
        assert state.settings.to_json() == decided


def test_a_shard_of_another_term_s_orders_fences_this_server(tmp_path: Path) -> None:
    """It says that a newer parameter server has spoken to it."""
    store = Store(tmp_path)
    checkpoints = writing_to(store)
    shards = [Notes(), Notes()]
    with leading(shards, checkpoints=checkpoints) as zero:
        coordinator = zero.coordinator
        shards[1].refuse = lambda _: raise_(Refused(RefusalCode.STALE_TERM, "term 7 gives the orders now"))
        join(coordinator, 0)
        eventually(lambda: zero.checkpoints.fenced, "it knows that it was replaced")
        assert zero.status().progress.version == 0


def raise_(error: Exception) -> None:
    raise error


def writing_to(store: Store, *, shards: int = 2) -> Checkpointer:
    return Checkpointer(
        store,
        job="job",
        term=store.next_term(),
        shards=shards,
        times=Times(interval=timedelta(hours=1), keep=2),
    )


def test_without_a_checkpoint_a_lost_model_is_begun_anew_in_another_term() -> None:
    shards = [Notes(), Notes()]
    with leading(shards) as zero:
        coordinator = zero.coordinator
        start(coordinator)
        shards[1].refuse = lambda _: raise_(Refused(RefusalCode.NOT_READY, "it does not know the model"))
        eventually(lambda: zero.status().term == 2, "the model is given up")
        assert not zero.status().ready
        shards[1].refuse = lambda _: None
        joined = join(coordinator, 1)
        assert not joined.pending
        assert joined.initialise
        assert joined.term == 2
        assert joined.incarnation >> 32 == 2


def test_a_job_that_is_about_to_end_tells_nobody_anything_more() -> None:
    shards = [Notes(), Notes()]
    with leading(shards) as zero:
        coordinator = zero.coordinator
        member = start(coordinator)
    with pytest.raises(Refused, match="is stopping") as refused:
        coordinator.is_applied(0, member.incarnation, 0)
    assert refused.value.code is RefusalCode.NOT_READY
    assert shards[1].orders[-1].last, "the other shard may end"
    assert not any(order.last for order in shards[0].orders)


def test_another_shard_is_asked_again_and_again_whether_it_knows_the_model() -> None:
    shards = [Notes(), Notes()]
    with leading(shards) as zero:
        coordinator = zero.coordinator
        start(coordinator)
        before = len(shards[1].orders)
        eventually(lambda: len(shards[1].orders) > before + 2, "it is asked")
    alone = Notes()
    with leading([alone]) as zero:
        coordinator = zero.coordinator
        start(coordinator)
        before = len(alone.orders)
        threading.Event().wait(USUAL.tick.total_seconds() * 3)
        assert len(alone.orders) == before, "a shard that is in this process need not be"


def test_rows_whose_norm_is_limited_must_not_be_divided() -> None:
    tensors = (TensorSpec("e", (4, 1024), "float32", Rule.GRADIENT, 0),)
    with leading([Notes()], parameterServer={"bucketBytes": 2048}) as zero:
        coordinator = zero.coordinator

        def joining(settings: Settings) -> pb.JoinReply:
            return coordinator.join(
                0, pid=1, host="here", tensors=tensors, optimizer="SGD", settings=settings
            )

        with pytest.raises(Refused, match=r"increase parameterServer\.bucketBytes") as refused:
            joining(Settings(({"lr": 0.1, "max_norm": 1.0},)))
        assert refused.value.code is RefusalCode.INVALID
        joined = joining(Settings(({"lr": 0.1},)))
        assert not joined.pending
        assert joined.initialise


def test_the_first_and_the_last_version_are_on_disk_before_workers_go_on(tmp_path: Path) -> None:
    """Else a parameter server that is lost then has nothing to go back to."""
    store = Store(tmp_path)
    checkpoints = writing_to(store, shards=1)
    shard = Writing(store)
    with leading([shard], checkpoints=checkpoints) as zero:
        coordinator = zero.coordinator
        member = start(coordinator)
        assert checkpoints.durable_version == 0
        assert zero.status().progress.durable_version == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: 0.0)
            assert zero.status().durable_age_seconds == 0, "the machine's clock was put back"
        step = 0
        while not (taken := take(coordinator, member, call=step + 1)).finished:
            assert checkpoints.durable_version == 0, "the interval is an hour"
            finish(coordinator, member, taken, step=step)
            step += 1
        assert step > 1
        assert taken.version == checkpoints.durable_version == step


def test_a_version_that_none_follows_is_written_after_two_intervals(tmp_path: Path, clock: Clock) -> None:
    """A script may validate for long."""
    store = Store(tmp_path)
    checkpoints = writing_to(store, shards=1)
    with leading([Writing(store)], checkpoints=checkpoints, clock=clock) as zero:
        coordinator = zero.coordinator
        member = start(coordinator)
        finish(coordinator, member, take(coordinator, member, call=1), step=0)
        clock.now += 3600.0
        threading.Event().wait(USUAL.tick.total_seconds() * 3)
        assert checkpoints.durable_version == 0, "the next version would be written"
        clock.now += 3700.0
        eventually(lambda: checkpoints.durable_version == 1, "it is on disk")


def test_a_version_that_cannot_be_kept_is_tried_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    checkpoints = writing_to(store, shards=1)
    shard = Writing(store)
    shard.problem = "No space left on device"
    with leading([shard], checkpoints=checkpoints, clock=clock) as zero:
        coordinator = zero.coordinator
        joined = join(coordinator, 0)
        assert not joined.pending
        with pytest.raises(Refused, match=r"version 0 is not on disk yet\. No space left") as refused:
            coordinator.initialised(0, joined.incarnation)
        assert refused.value.code is RefusalCode.NOT_READY
        assert not zero.status().ready
        assert zero.status().problem == "No space left on device"
        shard.problem = ""
        tried = shard.written
        threading.Event().wait(USUAL.tick.total_seconds() * 3)
        assert shard.written == tried, "not before a second has passed"
        clock.now += 1.0
        eventually(lambda: zero.status().ready, "it is tried again")
        coordinator.initialised(0, joined.incarnation)
        assert checkpoints.durable_version == 0


def test_the_worker_that_has_brought_the_model_waits_while_another_thread_writes_it(
    tmp_path: Path,
) -> None:
    """The one that looks every `ServerLimits.tick` may have come first."""
    store = Store(tmp_path)
    shard, writing, go_on = Writing(store), threading.Event(), threading.Event()

    def slowly(advance: Advance) -> None:
        if advance.checkpoint:
            writing.set()
            assert go_on.wait(LIMIT)

    shard.refuse = slowly
    patient = ServerLimits(answer=timedelta(seconds=LIMIT))
    with (
        leading([shard], checkpoints=writing_to(store, shards=1), limits=patient) as zero,
        ThreadPoolExecutor(2) as pool,
    ):
        joined = join(zero.coordinator, 0)
        assert not joined.pending
        first = pool.submit(zero.coordinator.initialised, 0, joined.incarnation)
        assert writing.wait(LIMIT)
        second = pool.submit(zero.coordinator.initialised, 0, joined.incarnation)
        try:
            assert not wait([first, second], 0.5).done, "it is not on disk yet"
        finally:
            go_on.set()
        first.result(LIMIT)
        second.result(LIMIT)
        assert zero.status().ready


class Writing(Notes):
    """Writes its part of each checkpoint at once, empty, unless there is a `problem`."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.problem, self.written = store, "", 0
        self._last: Written | None = None

    def advance(self, advance: Advance) -> Report:
        super().advance(advance)
        if advance.checkpoint:
            self.written += 1
            number = advance.checkpoint
            file = None
            if not self.problem:
                file = self.store.write_shard(advance.term, advance.version, 0, 1, iter(()), number=number)
            self._last = Written(advance.term, number, advance.version, file, self.problem, timedelta(0))
        return Report(self._last)
