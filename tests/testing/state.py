"""What workers do to a job's state, in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from elastic_ps.core import schedules
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Member
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.core.stages import Stage
from elastic_ps.server.job.state import JobState
from elastic_ps.server.orders import Model

TENSORS = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
MODEL = Model(partition(TENSORS, bucket_bytes=1024, shards=1), "SGD")


def training() -> JobState:
    """A job of 1000 records whose model is there."""
    state = JobState(term=1, lease=timedelta(seconds=10), stage=Stage.TRAINING)
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    return state


def join(state: JobState, worker: int) -> Member:
    """A worker comes, is handed records and wants to compute on them."""
    member = state.members.join(worker, pid=worker, host="here", version=state.version, now=0)
    state.take(worker, member.incarnation, 10)
    state.admit(worker, 0)
    return member


def contribution(state: JobState, member: Member, *, step: int = 0) -> Contribution:
    """A step on all that the worker holds."""
    assert state.ledger is not None
    held = tuple(state.ledger.held(member.incarnation))
    return Contribution(
        worker=member.worker, incarnation=member.incarnation, step=step, samples=10, records=held
    )


def finish(state: JobState, member: Member, *, step: int = 0) -> Contribution:
    done = contribution(state, member, step=step)
    state.rounds.finish(done, version=state.version, attempt=state.rounds.attempt)
    return done


def two(state: JobState) -> tuple[Member, Member]:
    """Two workers, both in the open round, which is the second."""
    first, second = join(state, 0), join(state, 1)
    finish(state, first, step=-2)
    state.book(state.rounds.begin_commit(), 0, decided=0)
    state.take(first.worker, first.incarnation, 10)
    return first, second


def settings_wanted(state: JobState, steps: Sequence[Contribution]) -> str:
    """What the contributors want, as JSON."""
    return schedules.wanted(state.settings, steps, state.members, may_be_stale=state.consistency.may_be_stale)


def settings_after(state: JobState, steps: Sequence[Contribution]) -> Settings:
    """What the version is made with that these steps would become."""
    stale = state.consistency.may_be_stale
    return schedules.after(state.settings, steps, state.members, state.ledger, may_be_stale=stale)
