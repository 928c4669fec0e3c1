"""Values that a script assigns become the job's next version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_ps.core.consistency import Contribution
from elastic_ps.core.membership import Member
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.orders import Advance
from elastic_ps.transport import messages_pb2 as pb
from tests.testing.coordinator import SOON, Asked, Notes, at_version, finish, running, start, take


@pytest.fixture
def shard() -> Notes:
    return Notes()


@pytest.fixture
def coordinator(shard: Notes) -> Iterator[Asked]:
    with running([shard]) as coordinator:
        yield coordinator


def assign(coordinator: Asked, member: Member, *, version: int, step: int) -> pb.AssignReply:
    """A worker whose values are those of `version` assigns others."""
    answer = coordinator.assign(member.worker, member.incarnation, version=version)
    assert answer is not None
    if answer.done:
        return answer
    contribution = Contribution(
        worker=member.worker, incarnation=member.incarnation, step=step, samples=1, assigns=True
    )
    assert coordinator.finish(contribution, version=answer.version, attempt=answer.attempt)
    done = coordinator.assign(member.worker, member.incarnation, version=version)
    assert done is not None
    return done


def test_values_are_assigned_once_and_the_records_of_others_go_back(coordinator: Asked, shard: Notes) -> None:
    first, second = start(coordinator, 0), start(coordinator, 1)
    taken = take(coordinator, first, call=1)
    done = assign(coordinator, second, version=0, step=0)
    assert (done.done, done.version, done.takes_part) == (True, 1, False)
    apply = next(order.apply for order in shard.orders if order.apply is not None)
    assert apply.assigns
    assert apply.contributors == [(1, second.incarnation, 0)]
    with pytest.raises(Refused) as refused:
        finish(coordinator, first, taken)
    assert refused.value.code is RefusalCode.LATE
    again = coordinator.assign(0, first.incarnation, version=0)
    assert again is not None
    assert again.done, "what worker 0 assigns without knowing of that does not count"
    more = take(coordinator, first, call=2)
    assert (more.ranges, more.version) == (taken.ranges, 1)
    done = assign(coordinator, first, version=1, step=1)
    assert (done.version, done.takes_part) == (2, True)
    assert finish(coordinator, first, at_version(more, 2), step=2)
    state = coordinator.job.state
    assert state.ledger is not None
    assert (state.version, state.ledger.applied) == (3, sum(r.stop - r.start for r in more.ranges))
    assert state.settings.position.steps == 1, "only one step was made"


def test_an_assignment_begins_again_when_a_shard_lacks_some_of_it() -> None:
    shards = [Notes(), Notes()]
    with running(shards, parameterServer={"replicas": 2}) as coordinator:
        member = start(coordinator)

        def refuse(advance: Advance) -> None:
            if advance.prepare:
                shards[1].refuse = lambda _: None
                raise Refused(RefusalCode.INVALID, "it lacks contributions")

        shards[1].refuse = refuse
        again = assign(coordinator, member, version=0, step=0)
        assert (again.done, again.version, again.attempt) == (False, 0, 2)
        assert assign(coordinator, member, version=0, step=0).done
        assert shards[0].applied == shards[1].applied == [1]


def test_values_are_not_assigned_where_a_version_is_not_everybodys() -> None:
    with running([Notes()], consistency={"backupWorkers": 1}) as coordinator:
        member = start(coordinator)
        with pytest.raises(Refused) as refused:
            coordinator.assign(0, member.incarnation, version=0)
        assert refused.value.code is RefusalCode.INVALID


def test_values_that_another_worker_assigns_are_waited_for() -> None:
    with running([Notes()], limits=SOON) as coordinator:
        first, second = start(coordinator, 0), start(coordinator, 1)
        answer = coordinator.assign(0, first.incarnation, version=0)
        assert answer == pb.AssignReply(version=0, attempt=answer.attempt if answer else -1)
        assert coordinator.assign(1, second.incarnation, version=0) is None, "the first has not pushed them"
        assert assign(coordinator, first, version=0, step=0).done
        done = coordinator.assign(1, second.incarnation, version=0)
        assert done is not None
        assert done.done
