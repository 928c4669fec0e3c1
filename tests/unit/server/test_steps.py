"""Shard 0's coordinator with shards that only take notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elastic_ps.core.consistency import Contribution, Phase
from elastic_ps.core.membership import Member
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ConnectionLost, RefusalCode, Refused
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.limits import ServerLimits
from elastic_ps.server.orders import Advance, Report
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import ranges_from_message
from tests.testing.coordinator import (
    SOON,
    Asked,
    Notes,
    at_version,
    finish,
    join,
    running,
    start,
    take,
    waits,
)
from tests.testing.polling import LIMIT, eventually


@pytest.fixture
def shard() -> Notes:
    return Notes()


soon = pytest.mark.parametrize("limits", [SOON], ids=["soon"])


@pytest.fixture
def coordinator(shard: Notes, limits: ServerLimits) -> Iterator[Asked]:
    with running([shard], limits=limits) as coordinator:
        yield coordinator


def test_one_worker_initialises_the_model_also_when_two_come_at_once(shard: Notes) -> None:
    """Else the second one's values overwrite the first one's when training has begun."""
    joined: dict[int, pb.JoinReply] = {}
    configured, second_has_joined = threading.Event(), threading.Event()

    class Slow(CommitCoordinator):
        """The model is laid out, and the worker has not been answered yet."""

        def configure(self, *arguments: Any, **named: Any) -> None:
            super().configure(*arguments, **named)
            configured.set()
            assert second_has_joined.wait(10)

    with running([shard], orders=Slow) as coordinator:
        first = threading.Thread(target=lambda: joined.update({0: join(coordinator, 0)}))
        first.start()
        assert configured.wait(10)
        joined[1] = join(coordinator, 1)
        second_has_joined.set()
        first.join(20)
    assert waits(joined[0])
    assert not joined[1].pending
    assert joined[1].initialise


@pytest.mark.parametrize(
    "groups", [(), ({"lr": None},), ({"lr": float("nan")},), ({"lr": 0.1, "params": []},)]
)
def test_settings_that_no_optimizer_can_step_with_are_refused_before_the_round_is_decided(
    coordinator: Asked, shard: Notes, groups: tuple[dict[str, Any], ...]
) -> None:
    """A shard would fail in the middle of the optimizer's step, and every worker with it."""
    member = start(coordinator)
    taken = take(coordinator, member, call=1)

    def finish(settings: Settings) -> bool:
        contribution = Contribution(
            worker=0,
            incarnation=member.incarnation,
            step=0,
            samples=10,
            records=ranges_from_message(taken.ranges),
            settings=settings.to_json(),
        )
        return coordinator.finish(contribution, version=0, attempt=0)

    with pytest.raises(Refused, match=r"parameter groups|lr|params") as refused:
        finish(Settings(groups))
    assert refused.value.code is RefusalCode.INVALID
    assert not shard.applied
    assert finish(Settings(({"lr": 0.05},)))
    assert shard.applied == [1]


def refused_with(code: RefusalCode) -> Callable[[Advance], None]:
    def refuse(advance: Advance) -> None:
        if advance.apply is not None:
            raise Refused(code, "made up")

    return refuse


def test_no_shard_applies_a_round_that_one_of_them_cannot() -> None:
    """Else some are a version ahead, for good."""
    shards = [Notes(), Notes(), Notes()]
    with running(shards) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        shards[2].refuse = refused_with(RefusalCode.INVALID)
        finish(coordinator, member, taken)
        assert [shard.applied for shard in shards] == [[], [], []]
        eventually(lambda: shards[0].orders[-1].attempt == 1, "the round has started again")
        assert coordinator.job.state.version == 0
        shards[2].refuse = lambda _: None
        finish(coordinator, member, taken)
        eventually(lambda: coordinator.job.state.version == 1, "it is committed")
        assert [shard.applied for shard in shards] == [[1], [1], [1]]


def test_a_round_that_all_can_apply_is_applied_whatever_becomes_of_the_answers() -> None:
    """It is not started again: a shard may have applied it."""
    shards = [Notes(), Notes()]
    with running(shards) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)

        def lose(advance: Advance) -> None:
            if advance.apply is not None and not advance.prepare and len(shards[1].applied) < 3:
                raise ConnectionLost("reset before the answer")

        shards[1].refuse = lose
        finish(coordinator, member, taken)
        eventually(lambda: coordinator.job.state.version == 1, "the round is committed")
        assert shards[1].applied == [1, 1, 1]
        assert shards[0].applied == [1]
        assert {order.attempt for order in shards[1].orders} == {0}


def test_the_norm_that_is_clipped_is_over_all_shards_also_when_one_has_made_the_version() -> None:
    """A shard that has made it has no sums any more, so its second answer tells nothing."""

    class Measuring(Notes):
        def __init__(self, norm: float) -> None:
            super().__init__()
            self.norm = norm

        def advance(self, advance: Advance) -> Report:
            return replace(super().advance(advance), norm=0.0 if self.applied else self.norm)

    settings = Settings(({"lr": 0.1, "max_grad_norm": 1.0},))
    shards = [Measuring(3.0), Measuring(4.0)]
    with running(shards) as coordinator:
        member = start(coordinator, settings=settings)
        taken = take(coordinator, member, call=1)

        def lose(advance: Advance) -> None:
            if advance.apply is not None and not advance.prepare and len(shards[1].applied) < 3:
                raise ConnectionLost("reset before the answer")

        shards[1].refuse = lose
        finish(coordinator, member, taken, settings=settings)
        eventually(lambda: coordinator.job.state.version == 1, "the round is committed")
    applied = [order.apply for shard in shards for order in shard.orders if not order.prepare]
    assert [apply.norm for apply in applied if apply is not None] == [5.0] * 4


@pytest.mark.parametrize("code", [RefusalCode.INVALID, RefusalCode.NOT_READY])
def test_a_shard_that_refuses_what_it_voted_for_has_lost_the_model(code: RefusalCode) -> None:
    """The others may have applied the round, so that it can neither go on nor start again."""
    shards = [Notes(), Notes()]
    with running(shards) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        shards[1].refuse = lambda a: refused_with(code)(a) if not a.prepare else None
        finish(coordinator, member, taken)
        eventually(lambda: coordinator.job.term == 2, "the job goes back")
        with pytest.raises(Refused):
            coordinator.heartbeat(member.worker, member.incarnation)


def test_an_answer_that_was_lost_is_given_again(coordinator: Asked) -> None:
    """A worker that asks again for records gets the same ones, whether it waits or not."""
    member = start(coordinator)
    first = take(coordinator, member, call=1)
    assert take(coordinator, member, call=1) == first
    more = take(coordinator, member, call=2, wait=False)
    assert take(coordinator, member, call=2, wait=False) == more
    assert more.ranges != first.ranges
    finish(coordinator, member, first)
    with pytest.raises(Refused) as refused:
        take(coordinator, member, call=1)
    assert refused.value.code is RefusalCode.STALE_CALL


def test_a_worker_that_is_admitted_does_not_wait_for_the_ticker() -> None:
    """It had waited for up to a quarter of a second before its first step, and whenever it had no records."""
    with running([Notes()], limits=ServerLimits(answer=timedelta(0), tick=timedelta(hours=1))) as coordinator:
        member = start(coordinator)
        for step in range(2):
            taken = take(coordinator, member, call=step + 1)
            assert not taken.pending
            finish(coordinator, member, taken, step=step)


def test_a_late_copy_of_a_call_does_not_take_a_worker_out_of_the_round(coordinator: Asked) -> None:
    """It has pushed to some shards already: the others would commit without it, and those refuse."""
    member = start(coordinator)
    taken = take(coordinator, member, call=1)
    take(coordinator, member, call=2, wait=False)
    for late in (
        lambda: take(coordinator, member, call=1),
        lambda: coordinator.release(0, member.incarnation, call=1),
    ):
        with pytest.raises(Refused) as refused:
            late()
        assert refused.value.code is RefusalCode.STALE_CALL
    assert coordinator.job.state.rounds.takes_part(0)
    assert finish(coordinator, member, taken), "it holds its records"


def is_late(coordinator: Asked, member: Member, *, version: int, step: int) -> bool:
    """Whether a worker comes too late with a step."""
    try:
        assert coordinator.begin(member.worker, member.incarnation, version=version, step=step) is not None
    except Refused as refusal:
        if refusal.code is not RefusalCode.LATE:
            raise
        return True
    return False


def holds(taken: pb.TakeReply, record: pb.Range) -> bool:
    return any(r.epoch == record.epoch and r.start <= record.start < r.stop for r in taken.ranges)


@pytest.mark.parametrize(
    "consistency",
    [{"backupWorkers": 1}, {"mode": "accumulate", "gradients": 1}],
    ids=["backup", "accumulate"],
)
def test_records_that_came_too_late_twice_have_a_place_in_their_round(consistency: dict[str, Any]) -> None:
    """They would be handed out and dropped again for as long as others are faster."""
    with running([Notes()], consistency=consistency, data={"shardRecords": 10}) as coordinator:
        members = [start(coordinator, worker) for worker in (0, 1)]
        steps, calls = [0, 0], [1, 1]
        hands = [take(coordinator, member, call=1) for member in members]
        dropped = hands[1].ranges[0]
        for slow in (1, 0):
            fast = 1 - slow
            assert holds(hands[slow], dropped)
            version = coordinator.job.state.version
            assert not is_late(coordinator, members[fast], version=version, step=steps[fast])
            assert is_late(coordinator, members[slow], version=version, step=steps[slow])
            assert finish(coordinator, members[fast], hands[fast], step=steps[fast])
            for worker in (slow, fast):
                steps[worker] += 1
                calls[worker] += 1
                hands[worker] = take(coordinator, members[worker], call=calls[worker])
        assert holds(hands[1], dropped)
        version = coordinator.job.state.version
        assert is_late(coordinator, members[0], version=version, step=steps[0]), (
            "the place is the other one's"
        )
        assert not is_late(coordinator, members[1], version=version, step=steps[1])
        assert finish(coordinator, members[1], hands[1], step=steps[1])
        assert (dropped.epoch, dropped.start) not in coordinator.job.state.late_records.times


def test_records_that_were_late_and_then_skipped_are_forgotten() -> None:
    given: dict[str, Any] = {"consistency": {"backupWorkers": 1}, "data": {"shardRecords": 10}}
    with running([Notes()], **given) as coordinator:
        fast, slow = start(coordinator, 0), start(coordinator, 1)
        taken, dropped = take(coordinator, fast, call=1), take(coordinator, slow, call=1)
        assert not is_late(coordinator, fast, version=0, step=0)
        assert is_late(coordinator, slow, version=0, step=0)
        assert coordinator.job.state.late_records.times
        assert finish(coordinator, fast, taken)
        again = take(coordinator, fast, call=2)
        assert holds(again, dropped.ranges[0])
        take(coordinator, fast, call=3, skipped=again.ranges)
        assert not coordinator.job.state.late_records.times


def test_a_script_that_skips_a_step_which_was_late_leaves_its_records_to_others() -> None:
    """Its worker learns of the refusal on another thread, maybe after the script has called `skip`."""
    with running([Notes()], consistency={"backupWorkers": 1}) as coordinator:
        first, late = start(coordinator, 0), start(coordinator, 1)
        taken = {member.worker: take(coordinator, member, call=1) for member in (first, late)}
        assert coordinator.begin(0, first.incarnation, version=0, step=0) is not None
        with pytest.raises(Refused) as refused:
            coordinator.begin(1, late.incarnation, version=0, step=0)
        assert refused.value.code is RefusalCode.LATE
        assert finish(coordinator, first, taken[0])
        again = take(coordinator, late, call=2, skipped=taken[1].ranges, abandoned=True)
        assert again.ranges, "it is given records again"
        assert coordinator.job.state.ledger is not None
        assert coordinator.job.state.ledger.skipped == 0


def test_a_process_that_was_replaced_does_not_expel_the_one_in_its_place(coordinator: Asked) -> None:
    """Both have the pid and the host of a pod of that name."""
    start(coordinator, instance="old", call=1)
    member = start(coordinator, instance="new", call=1)
    with pytest.raises(Refused) as refused:
        join(coordinator, 0, instance="old", call=2)
    assert refused.value.code is RefusalCode.SUPERSEDED
    coordinator.gone(0, "old")
    coordinator.heartbeat(0, member.incarnation)
    coordinator.gone(0, "new")
    with pytest.raises(Refused):
        coordinator.heartbeat(0, member.incarnation)


def test_of_two_processes_that_join_as_one_worker_the_later_one_is_the_worker(shard: Notes) -> None:
    """The call of the first one, which may have died, is answered after the second one has joined."""
    joined: list[pb.JoinReply] = []

    class Slow(CommitCoordinator):
        def configure(self, *arguments: Any, **named: Any) -> None:
            super().configure(*arguments, **named)
            joined.append(join(asked, 0, instance="new", call=1))

    with running([shard], orders=Slow) as asked:
        with pytest.raises(Refused) as refused:
            join(asked, 0, instance="old", call=1)
        assert refused.value.code is RefusalCode.SUPERSEDED
        asked.initialised(0, joined[0].incarnation)
        assert asked.job.state.members.live[0].instance == "new"


def test_a_join_whose_answer_was_lost_is_answered_again(coordinator: Asked) -> None:
    member = start(coordinator, instance="a", call=1)
    again = join(coordinator, 0, instance="a", call=1)
    assert not again.pending
    assert again.incarnation == member.incarnation


def test_a_call_does_not_wait_for_ever_for_a_round_to_be_committed() -> None:
    """A shard that does not answer must not take the threads that answer workers, one after the other."""
    shards, go_on = [Notes(), Notes()], threading.Event()
    with running(shards, limits=ServerLimits(settled=timedelta(milliseconds=10))) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        shards[1].refuse = lambda a: None if a.apply is None else assert_(go_on.wait(10))
        commit = threading.Thread(target=finish, args=(coordinator, member, taken))
        commit.start()
        eventually(lambda: coordinator.job.state.rounds.committing, "the round is being committed")
        with pytest.raises(Refused, match="ask again") as refused:
            coordinator.is_applied(0, member.incarnation, 0)
        assert refused.value.code is RefusalCode.NOT_READY
        go_on.set()
        commit.join(LIMIT)
        eventually(lambda: coordinator.job.state.version == 1, "it is committed")
        assert coordinator.is_applied(0, member.incarnation, 0)


def assert_(true: bool) -> None:
    assert true


def test_the_model_stays_when_the_worker_that_brought_it_vanishes(coordinator: Asked) -> None:
    """It may be on disk already; another one that brings other values would train on from those."""
    first = join(coordinator, 0, instance="a", call=1)
    assert not first.pending
    assert first.initialise
    coordinator.initialised(0, first.incarnation)
    coordinator.gone(0, "a")
    second = join(coordinator, 1, instance="b", call=1)
    assert not second.pending
    assert not second.initialise


def test_one_worker_is_the_chief_and_who_takes_its_place_after_its_end_is_not(
    coordinator: Asked,
) -> None:
    members = [start(coordinator, worker, instance=f"{worker}-1", call=1) for worker in (0, 1)]
    ended: dict[int, pb.TakeReply] = {}
    call = 0
    while not ended.get(0):
        call += 1
        taken = take(coordinator, members[0], call=call)
        if taken.finished:
            ended[0] = taken
        else:
            finish(coordinator, members[0], taken, step=call)
    ended[1] = take(coordinator, members[1], call=1)
    assert ended[1].finished
    coordinator.leave(0, members[0].incarnation, call=call + 1)
    late = start(coordinator, 0, instance="0-2", call=1)
    assert [ended[0].chief, ended[1].chief, take(coordinator, late, call=1).chief] == [True, False, False]


def test_a_step_that_cannot_be_let_in_yet_is_asked_for_again() -> None:
    """The round has all the steps that it needs and is not committed yet."""
    shard = Notes()
    with running([shard], limits=SOON, consistency={"mode": "bounded", "maxStaleness": 2}) as coordinator:
        first, second = start(coordinator, 0), start(coordinator, 1)
        taken = take(coordinator, first, call=1)
        take(coordinator, second, call=1)
        assert coordinator.begin(0, first.incarnation, version=0, step=0) == pb.BeginReply(
            version=0, attempt=0
        )

        def lose(advance: Advance) -> None:
            if advance.apply is not None:
                raise ConnectionLost("reset")

        shard.refuse = lose
        finish(coordinator, first, taken)
        asked = coordinator.job.clock()
        assert coordinator.begin(1, second.incarnation, version=0, step=0) is None
        assert coordinator.job.clock() - asked >= 0.05, "it has waited, so that it does not ask all the time"
        shard.refuse = lambda _: None
        eventually(lambda: coordinator.job.state.version == 1, "the round is committed")
        eventually(
            lambda: (
                coordinator.begin(1, second.incarnation, version=0, step=0)
                == pb.BeginReply(version=1, attempt=0)
            ),
            "it is let in to the next one",
        )


def test_who_has_pulled_a_newer_version_holds_nobody_up() -> None:
    with running([Notes()], limits=SOON, consistency={"mode": "bounded", "maxStaleness": 1}) as coordinator:
        first, second = start(coordinator, 0), start(coordinator, 1)
        take(coordinator, second, call=1)
        for step in range(2):
            taken = take(coordinator, first, call=step + 1)
            assert coordinator.begin(0, first.incarnation, version=step, step=step) is not None
            finish(coordinator, first, taken, step=step)
        assert coordinator.job.state.version == 1, "the second's step would be too stale"
        coordinator.computes_on(1, second.incarnation, version=1)
        assert coordinator.job.state.version == 2
        with pytest.raises(Refused):
            coordinator.computes_on(1, second.incarnation + 1, version=2)


@pytest.mark.parametrize("refuses", [False, True], ids=["lost", "refused by a shard in the newer term"])
def test_a_join_whose_model_has_gone_meanwhile_is_asked_for_again(
    coordinator: Asked, shard: Notes, refuses: bool
) -> None:
    """A shard has lost it while it was laid out: the job goes back, to a state without a model."""

    def lose() -> None:
        with coordinator.job.changed:
            coordinator.job.state = coordinator.job.blank(2)
        if refuses:
            raise Refused(RefusalCode.STALE_TERM, "this is an order of term 1; term 2 gives the orders now")

    shard.lay_out = lose
    with pytest.raises(Refused, match="join again") as refused:
        join(coordinator, 0)
    assert refused.value.code is RefusalCode.NOT_READY
    shard.lay_out = lambda: None
    joined = join(coordinator, 0)
    assert not joined.pending
    assert (joined.initialise, joined.term) == (True, 2)


def test_the_model_that_was_brought_to_a_term_that_is_over_is_not_the_jobs(
    coordinator: Asked, shard: Notes
) -> None:
    joined = join(coordinator, 0)
    assert not joined.pending

    def lose(order: Advance) -> None:
        shard.refuse = lambda _: None
        with coordinator.job.changed:
            coordinator.job.state = coordinator.job.blank(2)

    shard.refuse = lose
    with pytest.raises(Refused, match="term 1 is over") as refused:
        coordinator.initialised(0, joined.incarnation)
    assert refused.value.code is RefusalCode.STALE_TERM


def test_a_worker_that_was_too_late_and_gets_no_records_is_not_expected_back() -> None:
    with running([Notes()], limits=SOON, consistency={"backupWorkers": 1}) as coordinator:
        first, late = start(coordinator, 0), start(coordinator, 1)
        taken = take(coordinator, first, call=1)
        take(coordinator, late, call=1)
        assert coordinator.begin(0, first.incarnation, version=0, step=0) is not None
        with pytest.raises(Refused):
            coordinator.begin(1, late.incarnation, version=0, step=0)
        call = 1
        while take(coordinator, first, call=(call := call + 1), wait=False).ranges:
            pass
        rounds = coordinator.job.state.rounds
        assert rounds.late_workers == {1}
        assert take(coordinator, late, call=2).pending
        assert rounds.late_workers == set()
        assert finish(coordinator, first, taken)


@soon
def test_a_worker_that_has_trained_waits_for_who_brings_the_model_anew(coordinator: Asked) -> None:
    """It would not be let in to bring its own, but it can go on with the other one's."""
    first = join(coordinator, 0)
    assert not first.pending
    assert waits(join(coordinator, 1, again=True))
    coordinator.initialised(0, first.incarnation)
    second = join(coordinator, 1, again=True)
    assert not second.pending
    assert not second.initialise


@soon
def test_a_worker_that_leaves_between_two_steps_does_not_make_the_others_push_again(
    coordinator: Asked,
) -> None:
    first, second = start(coordinator, 0), start(coordinator, 1)
    taken = take(coordinator, first, call=1)
    more = take(coordinator, first, call=2, wait=False)
    assert take(coordinator, second, call=1).pending, "it takes part from the next round on"
    finish(coordinator, first, taken)
    assert take(coordinator, second, call=1).version == 1
    coordinator.leave(1, second.incarnation, call=2)
    assert coordinator.job.state.rounds.attempt == 0
    assert finish(coordinator, first, at_version(more, 1), step=1)
    assert coordinator.job.state.version == 2


@soon
def test_whoever_waits_with_records_when_a_script_ends_the_training_gives_them_back(
    coordinator: Asked,
) -> None:
    first, second = start(coordinator, 0), start(coordinator, 1)
    taken = take(coordinator, first, call=1)
    assert take(coordinator, second, call=1).pending, "it takes part from the next round on"
    ledger = coordinator.job.state.ledger
    assert ledger is not None
    assert ledger.held(second.incarnation)
    coordinator.stop(0, first.incarnation, "good enough")
    assert take(coordinator, second, call=1).pending, "the last version is not made yet"
    assert not ledger.held(second.incarnation)
    assert ledger.held(first.incarnation) == list(ranges_from_message(taken.ranges)), "its step is made"


def test_two_steps_of_a_version_are_not_of_the_same_records() -> None:
    """No worker of ours says so. The version could not be booked, and the job would stand still."""
    shard = Notes()
    with running([shard], consistency={"mode": "accumulate", "gradients": 2}) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        for step in range(2):
            assert coordinator.begin(0, member.incarnation, version=0, step=step) is not None
            if not step:
                assert finish(coordinator, member, taken)
                assert not finish(coordinator, member, taken), "said twice, as its answer was lost"
                assert coordinator.await_version(0, member.incarnation, attempt=0, step=0)
        with pytest.raises(Refused) as caught:
            finish(coordinator, member, taken, step=1)
        assert caught.value.code is RefusalCode.INVALID
        more = take(coordinator, member, call=2)
        assert coordinator.begin(0, member.incarnation, version=0, step=1) is not None
        assert finish(coordinator, member, more, step=1)
        eventually(lambda: shard.applied == [1], "the version is made")


def test_the_shards_do_not_wait_for_who_was_admitted_when_a_script_ended_the_training() -> None:
    """In deterministic mode others could not push before it."""
    shard = Notes()
    with running([shard], consistency={"mode": "accumulate", "gradients": 4}) as coordinator:
        members = [start(coordinator, worker) for worker in (0, 1)]
        take(coordinator, members[1], call=1)

        def stop(advance: Advance) -> None:
            if 0 in advance.expected and not coordinator.job.state.stopped:
                coordinator.stop(1, members[1].incarnation, "it is good enough")

        shard.refuse = stop
        asking = threading.Thread(target=lambda: take(coordinator, members[0], call=1))
        asking.start()
        eventually(lambda: bool(coordinator.job.state.stopped), "worker 0 was admitted, and training ends")
        alone = {1: members[1].incarnation}
        eventually(lambda: shard.orders[-1].expected == alone, "the shard knows that worker 0 is out")
        asking.join(20)


def test_a_grace_period_ends_when_it_is_over_and_not_at_the_next_tick(shard: Notes) -> None:
    """Also in the rounds after the first one that has ended so."""
    consistency = {"mode": "local", "steps": 1, "quorum": 1, "grace": "20ms"}
    worker = {"replicas": 2, "minReplicas": 1}
    hour = ServerLimits(tick=timedelta(hours=1))
    with running([shard], limits=hour, consistency=consistency, worker=worker) as coordinator:
        quick, slow = (start(coordinator, worker) for worker in range(2))
        taken = take(coordinator, quick, call=1)
        take(coordinator, slow, call=1)
        for version in range(3):
            assert coordinator.begin(0, quick.incarnation, version=version, step=version) is not None
            assert finish(coordinator, quick, at_version(taken, version), step=version)
            eventually(lambda: len(shard.applied) > version, "the version is made")  # noqa: B023
            taken = take(coordinator, quick, call=version + 2, wait=False)


def test_a_grace_period_that_ends_while_the_ticker_is_busy_is_over_when_it_looks_again(
    coordinator: Asked,
) -> None:
    """What was left when it was looked at last is no time to wait for from now on."""
    job = coordinator.job
    with job.lock:
        job.grace_until = job.clock() + 1000
        assert 0 < job.until_next_look(timedelta(hours=1)) <= 1000
        job.grace_until = job.clock() - 1
        assert job.until_next_look(timedelta(hours=1)) == 0
        job.grace_until = None
        assert job.until_next_look(timedelta(hours=1)) == 3600


def test_a_round_that_is_being_committed_does_not_keep_the_ticker_awake(coordinator: Asked) -> None:
    job = coordinator.job
    with job.lock:
        job.grace_until, job.state.rounds.phase = job.clock(), Phase.COMMITTING
        job.ticking.notify_all()
    eventually(lambda: job.grace_until is None, "it does not look for the end of a grace period any more")
    with job.lock:
        job.state.rounds.phase = Phase.OPEN
