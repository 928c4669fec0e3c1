"""`core.all_reduce`: who makes a round, where the group meets, and which version who has."""

from __future__ import annotations

import random

import pytest

from elastic_ps.core.all_reduce import AllReduceRounds, Barrier, Peer, StateHolders
from elastic_ps.core.consistency import Contribution
from elastic_ps.errors import RefusalCode, Refused


def step(worker: int, number: int = 0) -> Contribution:
    return Contribution(worker=worker, incarnation=worker, step=number, samples=1)


def rounds_of(*workers: int) -> AllReduceRounds:
    rounds = AllReduceRounds()
    for worker in workers:
        rounds.admit(worker)
    rounds.expected |= rounds.waiting
    rounds.waiting.clear()
    return rounds


def compute(rounds: AllReduceRounds, *workers: int) -> None:
    for worker in workers:
        rounds.meet(worker, Barrier.GRADIENTS, holds=True)


def make(rounds: AllReduceRounds, *workers: int) -> None:
    """These workers, who are the group, make the version."""
    compute(rounds, *workers)
    for worker in workers:
        rounds.finish(step(worker, rounds.version), version=rounds.version, attempt=rounds.attempt)
    assert [each.worker for each in rounds.begin_commit()] == sorted(workers)
    rounds.end_commit()


def test_nobody_has_a_sum_before_all_have_computed() -> None:
    rounds = rounds_of(0, 1)
    compute(rounds, 0)
    assert not rounds.together(Barrier.GRADIENTS)
    assert rounds.awaited == {1}
    assert rounds.held_up == {0}
    with pytest.raises(Refused, match="without the gradients of all") as caught:
        rounds.finish(step(0), version=0, attempt=0)
    assert caught.value.code is RefusalCode.INVALID
    compute(rounds, 1)
    assert rounds.together(Barrier.GRADIENTS)
    assert rounds.finish(step(0), version=0, attempt=0)
    assert not rounds.can_commit(last=True), "worker 1 may have no sum"
    assert rounds.finish(step(1), version=0, attempt=0)
    assert not rounds.finish(step(1), version=0, attempt=0), "it is known"
    assert rounds.can_commit()


def test_a_newcomer_that_does_not_come_for_the_version_keeps_the_others_waiting() -> None:
    rounds = rounds_of(0, 1, 2)
    for worker in (0, 1):
        rounds.meet(worker, Barrier.STATE, holds=True)
    assert (rounds.awaited, rounds.held_up) == ({2}, {0, 1})
    rounds.meet(2, Barrier.STATE, holds=False)
    assert (rounds.awaited, rounds.held_up) == ({0, 1, 2}, set()), "all compute"


def test_another_group_is_another_attempt() -> None:
    rounds = rounds_of(0, 1, 2)
    compute(rounds, 0, 1)
    assert rounds.lose(2) == []
    assert (rounds.attempt, rounds.group) == (1, [0, 1])
    assert not rounds.together(Barrier.GRADIENTS), "they meet again"
    with pytest.raises(Refused) as caught:
        rounds.finish(step(0), version=0, attempt=0)
    assert caught.value.code is RefusalCode.STALE_ATTEMPT
    make(rounds, 0, 1)
    assert (rounds.version, rounds.attempt) == (1, 0)


def test_the_step_of_a_worker_that_has_its_sum_counts_if_the_round_is_made() -> None:
    rounds = rounds_of(0, 1)
    compute(rounds, 0, 1)
    rounds.finish(step(0), version=0, attempt=0)
    assert rounds.lose(0) == []
    assert rounds.attempt == 0, "the other has the sum, or gets it"
    rounds.finish(step(1), version=0, attempt=0)
    assert [each.worker for each in rounds.begin_commit()] == [0, 1]
    rounds.end_commit()
    assert rounds.group == [1]
    assert rounds.holders == {1}


def test_its_step_is_void_if_the_others_cannot_get_the_sum() -> None:
    rounds = rounds_of(0, 1)
    compute(rounds, 0, 1)
    rounds.finish(step(0), version=0, attempt=0)
    rounds.lose(0)
    assert rounds.restart() == [step(0)]
    assert rounds.group == [1]


def test_the_group_meets_first_if_one_lacks_the_version() -> None:
    rounds = rounds_of(0, 1)
    assert rounds.lacking, "nobody is known to have the first version"
    make(rounds, 0, 1)
    assert not rounds.lacking
    rounds.admit(2)
    compute(rounds, 0, 1)
    for worker in (0, 1):
        rounds.finish(step(worker, 1), version=1, attempt=0)
    rounds.begin_commit()
    rounds.end_commit()
    assert rounds.group == [0, 1, 2]
    assert rounds.lacking
    for worker in (2, 1):
        rounds.meet(worker, Barrier.STATE, holds=worker != 2)
    assert not rounds.together(Barrier.STATE)
    rounds.meet(0, Barrier.STATE, holds=True)
    assert rounds.together(Barrier.STATE)
    assert rounds.source == 0
    compute(rounds, 0)
    assert rounds.lacking, "it does not change within an attempt"


def test_a_worker_that_comes_back_may_have_kept_the_version() -> None:
    rounds = rounds_of(0)
    make(rounds, 0)
    rounds.lose(0)
    assert rounds.holders == set()
    rounds.admit(0)
    assert rounds.lacking
    rounds.meet(0, Barrier.STATE, holds=True)
    assert rounds.source == 0


def test_of_workers_that_stop_at_once_the_last_one_hands_the_version_over() -> None:
    """Each was told that another one has it, and so none sent it."""
    rounds = rounds_of(0, 1, 2)
    make(rounds, 0, 1, 2)
    assert [rounds.part(worker) for worker in (2, 0, 1)] == [False, False, True]
    assert rounds.part(1), "it asks again, because the answer was lost"
    rounds.meet(0, Barrier.GRADIENTS, holds=True)
    assert not rounds.part(1), "worker 0 goes on"


def test_two_groups_never_have_the_same_attempt() -> None:
    """Whatever happens: who is told of a version and an attempt is told of the same workers."""
    for seed in range(300):
        chance = random.Random(seed)
        rounds = AllReduceRounds()
        told: dict[tuple[int, int], object] = {}
        for number in range(60):
            worker = chance.randrange(4)
            match chance.randrange(5):
                case 0 | 1:
                    if not rounds.knows(worker):
                        rounds.admit(worker)
                case 2:
                    rounds.lose(worker)
                case 3:
                    if rounds.takes_part(worker):
                        rounds.meet(worker, Barrier.GRADIENTS, holds=True)
                        if rounds.together(Barrier.GRADIENTS):
                            rounds.finish(
                                step(worker, number), version=rounds.version, attempt=rounds.attempt
                            )
                case 4:
                    if rounds.can_commit():
                        rounds.begin_commit()
                        rounds.end_commit()
            if rounds.expected:
                group = tuple(rounds.group), rounds.lacking
                assert told.setdefault((rounds.version, rounds.attempt), group) == group, seed


def test_who_has_copied_the_version_holds_it_and_the_barrier_is_as_it_was() -> None:
    rounds = rounds_of(0, 1)
    rounds.meet(0, Barrier.STATE, holds=True)
    rounds.meet(1, Barrier.STATE, holds=False)
    assert rounds.meet(1, Barrier.STATE, holds=True)
    assert not rounds.meet(1, Barrier.STATE, holds=True), "it is known"
    assert rounds.arrived[Barrier.STATE] == {0: True, 1: False}
    assert not rounds.part(0), "worker 1 has it, too"


def test_a_worker_with_another_torch_is_refused() -> None:
    state_holders = StateHolders(peers={7: Peer("a:1", "2.13.0"), 8: Peer("b:1", "2.13.0")})
    assert not state_holders.refuse(2, Peer("c:1", "2.13.0"), {0: 7, 1: 8})
    problem = state_holders.refuse(2, Peer("c:1", "2.4.0"), {0: 7, 1: 8})
    assert problem.startswith("worker 2 has torch 2.4.0, and worker 0 has torch 2.13.0")
    assert not state_holders.refuse(0, Peer("c:1", "2.4.0"), {0: 7}), "it takes its own place"


def test_what_workers_have_told_of_themselves_is_forgotten_when_they_have_gone() -> None:
    state_holders = StateHolders()
    for incarnation in range(1, 100):  # one stays, and others come and go
        state_holders.introduce(incarnation, Peer(f"a:{incarnation}", "2.13.0"), {1, incarnation})
    assert state_holders.peers == {1: Peer("a:1", "2.13.0"), 99: Peer("a:99", "2.13.0")}
