"""With a number of gradients for each version: what the coordinator tells a worker after its step."""

from __future__ import annotations

import pytest

from elastic_ps.core.membership import Member
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.coordinator import SOON, Asked, Notes, finish, running, start, take
from tests.testing.service import Worker, environment, serving


def accumulating(gradients: int) -> dict[str, object]:
    return {"mode": "accumulate", "gradients": gradients}


def step(coordinator: Asked, member: Member, taken: pb.TakeReply, number: int) -> None:
    """A step on what was taken, up to its end."""
    version = coordinator.job.state.version
    begun = coordinator.begin(member.worker, member.incarnation, version=version, step=number)
    assert begun == pb.BeginReply(version=version, attempt=coordinator.job.state.rounds.attempt)
    finish(coordinator, member, taken, step=number)


def test_a_worker_computes_another_step_while_the_version_lacks_some_and_pulls_when_it_is_made() -> None:
    with running([Notes()], limits=SOON, consistency=accumulating(2)) as coordinator:
        member = start(coordinator)
        taken = take(coordinator, member, call=1)
        step(coordinator, member, taken, 0)
        asked = {"attempt": 0, "step": 0}
        assert coordinator.await_version(0, member.incarnation, **asked) == pb.AwaitReply(compute=True)
        assert coordinator.await_version(0, member.incarnation, **asked) == pb.AwaitReply(compute=True), (
            "asked again"
        )
        more = take(coordinator, member, call=2, wait=False)
        step(coordinator, member, more, 1)
        assert coordinator.job.state.version == 1
        assert coordinator.await_version(0, member.incarnation, attempt=0, step=1) == pb.AwaitReply(made=True)


def test_a_worker_that_is_not_wanted_waits_for_the_others() -> None:
    with running([Notes()], limits=SOON, consistency=accumulating(2)) as coordinator:
        first, second = start(coordinator, 0), start(coordinator, 1)
        taken = {member.worker: take(coordinator, member, call=1) for member in (first, second)}
        step(coordinator, first, taken[0], 0)
        asked = coordinator.job.clock()
        assert coordinator.await_version(0, first.incarnation, attempt=0, step=0) is None
        assert coordinator.job.clock() - asked >= 0.05, "it has waited, so that it does not ask all the time"
        step(coordinator, second, taken[1], 0)
        assert coordinator.await_version(0, first.incarnation, attempt=0, step=0) == pb.AwaitReply(made=True)


def test_a_worker_whose_round_has_started_again_pushes_its_step_again() -> None:
    with running([Notes()], limits=SOON, consistency=accumulating(2)) as coordinator:
        first, second = (start(coordinator, worker, instance=str(worker), call=1) for worker in range(2))
        taken = {member.worker: take(coordinator, member, call=2) for member in (first, second)}
        step(coordinator, first, taken[0], 0)
        assert coordinator.begin(1, second.incarnation, version=0, step=0) is not None
        coordinator.gone(1, "1")
        assert coordinator.await_version(0, first.incarnation, attempt=0, step=0) == pb.AwaitReply(attempt=1)


def test_a_worker_that_takes_no_part_is_told_that_its_step_is_dropped() -> None:
    with running([Notes()], limits=SOON, consistency=accumulating(1)) as coordinator:
        first, late = start(coordinator, 0), start(coordinator, 1)
        taken = {member.worker: take(coordinator, member, call=1) for member in (first, late)}
        step(coordinator, first, taken[0], 0)
        with pytest.raises(Refused, match="worker 1 wants to push a step on version 0") as refused:
            coordinator.begin(1, late.incarnation, version=0, step=0)
        assert refused.value.code is RefusalCode.LATE
        assert "the round on version 1" in str(refused.value)
        with pytest.raises(Refused, match="step 0 of worker 1 is dropped") as refused:
            coordinator.await_version(1, late.incarnation, attempt=0, step=0)
        assert refused.value.code is RefusalCode.LATE


def test_a_second_step_on_a_version_is_not_measured() -> None:
    """It began when the first one was over, not with the version: the worker would seem to be slow."""
    with running([Notes()], limits=SOON, consistency=accumulating(2)) as coordinator:
        member = start(coordinator)
        pace = coordinator.job.state.pace
        step(coordinator, member, take(coordinator, member, call=1), 0)
        pace.opened([0], 0, beginning=[0])
        assert coordinator.await_version(0, member.incarnation, attempt=0, step=0) == pb.AwaitReply(
            compute=True
        )
        pace.finished(0, 0, 9)
        assert pace.slowness(0) is None


def test_a_job_that_has_fewer_steps_than_a_version_is_made_of_is_refused() -> None:
    with running([Notes()], limits=SOON, consistency=accumulating(11)) as coordinator:
        member = start(coordinator)
        with pytest.raises(Refused, match="gradients is 11, but the job has only 10 steps: 100 records"):
            take(coordinator, member, call=1)
    with running([Notes()], limits=SOON, consistency=accumulating(10)) as coordinator:
        assert take(coordinator, start(coordinator), call=1).ranges


def test_a_worker_is_told_over_the_wire_what_to_do_after_its_step() -> None:
    given = environment(consistency=accumulating(3), worker={"replicas": 2})
    with serving(given) as (listener, _):
        workers = [Worker(listener, index) for index in range(2)]
        for worker in workers:
            worker.start()
        taken = [worker.take(records=60) for worker in workers]

        def pushed(worker: Worker, number: int) -> None:
            request = pb.BeginRequest(caller=worker.caller(), version=0, step=number)
            begun = worker.answer(pb.BeginReply, request)
            assert (begun.pending, begun.version, begun.attempt) == (False, 0, 0)
            worker.push(number, 0, finish=worker.finishing(number, taken[worker.index]))

        def told(worker: Worker, number: int) -> pb.AwaitReply:
            return worker.answer(
                pb.AwaitReply, pb.AwaitRequest(caller=worker.caller(), attempt=0, step=number)
            )

        first, second = workers
        pushed(first, 0)
        assert told(first, 0) == pb.AwaitReply(compute=True)
        taken[0] = first.take(wait=False, records=60)
        pushed(first, 1)
        assert told(first, 1) == pb.AwaitReply(pending=True)
        pushed(second, 0)
        assert told(second, 0) == told(first, 1) == pb.AwaitReply(made=True)
