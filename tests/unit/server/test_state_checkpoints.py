"""What shard 0 knows of a job, as checkpoints hold it and the status tells it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import Data
from elastic_ps.core.chiefs import Chiefs
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.fingerprint import Mark, to_text
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.stages import Stage, StageEvent
from elastic_ps.errors import InvalidJob
from elastic_ps.server.job import record, status
from elastic_ps.server.job.state import JobState
from elastic_ps.server.orders import Advance, Model
from tests.testing.state import MODEL, contribution, finish, join, training, two


@pytest.fixture
def state() -> JobState:
    return training()


def next_term(saved: dict[str, Any], *, version: int, data: Data | None = None, change: str = "") -> JobState:
    """The state that the job goes on with from a checkpoint of its first term."""
    return record.JobRecord.read(saved).continued(
        term=2,
        lease=timedelta(seconds=10),
        consistency=Consistency(),
        data=data or Data(),
        version=version,
        model=MODEL,
        change=change,
    )


def test_a_checkpoint_knows_what_scripts_have_asked_for(state: JobState) -> None:
    state.model = MODEL
    state.stopped, state.assigned = "no improvement", 3
    again = next_term(record.to_checkpoint(state), version=0)
    assert again.stopped == "no improvement"
    assert again.finished
    assert again.assigned == 3


LOST = "it has to join again, since a parameter server was lost"
CHANGED = "consistency is async now"


@pytest.mark.parametrize(
    ("change", "outcome", "reason"), [("", "lost", LOST), (CHANGED, "left", CHANGED)], ids=["lost", "changed"]
)
def test_members_end_with_a_term_because_it_was_lost_or_because_of_a_change(
    state: JobState, change: str, outcome: str, reason: str
) -> None:
    join(state, 0)
    state.model = MODEL
    again = next_term(record.to_checkpoint(state), version=3, change=change)
    ended = [(member.outcome, member.reason, member.left_version) for member in again.members.departed]
    assert set(ended) == {(outcome, reason, 3)}


def test_members_of_a_finished_job_have_left(state: JobState) -> None:
    """Its last checkpoint is written before its workers say goodbye."""
    state.ledger = Ledger(records=10, epochs=1, shard_records=10)
    committed(state, [contribution(state, join(state, 0))])
    assert state.ledger.finished
    state.model = MODEL
    again = next_term(record.to_checkpoint(state), version=3)
    assert [member.outcome for member in again.members.departed] == ["left"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"seed": 2}, "data.seed is 2, .* made with 1"),
        ({"seed": 1, "shuffle": False}, "data.shuffle is false, .*; set data.shuffle to true to continue"),
    ],
)
def test_a_checkpoint_goes_on_in_the_order_of_records_that_it_was_made_with(
    data: dict[str, Any], match: str
) -> None:
    """In another order records would be trained twice, and others never, in the epoch that is under way."""
    order = Data(seed=1, shard_records=16)
    state = JobState(1, timedelta(seconds=10), data=order, model=MODEL, stage=Stage.TRAINING)
    state.open_ledger(100, 1, shares=0)
    saved = record.to_checkpoint(state)
    ledger = next_term(saved, version=7, data=Data(seed=1, shard_records=8)).ledger
    assert isinstance(ledger, Ledger)
    assert ledger.shard_records == 8, "what may change"
    with pytest.raises(InvalidJob, match=match):
        next_term(saved, version=7, data=Data(**data))


def committed(state: JobState, contributions: list[Contribution], now: float = 0.0) -> None:
    """The round of these steps is made."""
    for each in contributions:
        state.rounds.finish(each, version=state.version, attempt=state.rounds.attempt)
    state.book(state.rounds.begin_commit(), now, decided=now)


@pytest.mark.parametrize("shares", [0, 2])
def test_a_checkpoint_holds_all_that_the_job_goes_on_with(shares: int) -> None:
    state = JobState(1, timedelta(seconds=10), data=Data(shard_records=10), model=MODEL, stage=Stage.TRAINING)
    state.open_ledger(100, 2, shares=shares)
    members = [join(state, worker) for worker in range(2)] if shares else [join(state, 0)]
    steps = [
        replace(contribution(state, member), metrics={"loss": 1.0 + member.worker, "accuracy": 0.5})
        for member in members
    ]
    committed(state, steps)
    state.drop(0, "left")
    state.chiefs, state.script_state = Chiefs(0, {0: 1, 1: 0}), '{"best": 0.5}'
    saved = json.loads(json.dumps(record.to_checkpoint(state)))
    again = next_term(saved, version=1, data=Data(shard_records=10))
    assert (again.version, again.term, again.initialised, again.resumed) == (1, 2, True, True)
    assert again.settings == state.settings
    assert (again.chiefs.of, again.chiefs.now, again.stopped) == ({0: 1, 1: 0}, 0, "")
    assert again.script_state == '{"best": 0.5}'
    assert (again.results.metrics, again.results.loss.points) == (
        state.results.metrics,
        state.results.loss.points,
    )
    assert again.last_round == json.loads(json.dumps(state.last_round))
    assert isinstance(again.ledger, FixedSchedule if shares else Ledger)
    assert state.ledger is not None
    assert again.ledger.applied == state.ledger.applied == 10 * len(members)
    outcomes = {member.worker: member.outcome for member in again.members.all()}
    assert outcomes == ({0: "left", 1: "lost"} if shares else {0: "left"})
    assert not again.members.live
    assert again.members.last_incarnation == 2 << 32, "no incarnation is given twice"
    again.note(StageEvent.TAKE)
    assert record.to_checkpoint(again).keys() == saved.keys()


def test_the_loss_of_a_version_is_the_mean_over_its_samples(state: JobState) -> None:
    first, second = two(state)
    steps = [contribution(state, member) for member in (first, second)]
    steps = [
        replace(steps[0], samples=10, metrics={"loss": 1.0, "a": 1.0}),
        replace(steps[1], samples=30, metrics={"loss": 2.0, "b": 2.0}),
    ]
    committed(state, steps)
    assert state.results.loss.points == [(2, 1.75)]
    assert state.results.metrics == {"a": 1.0, "b": 2.0}
    committed(state, [contribution(state, first, step=1), contribution(state, second, step=1)])
    assert len(state.results.loss.points) == 1, "nobody reported one"


def test_that_the_job_learns_nothing_is_seen_and_by_the_next_term_again(state: JobState) -> None:
    """With what the loss was at the start, though the next term has not seen that."""

    def train(state: JobState, loss: float, steps: int) -> list[str]:
        member, found = join(state, 0), []
        for number in range(steps):
            step = replace(contribution(state, member, step=number), metrics={"loss": loss})
            committed(state, [step])
            state.take(0, member.incarnation, 10)
            told = status.divergence(state, Compression())
            found.append(told.reason if told else "")
        return found

    state.model = MODEL
    assert train(state, 2.0, steps=60) == [*[""] * 49, *["LossNoBetter"] * 11]
    saved = json.loads(json.dumps(record.to_checkpoint(state)))
    again = next_term(saved, version=60, data=Data(shard_records=10))
    assert status.divergence(again, Compression()) is None
    found = train(again, 1.99, steps=35)
    assert (found[0], found[-1]) == ("", "LossNoBetter")
    told = status.divergence(again, Compression(codec="topk"))
    assert told is not None
    assert "1.99 after 95% of the job, no better than at the start, when it was 2" in told.message
    assert "loses less than topk" in told.message


def test_progress_in_numbers(state: JobState) -> None:
    assert status.progress(JobState(term=1, lease=timedelta(seconds=1)), 0.0, None).records_expected is None
    state.ledger = Ledger(records=40, epochs=2, shard_records=10)
    member = join(state, 0)
    for number in range(3):
        committed(state, [contribution(state, member, step=number)], now=float(number))
        state.take(0, member.incarnation, 10)
    progress = status.progress(state, 2.0, (3, 1_700_000_000.0))
    assert (progress.version, progress.epoch, progress.epochs) == (3, 0, 2)
    assert (progress.records_applied, progress.records_expected, progress.percent) == (30, 80, 37)
    assert progress.samples_per_second == pytest.approx(10.0)
    assert progress.eta_seconds == 5
    assert (progress.durable_version, progress.durable_time) == (3, "2023-11-14T22:13:20Z")
    assert not progress.finished
    assert member.records == 30
    assert member.steps == 3
    for number in range(3, 8):
        committed(state, [contribution(state, member, step=number)], now=float(number))
        state.take(0, member.incarnation, 10)
    progress = status.progress(state, 7.0, None)
    assert (progress.percent, progress.epoch, progress.eta_seconds) == (100, 2, 0)
    assert progress.finished
    assert (progress.durable_version, progress.durable_time) == (None, None)


def test_what_is_skipped_counts_for_how_long_the_rest_takes(state: JobState) -> None:
    state.ledger = Ledger(records=80, epochs=1, shard_records=10)
    member = join(state, 0)
    for number in range(3):
        made = contribution(state, member, step=number)
        (held,) = made.records
        middle = held.start + 4
        parts = held._replace(stop=middle), held._replace(start=middle)
        made = replace(made, samples=4, records=parts[:1], skipped=parts[1:])
        committed(state, [made], now=float(number))
        state.take(0, member.incarnation, 10)
    progress = status.progress(state, 2.0, None)
    assert (progress.records_applied, progress.records_skipped, progress.eta_seconds) == (12, 18, 5)


def test_the_loss_curve_stays_as_dense_in_the_next_term() -> None:
    state = JobState(1, timedelta(seconds=10), model=MODEL, stage=Stage.TRAINING)
    curve = state.results.loss
    for version in range(100_000):
        curve.add(version, 1.0)
    again = next_term(json.loads(json.dumps(record.to_checkpoint(state))), version=0).results.loss
    for version in range(100_000, 200_000):
        again.add(version, 1.0)
    assert sum(version < 100_000 for version, _ in again.points) > len(again.points) / 3


def test_a_pause_hardly_changes_how_long_the_rest_is_said_to_take(state: JobState) -> None:
    state.ledger = Ledger(records=1000, epochs=1, shard_records=10)
    member = join(state, 0)
    for number in range(41):
        committed(state, [contribution(state, member, step=number)], now=float(number))
        state.take(0, member.incarnation, 10)
    before, after = (status.progress(state, now, None) for now in (40.0, 44.0))
    assert before.eta_seconds == pytest.approx(59, abs=1)
    assert after.eta_seconds == pytest.approx(65, abs=1)
    assert after.samples_per_second is not None
    assert after.samples_per_second < 7, "of the last seconds"


def test_what_a_member_is_said_to_do() -> None:
    state = JobState(term=1, lease=timedelta(seconds=10))
    state.note(StageEvent.CONFIGURE)
    state.note(StageEvent.LAY_OUT)
    state.note(StageEvent.BRING, initialiser=0)
    member = state.members.join(0, pid=7, host="here", version=0, now=0.0)
    assert status.member_status(state, member, 1.0).state == "joining"
    state.note(StageEvent.ARRIVE)
    state.note(StageEvent.KEEP)
    assert status.member_status(state, member, 1.0).state == "idle"
    state.ledger = Ledger(records=100, epochs=1, shard_records=10)
    state.take(0, member.incarnation, 10)
    state.admit(0, 0)
    reported = status.member_status(state, member, 1.0)
    assert (reported.state, reported.worker, reported.pid, reported.host) == ("training", 0, 7, "here")
    assert (reported.joined_version, reported.left_version, reported.gone_seconds) == (0, None, None)
    other = join(state, 1)
    assert other.worker in state.rounds.waiting
    assert status.member_status(state, other, 1.0).state == "training", "from the next round on"
    state.drop(0, "hung", "it kept the others waiting", 3.0)
    reported = status.member_status(state, member, 5.0)
    assert (reported.state, reported.reason, reported.gone_seconds) == (
        "hung",
        "it kept the others waiting",
        2.0,
    )
    assert reported.left_version == 0


def test_a_resumed_job_may_train_more_epochs_and_nothing_else() -> None:
    state = JobState(1, timedelta(seconds=10), model=MODEL, stage=Stage.RESUMED, stopped="no improvement")
    state.open_ledger(100, 2, shares=0)
    assert "may train more epochs, not fewer" in state.match_ledger(100, 1, 4)
    other = state.match_ledger(99, 2, 4)
    assert "has 99 records for 2 epochs" in other
    assert "Give it the 100 records" in other
    assert "epochs, not fewer" not in other, "the epochs are right"
    assert state.stopped == "no improvement"
    assert state.match_ledger(100, 5, 4) == ""
    assert not state.stopped, "the end is another one"
    assert not state.resumed
    wrong = state.match_ledger(100, 6, 4)
    assert wrong.endswith(
        "the job trains 100 records for 5 epochs. All workers must call session.loader(...) with the "
        "same data set and epochs"
    ), "it is not resumed any more"


def test_the_first_worker_says_which_records_the_job_has() -> None:
    """Also for one that continues from a checkpoint."""
    ours, others = (to_text({"Subset.indices": Mark(each)}) for each in ("a", "b"))
    state = JobState(1, timedelta(seconds=10), model=MODEL, stage=Stage.TRAINING)
    state.open_ledger(100, 2, shares=0)
    assert state.match_ledger(100, 2, 4) == state.match_ledger(100, 2, 4, ours) == ""
    assert state.match_ledger(100, 2, 4, ours) == state.match_ledger(100, 2, 4) == ""
    wrong = state.match_ledger(100, 2, 4, others)
    assert "this worker's records are not the job's: the entries of Subset.indices differ" in wrong
    assert "no fingerprint" in state.match_ledger(100, 2, 4, "{")
    saved = record.to_checkpoint(state)
    resumed = next_term(saved, version=0)
    assert "not those of the checkpoint" in resumed.match_ledger(100, 2, 4, others)
    assert resumed.match_ledger(100, 2, 4, ours) == ""


@pytest.mark.parametrize("shares", [0, 2])
def test_what_is_foreseen_is_what_comes_and_nothing_changes_before(state: JobState, shares: int) -> None:
    """A standby is told of a round before it is applied, and goes by that if nobody else is left."""
    tensors = (TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),)
    state.model = Model(partition(tensors, bucket_bytes=1024, shards=1), "SGD")
    if shares:
        state.ledger = FixedSchedule(1000, 1, 10, shares)
    members = [join(state, worker) for worker in range(2)]
    for member in members:
        state.rounds.admit(member.worker, at_once=True)
    for member in members:
        finish(state, member)
    state.drop(1, "lost")
    contributions = state.rounds.begin_commit()
    state.late_records.add(contributions[0].ranges[0])
    before = copy.deepcopy(record.to_checkpoint(state))
    foreseen = record.foreseen(state, contributions, decided=7.0)
    assert record.to_checkpoint(state) == before
    assert state.late_records.times
    state.book(contributions, 7.0, decided=7.0)
    assert record.to_checkpoint(state) == state.model.description | foreseen
    assert foreseen["round"]["version"] == 1
    assert len(foreseen["round"]["contributions"]) == 2


def test_what_a_standby_is_told_each_round_does_not_grow_with_the_model(state: JobState) -> None:
    """A header of an order has a largest size, and a model may have any number of tensors."""
    tensors = tuple(TensorSpec(f"layer.{i}.weight", (4,), "float32", Rule.GRADIENT, 0) for i in range(12_000))
    state.model = Model(partition(tensors, bucket_bytes=1 << 20, shards=1), "SGD")
    finish(state, join(state, 0))
    said = json.dumps(record.foreseen(state, state.rounds.begin_commit(), decided=7.0))
    assert len(said) < 10_000
    order = state.model.complete(Advance(1, 0, {}, state=said))
    assert len(json.loads(order.state)["tensors"]) == 12_000
