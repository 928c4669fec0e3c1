"""What shard 0 knows of a job: whose records stay where when workers vanish, come again, or repeat."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.status import Staleness
from elastic_ps.core.consistency import After, Contribution, Entry
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Member
from elastic_ps.core.settings import Position, Settings
from elastic_ps.core.stages import Stage, StageEvent
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.job import record, status
from elastic_ps.server.job.state import JobState
from tests.testing.state import (
    MODEL,
    contribution,
    finish,
    join,
    settings_after,
    settings_wanted,
    training,
    two,
)


@pytest.fixture
def state() -> JobState:
    return training()


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
    """The records of the finished step are those of its earlier incarnation, not of the later one."""
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
    state.ledger = FixedSchedule(records=40, epochs=1, shard_records=10, shares=2)
    first = join(state, 0)
    assert state.expected == {0: first.incarnation, 1: 0}
    second = join(state, 1)
    state.drop(0, "lost")
    assert state.expected == {0: 0, 1: second.incarnation}


def test_before_there_is_a_model_shards_are_told_who_brings_it() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    assert state.expected == {}
    member = state.members.join(4, pid=1, host="here", version=0, now=0)
    state.note(StageEvent.CONFIGURE)
    state.note(StageEvent.LAY_OUT)
    state.note(StageEvent.BRING, initialiser=4)
    assert state.expected == {4: member.incarnation}
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
        status.member_status(state, second, 412).model_dump().items()
        >= {
            "state": "hung",
            "reason": "why",
            "gone_seconds": 1,
        }.items()
    )


def test_who_waits_for_its_turn_keeps_nobody_waiting(state: JobState) -> None:
    limit = timedelta(seconds=10)
    first, _ = two(state)
    assert [state.hung(now, limit, queued={1}) for now in (0, 11)] == [{}, {0: 11}]
    finish(state, first)
    assert [state.hung(now, limit, queued={1}) for now in (20, 31)] == [{}, {}]


@pytest.mark.parametrize(
    "consistency",
    [Consistency(global_batch_size=40), Consistency(mode="accumulate", gradients=4)],
    ids=["sync", "accumulate"],
)
def test_each_step_of_a_version_has_the_whole_time_limit(consistency: Consistency) -> None:
    """Worker 1 waits for records while worker 0 makes several steps."""
    limit = timedelta(seconds=10)
    state = JobState(term=1, lease=limit, consistency=consistency, stage=Stage.TRAINING)
    state.open_ledger(records=1000, epochs=1, shares=0)
    first = join(state, 0)
    state.take(0, first.incarnation, 10)
    state.members.join(1, pid=1, host="here", version=0, now=0)
    state.starved.add(1)
    assert state.hung(0, limit) == {}
    for step, now in enumerate((9, 18, 27)):
        held = state.to_compute_on(first.incarnation)[0]
        done = contribution(state, first, step=step)
        done = replace(done, records=(held._replace(stop=held.start + 10),))
        state.rounds.begin(0, version=0)
        state.rounds.finish(done, version=0, attempt=0)
        assert state.after_step(first, attempt=0, step=step, now=now) is After.COMPUTE
        state.take(0, first.incarnation, 10)
        assert state.hung(now + 3, limit) == {}
    assert state.hung(41, limit) == {0: 11}, "since 30, when somebody looked"


def test_with_a_fixed_schedule_a_worker_that_takes_no_records_is_hung(state: JobState) -> None:
    state.ledger = FixedSchedule(records=40, epochs=1, shard_records=10, shares=3)
    first = join(state, 0)
    state.members.join(1, pid=1, host="here", version=0, now=0)
    finish(state, first)
    limit = timedelta(seconds=10)
    assert [state.hung(now, limit) for now in (0, 11)] == [{}, {1: 11}], "worker 2 is not here to be hung"


def bounded(*workers: int) -> tuple[JobState, list[Member]]:
    consistency = Consistency(mode="bounded", max_staleness=8)
    state = JobState(term=1, lease=timedelta(seconds=10), consistency=consistency, stage=Stage.TRAINING)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    return state, [join(state, worker) for worker in workers]


def bounded_step(state: JobState, member: Member, *, schedule: int | str) -> str:
    """A round of the worker's step alone; returns the settings that it was made with."""
    assert state.begin(member, version=state.version, step=member.last_step + 1) is Entry.IN
    done = replace(contribution(state, member, step=member.last_step + 1), settings=str(schedule))
    state.rounds.finish(done, version=state.version, attempt=state.rounds.attempt)
    contributions = state.rounds.begin_commit()
    settings = settings_wanted(state, contributions)
    state.book(contributions, 0, decided=0)
    state.take(member.worker, member.incarnation, 10)
    return settings


def test_workers_that_take_turns_both_step_the_schedule() -> None:
    state, (first, second) = bounded(0, 1)
    made = [
        bounded_step(state, member, schedule=schedule) for schedule in range(3) for member in (second, first)
    ]
    assert made == ["0", "", "1", "", "2", ""]


def test_a_slow_worker_does_not_take_the_schedule_back_even_when_the_fast_ones_wait_for_records() -> None:
    state, (fast, slow) = bounded(0, 1)
    assert [bounded_step(state, fast, schedule=schedule) for schedule in range(3)] == ["0", "1", "2"]
    state.give_back(fast.incarnation)
    state.rounds.withdraw(0)
    assert bounded_step(state, slow, schedule=0) == ""
    state.drop(0, "left")
    assert bounded_step(state, slow, schedule=1) == "1", "it is the one that has made most steps now"


def test_the_schedule_goes_on_while_the_worker_with_the_most_steps_is_away() -> None:
    def after(steps: int) -> Settings:
        return Settings(({"lr": 1 / steps},), ({"steps": steps, "heeds": 0, "heeded": -1, "state": {}},))

    state, (fast, slow) = bounded(0, 1)
    for steps in (1, 2, 3):
        asked = after(steps).to_json()
        assert bounded_step(state, fast, schedule=asked) == asked
        state.settings = after(steps)
    state.rounds.withdraw(0)
    assert [bounded_step(state, slow, schedule=after(steps).to_json()) for steps in (2, 3)] == ["", ""]
    assert bounded_step(state, slow, schedule=after(4).to_json()) == after(4).to_json()
    state.settings = after(4)
    state.rounds.admit(0)
    assert bounded_step(state, fast, schedule=after(3).to_json()) == "", "it was away, and is behind"


def test_how_stale_steps_were_is_told_and_outlives_the_parameter_server() -> None:
    state, (fast, slow) = bounded(0, 1)
    assert status.progress(state, 0, None).staleness is None
    state.model = MODEL
    for _ in range(6):
        bounded_step(state, fast, schedule=0)
    assert state.begin(slow, version=0, step=0) is Entry.IN
    finish(state, slow)
    state.book(state.begin_commit(), 0, decided=0)
    saved = json.loads(json.dumps(record.to_checkpoint(state)))
    after = record.JobRecord.read({**saved, "settings": Settings(groups=()).to_json()}).continued(
        term=2,
        lease=state.lease,
        consistency=state.consistency,
        data=state.data,
        version=7,
        model=MODEL,
    )
    for each in (state, after):
        assert status.progress(each, 0, None).staleness == Staleness(p50=0, p99=6, max=6)


@pytest.mark.parametrize(
    ("scale", "rate", "momentum"), [("none", 0.1, 0.9), ("inverse", 0.025, 0.9), (None, 0.025, 9 / 13)]
)
def test_a_stale_step_is_made_with_a_lower_rate_and_less_momentum(
    scale: str | None, rate: float, momentum: float
) -> None:
    consistency = Consistency(mode="async", staleness_scale=scale)
    state = JobState(term=1, lease=timedelta(seconds=10), consistency=consistency, stage=Stage.TRAINING)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    state.settings = asked = Settings(groups=({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.0}))
    fast, slow = join(state, 0), join(state, 1)
    made = []
    for step, member in enumerate((fast, fast, fast, slow)):
        version = 0 if member is slow else state.version
        assert state.begin(member, version=version, step=step) is Entry.IN
        finish(state, member, step=step)
        contributions = state.rounds.begin_commit()
        made.append(state.settings_to_step_with(contributions))
        state.book(contributions, 0, decided=0)
        state.take(member.worker, member.incarnation, 10)
        state.rounds.computes_on(member.worker, state.version)
    assert made[:3] == [asked] * 3
    with_momentum, without = made[3].groups
    assert (with_momentum["lr"], with_momentum["momentum"]) == (pytest.approx(rate), pytest.approx(momentum))
    assert (without["lr"], without["momentum"]) == (pytest.approx(rate), 0)
    assert state.settings.groups == asked.groups, "a schedule goes on from the whole rate"


def test_with_bounded_staleness_only_who_holds_others_up_is_hung() -> None:
    limit = timedelta(seconds=5)
    state, (sends, done, asks) = bounded(0, 1, 2)
    for member in (sends, done):
        assert state.begin(member, version=0, step=0) is Entry.IN
    finish(state, done)
    assert state.begin(asks, version=0, step=0) is Entry.WAIT
    state.starved.add(done.worker)
    assert state.hung(0, limit) == {}
    assert state.hung(9, limit) == {0: 9}
    state.drop(1, "lost")
    assert state.hung(20, limit) == {0: 20}, "the one that asks waits for it, too"


@pytest.mark.parametrize("shares", [0, 2])
def test_a_stopped_training_is_over_when_nobody_computes(state: JobState, shares: int) -> None:
    """With a fixed schedule the round does not wait for workers that have records left."""
    if shares:
        state.ledger = FixedSchedule(1000, 1, 10, shares)
    members = [join(state, worker) for worker in range(2)]
    assert status.progress(state, 0, None).open_shares == [*range(shares)]
    state.stopped = "no improvement"
    assert not state.finished
    assert state.take(0, members[0].incarnation, 10) == []
    state.stop_computing(members[0], abandoned=False)
    assert not state.finished, "worker 1 is in the middle of a step"
    state.rounds.finish(contribution(state, members[1]), version=0, attempt=0)
    assert state.ready
    state.book(state.rounds.begin_commit(), 0, decided=0)
    state.stop_computing(members[1], abandoned=False)
    assert state.finished
    assert status.progress(state, 0, None).stopped == "no improvement"


def test_who_begins_a_step_when_a_stopped_training_is_over_is_late(state: JobState) -> None:
    member = join(state, 0)
    state.stopped = "no improvement"
    state.stop_computing(member, abandoned=False)
    assert state.begin(member, version=0, step=0) is Entry.LATE


def test_a_step_counts_although_its_worker_has_ended_and_is_not_remembered(state: JobState) -> None:
    first, second = two(state)
    for member in (first, second):
        finish(state, member, step=1)
    contributions = state.begin_commit()
    state.members.keep_departed = 1
    for member in (first, second, state.members.join(2, pid=2, host="here", version=1, now=0)):
        state.members.remove(member.worker, outcome="lost", version=1)
    state.decide_settings(contributions)
    state.book(contributions, 0, decided=0)
    assert state.version == 2


def heeding(evaluations: int) -> Settings:
    return Settings(({"lr": 0.5},), ({"steps": 0, "heeds": evaluations, "state": {}},))


def test_the_settings_that_have_heeded_most_evaluations_are_in_force(state: JobState) -> None:
    first, second = two(state)
    steps = [
        replace(contribution(state, second), settings=heeding(2).to_json()),
        replace(contribution(state, first), settings=heeding(1).to_json()),
    ]
    assert settings_wanted(state, steps) == heeding(2).to_json()
    assert settings_wanted(state, steps[1:]) == heeding(1).to_json()
    state.settings = heeding(2)
    assert settings_wanted(state, steps) == heeding(2).to_json()
    assert settings_wanted(state, steps[1:]) == "", "those in force"


def test_the_settings_of_the_worker_that_has_made_most_steps_are_in_force(state: JobState) -> None:
    first, second = two(state)
    ours = Settings(({"lr": 0.5},)).to_json()
    theirs = Settings(({"lr": 0.25},)).to_json()
    steps = [
        replace(contribution(state, second), settings=theirs),
        replace(contribution(state, first), settings=ours),
    ]
    assert settings_wanted(state, steps) == ours
    after = settings_after(state, steps)
    assert after.groups == ({"lr": 0.5},)
    assert (after.position.samples, after.position.epochs) == (30, 0)
    assert settings_after(state, steps[:1]).groups == ({"lr": 0.25},)
    assert state.version == 1, "nothing has changed by asking"
    assert state.ledger is not None
    assert state.ledger.applied == 10


def test_nobody_brings_a_second_model_while_the_first_arrives() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    assert state.may_join
    state.note(StageEvent.CONFIGURE)
    state.note(StageEvent.LAY_OUT)
    state.note(StageEvent.BRING, initialiser=0)
    assert not state.may_join
    state.note(StageEvent.ARRIVE)
    assert not state.may_join
    state.note(StageEvent.KEEP)
    assert state.may_join


def test_a_late_copy_of_an_older_step_s_begin_is_refused() -> None:
    state = JobState(
        1, timedelta(seconds=10), consistency=Consistency(backup_workers=1), stage=Stage.TRAINING
    )
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    member = join(state, 0)
    join(state, 1)
    assert state.begin(member, version=0, step=4) is Entry.IN
    for old in (3, -1):
        with pytest.raises(Refused, match="has begun step 4 since") as refused:
            state.begin(member, version=0, step=old)
        assert refused.value.code is RefusalCode.STALE_CALL
    assert state.begin(member, version=0, step=4) is Entry.IN


def test_when_a_decided_round_starts_again_the_records_of_who_has_gone_go_to_others(state: JobState) -> None:
    first, second = join(state, 0), join(state, 1)
    done = finish(state, first)
    state.rounds.begin_commit()
    state.drop(0, "lost")
    assert state.ledger is not None
    assert state.ledger.held(first.incarnation) == list(done.records), "they may be in the model"
    state.rounds.fail_commit()
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
    state = JobState(term=1, lease=timedelta(seconds=10), stage=Stage.TRAINING)
    member = state.members.join(0, pid=1, host="here", version=0, now=0)
    sent = Settings(({"lr": 0.5},))
    step = Contribution(worker=0, incarnation=member.incarnation, step=0, samples=1, settings=sent.to_json())
    for version in (1, 2):
        state.settings = settings_after(state, [step])
        assert state.settings.groups == ({"lr": 0.5},)
        assert state.settings.position == Position(version)
