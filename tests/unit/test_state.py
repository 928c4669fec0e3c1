"""What shard 0 knows of a job: whose records stay where when workers vanish, come again, or repeat."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elastic_ps.core.consistency import Contribution, Entry
from elastic_ps.core.lanes import Lanes
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Stay
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Position, Settings
from elastic_ps.errors import InvalidJob, RefusalCode, Refused
from elastic_ps.job import Consistency, Data
from elastic_ps.server.state import JobState, Model


@pytest.fixture
def state() -> JobState:
    state = JobState(term=1, lease=timedelta(seconds=10), initialised=True)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    return state


def join(state: JobState, worker: int) -> Stay:
    """A worker comes, is handed records and wants to compute on them."""
    stay = state.members.join(worker, pid=worker, host="here", version=state.version, now=0)
    state.take(worker, stay.incarnation, 10)
    state.admit(worker)
    return stay


def contribution(state: JobState, stay: Stay, *, step: int = 0) -> Contribution:
    """A step on all that the worker holds."""
    assert state.ledger is not None
    held = tuple(state.ledger.held(stay.incarnation))
    return Contribution(worker=stay.worker, incarnation=stay.incarnation, step=step, samples=10, records=held)


def finish(state: JobState, stay: Stay, *, step: int = 0) -> Contribution:
    done = contribution(state, stay, step=step)
    state.rounds.finish(done, version=state.version, attempt=state.rounds.attempt)
    return done


def two(state: JobState) -> tuple[Stay, Stay]:
    """Two workers, both in the open round, which is the second."""
    first, second = join(state, 0), join(state, 1)
    finish(state, first, step=-2)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    state.take(first.worker, first.incarnation, 10)
    return first, second


def test_the_records_of_a_finished_step_stay_with_it_when_its_worker_vanishes(state: JobState) -> None:
    first, second = two(state)
    done = finish(state, first)
    state.drop(0, "lost")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == list(done.records)
    finish(state, second)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    assert state.ledger.applied == 30
    assert first.last_step == 0


def test_a_worker_that_finished_comes_again_and_vanishes_again(state: JobState) -> None:
    """The records of the finished step are those of its earlier stay, not of the later one."""
    first, second = two(state)
    done = finish(state, first)
    state.drop(0, "lost")
    again = join(state, 0)
    state.drop(0, "lost")
    assert state.ledger is not None
    assert state.ledger.held(again.incarnation) == []
    assert state.ledger.held(first.incarnation) == list(done.records)
    finish(state, second)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    assert state.ledger.applied == 30


@pytest.mark.parametrize("leaves", [False, True])
def test_a_late_request_cannot_take_the_records_of_a_finished_step_away(
    state: JobState, leaves: bool
) -> None:
    """A repeated Take, Release or Leave that was delayed on its way; the step is in the sums by then."""
    first, second = two(state)
    done = finish(state, first)
    state.give_back(first.incarnation)
    if leaves:
        state.rounds.withdraw(0)
        state.drop(0, "left")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == list(done.records)
    finish(state, second)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    assert state.ledger.applied == 30


def test_records_of_void_steps_go_to_others(state: JobState) -> None:
    first, second = two(state)
    finish(state, first)
    state.drop(0, "lost")
    state.drop(1, "lost")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == state.ledger.held(second.incarnation) == []
    third = join(state, 2)
    assert state.rounds.takes_part(2)
    finish(state, third)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    assert state.ledger.applied == 20


def test_shards_are_told_which_process_of_a_worker_takes_part(state: JobState) -> None:
    first, second = two(state)
    assert state.expected == {0: first.incarnation, 1: second.incarnation}
    finish(state, first)
    state.drop(0, "lost")
    again = join(state, 0)
    assert state.expected == {0: first.incarnation, 1: second.incarnation}, "its step is in the sums"
    assert state.following == {0: again.incarnation, 1: second.incarnation}
    finish(state, second)
    following = state.following
    state.book(state.rounds.begin_commit(), 0, decided=0)
    assert state.expected == following


def test_with_a_fixed_schedule_nobody_stands_in_for_a_worker_that_has_not_come(state: JobState) -> None:
    state.ledger = Lanes(records=40, epochs=1, shard_records=10, lanes=2)
    first = join(state, 0)
    assert state.expected == {0: first.incarnation, 1: 0}
    second = join(state, 1)
    state.drop(0, "lost")
    assert state.expected == {0: 0, 1: second.incarnation}


def test_before_there_is_a_model_shards_are_told_who_brings_it() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    assert state.expected == {}
    stay = state.members.join(4, pid=1, host="here", version=0, now=0)
    state.initialiser = 4
    assert state.expected == {4: stay.incarnation}
    state.drop(4, "lost")
    assert state.expected == {}


def test_who_keeps_others_waiting_is_hung(state: JobState) -> None:
    limit = timedelta(seconds=10)
    first, second = two(state)
    assert [state.hung(now, limit) for now in (0, 100)] == [{}, {}], "nobody waits: no step is finished"
    finish(state, first)
    assert [state.hung(now, limit) for now in (200, 210, 211)] == [{}, {}, {1: 11}]
    state.drop(0, "lost")
    assert state.hung(300, limit) == {}, "nobody waits any more"
    join(state, 2)
    assert [state.hung(now, limit) for now in (400, 411)] == [{}, {1: 11}], "a newcomer waits"
    state.drop(1, "hung", "why", 411)
    assert (
        state.member(second, 412).model_dump().items()
        >= {
            "state": "hung",
            "reason": "why",
            "gone_seconds": 1,
        }.items()
    )


def test_with_a_fixed_schedule_a_worker_that_takes_no_records_is_hung(state: JobState) -> None:
    state.ledger = Lanes(records=40, epochs=1, shard_records=10, lanes=3)
    first = join(state, 0)
    state.members.join(1, pid=1, host="here", version=0, now=0)
    finish(state, first)
    limit = timedelta(seconds=10)
    assert [state.hung(now, limit) for now in (0, 11)] == [{}, {1: 11}], "worker 2 is not here to be hung"


@pytest.mark.parametrize("lanes", [0, 2])
def test_what_is_foreseen_is_what_comes_and_nothing_changes_before(state: JobState, lanes: int) -> None:
    """A standby is told of a round before it is applied, and goes by that if nobody else is left."""
    tensors = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
    state.model = Model(partition(tensors, bucket_bytes=1024, shards=1), "SGD")
    if lanes:
        state.ledger = Lanes(1000, 1, 10, lanes)
    stays = [join(state, worker) for worker in range(2)]
    for stay in stays:
        state.rounds.admit(stay.worker, at_once=True)
    for stay in stays:
        finish(state, stay)
    state.drop(1, "lost")
    contributions = state.rounds.begin_commit()
    before = copy.deepcopy(state.to_checkpoint())
    foreseen = state.foreseen(contributions, decided=7.0)
    assert state.to_checkpoint() == before
    state.book(contributions, 7.0, decided=7.0)
    assert state.to_checkpoint() == foreseen
    assert foreseen["round"]["version"] == 1
    assert len(foreseen["round"]["contributions"]) == 2


def bounded(*workers: int) -> tuple[JobState, list[Stay]]:
    consistency = Consistency(mode="bounded", max_staleness=8)
    state = JobState(term=1, lease=timedelta(seconds=10), consistency=consistency, initialised=True)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    return state, [join(state, worker) for worker in workers]


def bounded_step(state: JobState, stay: Stay, *, schedule: int) -> str:
    """A round of the worker's step alone; returns the settings that it was made with."""
    assert state.begin(stay, version=state.version, step=stay.last_step + 1) is Entry.IN
    done = replace(contribution(state, stay, step=stay.last_step + 1), settings=str(schedule))
    state.rounds.finish(done, version=state.version, attempt=state.rounds.attempt)
    contributions = state.rounds.begin_commit()
    settings = state.settings_of(contributions)
    state.book(contributions, 0, decided=0)
    state.take(stay.worker, stay.incarnation, 10)
    return settings


def test_workers_that_take_turns_both_step_the_schedule() -> None:
    state, (first, second) = bounded(0, 1)
    made = [bounded_step(state, stay, schedule=schedule) for schedule in range(3) for stay in (second, first)]
    assert made == ["0", "", "1", "", "2", ""]


def test_a_slow_worker_does_not_take_the_schedule_back_even_when_the_fast_ones_wait_for_records() -> None:
    state, (fast, slow) = bounded(0, 1)
    assert [bounded_step(state, fast, schedule=schedule) for schedule in range(3)] == ["0", "1", "2"]
    state.give_back(fast.incarnation)
    state.rounds.withdraw(0)
    assert bounded_step(state, slow, schedule=0) == ""
    state.drop(0, "left")
    assert bounded_step(state, slow, schedule=1) == "1", "it is the one that has made most steps now"


def test_with_bounded_staleness_only_who_holds_others_up_is_hung() -> None:
    limit = timedelta(seconds=5)
    state, (sends, done, asks) = bounded(0, 1, 2)
    for stay in (sends, done):
        assert state.begin(stay, version=0, step=0) is Entry.IN
    finish(state, done)
    assert state.begin(asks, version=0, step=0) is Entry.LATER
    state.starved.add(done.worker)
    assert state.hung(0, limit) == {}
    assert state.hung(9, limit) == {0: 9}
    state.drop(1, "lost")
    assert state.hung(20, limit) == {0: 20}, "the one that asks waits for it, too"


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_stopped_training_is_over_when_nobody_computes(state: JobState, lanes: int) -> None:
    """With a fixed schedule the round does not wait for workers that have records left."""
    if lanes:
        state.ledger = Lanes(1000, 1, 10, lanes)
    stays = [join(state, worker) for worker in range(2)]
    state.stopped = "no improvement"
    assert not state.finished
    assert state.take(0, stays[0].incarnation, 10) == []
    state.stop_computing(stays[0], abandoned=False)
    assert not state.finished, "worker 1 is in the middle of a step"
    state.rounds.finish(contribution(state, stays[1]), version=0, attempt=0)
    assert state.ready
    state.book(state.rounds.begin_commit(), 0, decided=0)
    state.stop_computing(stays[1], abandoned=False)
    assert state.finished
    assert state.progress(0, None).stopped == "no improvement"


def test_who_begins_a_step_when_a_stopped_training_is_over_is_late(state: JobState) -> None:
    stay = join(state, 0)
    state.stopped = "no improvement"
    state.stop_computing(stay, abandoned=False)
    assert state.begin(stay, version=0, step=0) is Entry.LATE


def test_a_checkpoint_knows_what_scripts_have_asked_for(state: JobState) -> None:
    tensors = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
    model = state.model = Model(partition(tensors, bucket_bytes=1024, shards=1), "SGD")
    state.stopped, state.assigned = "no improvement", 3
    again = JobState.from_checkpoint(
        state.to_checkpoint(),
        term=2,
        lease=timedelta(seconds=10),
        consistency=Consistency(),
        data=Data(),
        version=0,
        model=model,
    )
    assert again.stopped == "no improvement"
    assert again.finished
    assert again.assigned == 3


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"seed": 2}, "data.seed is 2, .* made with 1"),
        ({"seed": 1, "shuffle": False}, "data.shuffle is False"),
    ],
)
def test_a_checkpoint_goes_on_in_the_order_of_records_that_it_was_made_with(
    data: dict[str, Any], match: str
) -> None:
    """In another order records would be trained twice, and others never, in the epoch that is under way."""
    model = Model(
        partition((TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),), bucket_bytes=1024, shards=1), "SGD"
    )
    lease = timedelta(seconds=10)
    state = JobState(1, lease, data=Data(seed=1, shard_records=16), model=model, initialised=True)
    state.open_ledger(100, 1, lanes=0)

    def restored(data: Data) -> JobState:
        return JobState.from_checkpoint(
            state.to_checkpoint(),
            term=2,
            lease=lease,
            consistency=Consistency(),
            data=data,
            version=7,
            model=model,
        )

    ledger = restored(Data(seed=1, shard_records=8)).ledger
    assert isinstance(ledger, Ledger)
    assert ledger.shard_records == 8, "what may change"
    with pytest.raises(InvalidJob, match=match):
        restored(Data(**data))


TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
MODEL = Model(partition(TENSORS, bucket_bytes=1024, shards=1), "SGD")


def committed(state: JobState, contributions: list[Contribution], now: float = 0.0) -> None:
    """The round of these steps is made."""
    for each in contributions:
        state.rounds.finish(each, version=state.version, attempt=state.rounds.attempt)
    state.book(state.rounds.begin_commit(), now, decided=now)


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_checkpoint_holds_all_that_the_job_goes_on_with(lanes: int) -> None:
    state = JobState(1, timedelta(seconds=10), data=Data(shard_records=10), model=MODEL, initialised=True)
    state.open_ledger(100, 2, lanes=lanes)
    stays = [join(state, worker) for worker in range(2)] if lanes else [join(state, 0)]
    steps = [
        replace(contribution(state, stay), metrics={"loss": 1.0 + stay.worker, "accuracy": 0.5})
        for stay in stays
    ]
    committed(state, steps)
    state.drop(0, "left")
    state.chiefs = {0: 1, 1: 0}
    saved = json.loads(json.dumps(state.to_checkpoint()))
    again = JobState.from_checkpoint(
        saved,
        term=2,
        lease=timedelta(seconds=10),
        consistency=Consistency(),
        data=Data(shard_records=10),
        version=1,
        model=MODEL,
    )
    assert (again.version, again.term, again.initialised, again.resumed) == (1, 2, True, True)
    assert again.settings == state.settings
    assert (again.chiefs, again.stopped) == ({0: 1, 1: 0}, "")
    assert (again.metrics, again.loss.points) == (state.metrics, state.loss.points)
    assert again.last_round == json.loads(json.dumps(state.last_round))
    assert isinstance(again.ledger, Lanes if lanes else Ledger)
    assert state.ledger is not None
    assert again.ledger.applied == state.ledger.applied == 10 * len(stays)
    outcomes = {stay.worker: stay.outcome for stay in again.members.stays()}
    assert outcomes == ({0: "left", 1: "lost"} if lanes else {0: "left"})
    assert not again.members.live
    assert again.members.last_incarnation == 2 << 32, "no incarnation is given twice"
    again.resumed = False
    assert again.to_checkpoint().keys() == saved.keys()


def test_the_loss_of_a_version_is_the_mean_over_its_samples(state: JobState) -> None:
    first, second = two(state)
    steps = [contribution(state, stay) for stay in (first, second)]
    steps = [
        replace(steps[0], samples=10, metrics={"loss": 1.0, "a": 1.0}),
        replace(steps[1], samples=30, metrics={"loss": 2.0, "b": 2.0}),
    ]
    committed(state, steps)
    assert state.loss.points == [(2, 1.75)]
    assert state.metrics == {"a": 1.0, "b": 2.0}
    committed(state, [contribution(state, first, step=1), contribution(state, second, step=1)])
    assert len(state.loss.points) == 1, "nobody reported one"


def test_progress_in_numbers(state: JobState) -> None:
    assert JobState(term=1, lease=timedelta(seconds=1)).progress(0.0, None).records_expected is None
    state.ledger = Ledger(records=40, epochs=2, shard_records=10)
    stay = join(state, 0)
    for number in range(3):
        committed(state, [contribution(state, stay, step=number)], now=float(number))
        state.take(0, stay.incarnation, 10)
    progress = state.progress(2.0, (3, 1_700_000_000.0))
    assert (progress.version, progress.epoch, progress.epochs) == (3, 0, 2)
    assert (progress.records_applied, progress.records_expected, progress.percent) == (30, 80, 37)
    assert progress.samples_per_second == pytest.approx(10.0)
    assert progress.eta_seconds == 5
    assert (progress.durable_version, progress.durable_time) == (3, "2023-11-14T22:13:20Z")
    assert not progress.finished
    assert stay.records == 30
    assert stay.steps == 3
    for number in range(3, 8):
        committed(state, [contribution(state, stay, step=number)], now=float(number))
        state.take(0, stay.incarnation, 10)
    progress = state.progress(7.0, None)
    assert (progress.percent, progress.epoch, progress.eta_seconds) == (100, 2, 0)
    assert progress.finished
    assert (progress.durable_version, progress.durable_time) == (None, None)


def test_what_a_member_is_said_to_do() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    state.initialiser = 0
    stay = state.members.join(0, pid=7, host="here", version=0, now=0.0)
    assert state.member(stay, 1.0).state == "joining"
    state.initialiser, state.initialised = None, True
    assert state.member(stay, 1.0).state == "idle"
    state.ledger = Ledger(records=100, epochs=1, shard_records=10)
    state.take(0, stay.incarnation, 10)
    state.admit(0)
    member = state.member(stay, 1.0)
    assert (member.state, member.worker, member.pid, member.host) == ("training", 0, 7, "here")
    assert (member.joined_version, member.left_version, member.gone_seconds) == (0, None, None)
    other = join(state, 1)
    assert other.worker in state.rounds.waiting
    assert state.member(other, 1.0).state == "training", "from the next round on"
    state.drop(0, "hung", "it kept the others waiting", 3.0)
    member = state.member(stay, 5.0)
    assert (member.state, member.reason, member.gone_seconds) == ("hung", "it kept the others waiting", 2.0)
    assert member.left_version == 0


def test_the_settings_of_the_worker_that_has_made_most_steps_are_in_force(state: JobState) -> None:
    first, second = two(state)
    ours = Settings(({"lr": 0.5},)).to_json()
    theirs = Settings(({"lr": 0.25},)).to_json()
    steps = [
        replace(contribution(state, second), settings=theirs),
        replace(contribution(state, first), settings=ours),
    ]
    assert state.settings_of(steps) == ours
    after = state.settings_after(steps)
    assert after.groups == ({"lr": 0.5},)
    assert (after.position.samples, after.position.epochs) == (30, 0)
    assert state.settings_after(steps[:1]).groups == ({"lr": 0.25},)
    assert state.version == 1, "nothing has changed by asking"
    assert state.ledger is not None
    assert state.ledger.applied == 10


def test_a_resumed_job_may_train_more_epochs_and_nothing_else() -> None:
    state = JobState(1, timedelta(seconds=10), model=MODEL, initialised=True)
    state.open_ledger(100, 2, lanes=0)
    state.stopped, state.resumed = "no improvement", True
    assert "may train more epochs, not fewer" in state.match_ledger(100, 1)
    assert "has 99 records for 2 epochs" in state.match_ledger(99, 2)
    assert state.stopped == "no improvement"
    assert state.match_ledger(100, 5) == ""
    assert not state.stopped, "the end is another one"
    assert not state.resumed
    wrong = state.match_ledger(100, 6)
    assert wrong.endswith("the job trains 100 records for 5 epochs"), "it is not resumed any more"


def test_nobody_brings_a_second_model_while_the_first_arrives() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    assert state.may_join
    state.initialiser = 0
    assert not state.may_join
    state.initialiser, state.arrived = None, True
    assert not state.may_join
    state.initialised = True
    assert state.may_join


def test_a_late_copy_of_an_older_step_s_begin_is_refused() -> None:
    state = JobState(1, timedelta(seconds=10), consistency=Consistency(backup_workers=1), initialised=True)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    stay = join(state, 0)
    join(state, 1)
    assert state.begin(stay, version=0, step=4) is Entry.IN
    for old in (3, -1):
        with pytest.raises(Refused, match="has begun step 4 since") as refused:
            state.begin(stay, version=0, step=old)
        assert refused.value.code is RefusalCode.STALE_CALL
    assert state.begin(stay, version=0, step=4) is Entry.IN


def test_when_a_decided_round_starts_again_the_records_of_who_has_gone_go_to_others(state: JobState) -> None:
    first, second = join(state, 0), join(state, 1)
    done = finish(state, first)
    state.rounds.begin_commit()
    state.drop(0, "lost")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == list(done.records), "they may be in the model"
    state.rounds.committing = False
    state.restart_round()
    assert state.ledger.held(first.incarnation) == []
    assert state.take(1, second.incarnation, 10) == list(done.records)


def test_who_abandons_a_step_makes_the_steps_of_who_has_gone_void(state: JobState) -> None:
    first, second = two(state)
    done = finish(state, first)
    state.drop(0, "lost")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == list(done.records)
    state.stop_computing(second, abandoned=True)
    assert state.rounds.attempt == 1
    assert state.ledger.held(first.incarnation) == []
    assert state.ledger.held(second.incarnation) == []


def test_a_schedule_counts_steps_also_without_a_data_set() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10), initialised=True)
    stay = state.members.join(0, pid=1, host="here", version=0, now=0)
    sent = Settings(({"lr": 0.5},))
    step = Contribution(worker=0, incarnation=stay.incarnation, step=0, samples=1, settings=sent.to_json())
    for version in (1, 2):
        state.settings = state.settings_after([step])
        assert state.settings.groups == ({"lr": 0.5},)
        assert state.settings.position == Position(version)
