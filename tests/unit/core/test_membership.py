"""Leases and incarnations."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.core.membership import Member, Members, eldest
from elastic_ps.errors import RefusalCode, Refused


@pytest.fixture
def members() -> Members:
    return Members(lease=timedelta(seconds=10), keep_departed=3)


def join(members: Members, worker: int, now: float = 0.0) -> Member:
    return members.join(worker, pid=100 + worker, host="here", version=5, now=now)


def test_incarnations_grow_and_are_never_given_twice(members: Members) -> None:
    given = []
    for _ in range(5):
        given.append(join(members, 0).incarnation)
        members.remove(0, outcome="lost", version=6)
    assert given == [1, 2, 3, 4, 5]


def test_an_index_is_given_to_one_member_at_a_time(members: Members) -> None:
    join(members, 0)
    with pytest.raises(ValueError, match="member already"):
        join(members, 0)


def test_a_lease_ends_unless_the_member_is_heard_of(members: Members) -> None:
    member = join(members, 0)
    join(members, 1)
    assert members.expired(9.9) == []
    members.check(0, member.incarnation, 9.9)
    assert members.expired(10.0) == [1]
    assert members.expired(19.9) == [0, 1]


def test_a_late_look_at_an_early_message_does_not_shorten_a_lease(members: Members) -> None:
    member = join(members, 0)
    members.check(0, member.incarnation, 20)
    members.check(0, member.incarnation, 3)
    assert members.expired(29) == []


def test_an_old_incarnation_is_refused_and_does_not_renew_the_new_ones_lease(members: Members) -> None:
    old = join(members, 0)
    members.remove(0, outcome="lost", version=5)
    with pytest.raises(Refused, match="not a member") as refused:
        members.check(0, old.incarnation, 1)
    assert refused.value.code is RefusalCode.STALE_INCARNATION
    new = join(members, 0, now=2)
    with pytest.raises(Refused, match=f"current incarnation is {new.incarnation}"):
        members.check(0, old.incarnation, 11)
    assert members.expired(12) == [0]


def test_who_was_here_is_remembered_up_to_a_bound(members: Members) -> None:
    for _ in range(6):
        join(members, 0)
        member = members.remove(0, outcome="left", version=7)
        assert member is not None
        assert (member.outcome, member.left_version) == ("left", 7)
    here = join(members, 1)
    assert [s.incarnation for s in members.all()] == [4, 5, 6, here.incarnation]
    assert members.remove(9, outcome="left", version=7) is None


def test_the_eldest_is_who_has_been_here_for_longest(members: Members) -> None:
    of = {worker: join(members, worker) for worker in (2, 0, 1)}
    assert eldest([of[0], of[1], of[2]]) is of[2]
    members.remove(2, outcome="lost", version=5)
    again = join(members, 2)
    assert eldest([of[1], again]) is of[1]
    again.steps = 1
    assert eldest([of[1], again]) is again, "it has overtaken the other"


def test_who_was_declared_hung_is_told_so_also_after_its_place_was_taken(members: Members) -> None:
    member = members.join(1, pid=1, host="h", version=0, now=0)
    members.remove(1, outcome="hung", version=3, reason="the others have waited for 60 s", now=9)
    members.join(1, pid=2, host="h", version=3, now=10)
    with pytest.raises(
        Refused, match="worker 1 was declared hung: the others have waited for 60 s"
    ) as refused:
        members.check(1, member.incarnation, 11)
    assert refused.value.code is RefusalCode.HUNG


def test_a_lost_member_that_still_calls_is_heard(members: Members) -> None:
    """It may evaluate and save after the training, and need not join again."""
    member = members.join(1, pid=1, host="h", version=0, now=0)
    members.remove(1, outcome="lost", version=3, now=10)
    before = member.expires
    with pytest.raises(Refused) as refused:
        members.check(1, member.incarnation, 65)
    assert refused.value.code is RefusalCode.STALE_INCARNATION
    assert member.expires == 65 + members.lease.total_seconds() > before


def test_a_process_is_known_by_its_instance_and_not_by_pid_and_host(members: Members) -> None:
    """A replacement in a container of the same name has the same of both."""
    for instance in ("a", "b"):
        assert members.known(0, instance, 1) is None
        members.remove(0, outcome="lost", version=6)
        members.join(0, pid=1, host="job-worker-0", version=5, now=0.0, instance=instance, call=1)
    with pytest.raises(Refused) as refused:
        members.known(0, "a", 2)
    assert refused.value.code is RefusalCode.SUPERSEDED
    assert members.known(0, "b", 2) is None, "it joins again"


def test_a_repeated_join_is_the_same_stay_and_a_late_one_is_refused(members: Members) -> None:
    """A copy of it that arrives later would end the incarnation that it has begun."""
    member = members.join(0, pid=1, host="here", version=5, now=0.0, instance="a", call=5)
    assert members.known(0, "a", 5) is member
    with pytest.raises(Refused) as refused:
        members.known(0, "a", 4)
    assert refused.value.code is RefusalCode.STALE_CALL
    members.remove(0, outcome="left", version=6)
    assert members.known(0, "a", 5) is None


def test_a_stay_is_found_also_when_it_has_ended(members: Members) -> None:
    first = members.join(0, pid=1, host="here", version=5, now=0.0)
    members.remove(0, outcome="lost", version=6)
    second = members.join(0, pid=2, host="here", version=6, now=1.0)
    assert members.find(0, first.incarnation) is first
    assert members.find(0, second.incarnation) is second
    for worker, incarnation in ((0, second.incarnation + 1), (1, first.incarnation)):
        assert members.find(worker, incarnation) is None


def test_what_is_done_to_a_copy_is_not_done_to_the_members(members: Members) -> None:
    gone, here = join(members, 0), join(members, 1)
    members.remove(0, outcome="left", version=6)
    other = members.copy()
    for member in other.all():
        member.steps = 7
    other.remove(1, outcome="lost", version=7)
    assert [member.outcome for member in other.all()] == ["left", "lost"]
    assert members.live == {1: here}
    assert (gone.steps, here.steps, here.outcome) == (0, 0, "")


def test_who_fell_silent_may_return_for_a_lease(members: Members) -> None:
    silent, ended = join(members, 0), join(members, 1)
    members.remove(1, outcome="lost", version=6, now=5.0)
    members.remove(0, outcome="lost", version=6, now=10.0)
    assert not ended.silent
    assert members.may_return(19.0) == [silent]
    assert members.may_return(20.0) == []


@pytest.mark.parametrize("what", ["it has ended", "another process is the worker", "it has come back"])
def test_who_fell_silent_may_not_return_in_place_of_another(members: Members, what: str) -> None:
    members.join(0, pid=1, host="here", version=5, now=0.0, instance="first")
    members.remove(0, outcome="lost", version=6, now=10.0)
    if what == "it has ended":
        members.note_end(0, "another")
        assert members.may_return(11.0)
        members.note_end(0, "first")
    else:
        instance = "first" if what == "it has come back" else "second"
        members.join(0, pid=1, host="here", version=6, now=11.0, instance=instance)
    assert bool(members.may_return(11.0)) == (what == "it has come back")
