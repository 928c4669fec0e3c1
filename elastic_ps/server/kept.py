"""What of the job's state a checkpoint keeps, and the state that a new term begins with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from elastic_ps.api.job import Data
from elastic_ps.api.training import Consistency
from elastic_ps.api.tuning import Tuning, read_tuning
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.core.balance import Balance
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.divergence import Trend
from elastic_ps.core.lanes import Lanes
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Stay
from elastic_ps.core.pace import Pace
from elastic_ps.core.portions import PortionedLedger
from elastic_ps.core.progress import Curve, Distribution, Rate
from elastic_ps.core.reduced import Custody
from elastic_ps.core.settings import Settings
from elastic_ps.errors import InvalidJob
from elastic_ps.server.state import JobState, Model


def foreseen(state: JobState, contributions: Sequence[Contribution], *, decided: float) -> dict[str, Any]:
    """What `to_checkpoint` gives when the round has been booked; nothing changes."""
    after = copy.copy(state)
    after.members = state.members.copy()
    after.rounds = state.rounds.copy()
    after.ledger = state.ledger.copy() if state.ledger else None
    after.metrics = dict(state.metrics)
    after.staleness = replace(state.staleness, counts=dict(state.staleness.counts))
    after.recent = Distribution()
    after.trend = replace(state.trend)
    after.loss = replace(state.loss, points=list(state.loss.points))
    after.rate, after.pace, after.balance = Rate(), Pace(), Balance()
    after.book(contributions, decided, decided=decided)
    return to_checkpoint(after)


def to_checkpoint(state: JobState) -> dict[str, Any]:
    """Everything of a version that is not a tensor, as plain data."""
    assert state.model is not None
    return {
        "tensors": state.model.tensors,
        "optimizer": state.model.optimizer,
        "settings": state.settings_of_version.to_json(),
        "ledger": state.ledger.state() if state.ledger else None,
        "fingerprint": state.fingerprint,
        "order": state.data.model_dump(include={"shuffle", "seed"}),
        "members": [asdict(stay) for stay in state.members.stays()],
        "metrics": dict(state.metrics),
        "loss": list(state.loss.points),
        "trend": asdict(state.trend),
        "staleness": [list(state.staleness.counts.items()), state.staleness.largest],
        "round": state.last_round,
        "stopped": state.stopped,
        "assigned": state.assigned,
        "bucket_bytes": state.bucket_bytes,
        "chiefs": [list(each) for each in state.chiefs.items()],
        "script_state": state.script_state,
        "tuning": state.tuning.to_json() if state.tuning is not None else "",
    }


def from_checkpoint(
    saved: dict[str, Any],
    *,
    term: int,
    lease: timedelta,
    consistency: Consistency,
    data: Data,
    version: int,
    model: Model,
    change: str = "",
    all_reduce: bool = False,
) -> JobState:
    """The state of `version` as a new term begins with it: members are gone, the rest is as before.

    Args:
        change: why the term begins, if nothing was lost.
        all_reduce: the workers make the steps; the values of `version` are here.

    Raises:
        InvalidJob: `data` has another order of records, in which other ones would have been trained.
    """
    for key, before in saved["order"].items():
        if getattr(data, key) != before:
            raise InvalidJob(
                f"data.{key} is {getattr(data, key)}, and the checkpoint of version {version} was made "
                f"with {before}. In the new order some records would be trained again, and others never; "
                f"set data.{key} to {before} to continue from the checkpoint"
            )
    custody = Custody(version) if all_reduce else None
    state = JobState(term, lease, consistency, data, model=model, initialised=True, custody=custody)
    state.resumed = True
    state.settings = Settings.from_json(saved["settings"])
    state.rounds.version = version
    if saved["ledger"] is not None:
        state.ledger = _restored(saved["ledger"], data, consistency.global_batch_size)
    state.fingerprint = saved["fingerprint"]
    in_order = change or (state.ledger is not None and state.ledger.finished)
    for stay in (Stay(**stay) for stay in saved["members"]):
        if not stay.outcome:
            stay.outcome, stay.left_version = "left" if in_order else "lost", version
            stay.reason = change
        stay.ended = None
        state.members.departed.append(stay)
    state.metrics = dict(saved["metrics"])
    state.last_round = saved["round"]
    state.stopped = saved["stopped"]
    state.assigned = saved["assigned"]
    state.bucket_bytes = saved["bucket_bytes"]
    state.chiefs = dict(saved["chiefs"])
    state.script_state = saved["script_state"]
    state.told = dict.fromkeys(state.chiefs)
    state.chief = state.chiefs[max(state.chiefs)] if state.chiefs else None
    state.loss = Curve(points=[(at, loss) for at, loss in saved["loss"]])
    state.trend = Trend(**saved["trend"])
    state.trend.begin_again()
    counts, largest = saved["staleness"]
    state.staleness = Distribution(dict(counts), largest)
    return state


def _restored(saved: dict[str, Any], data: Data, size: int | None) -> Ledger | Lanes:
    """The ledger of a checkpoint, with `size` records for each version, if it is given."""
    if "lanes" not in saved and size is not None:
        portioned = PortionedLedger.from_state(saved, shard_records=data.shard_records)
        return replace(portioned, size=size)
    if size is not None:
        raise InvalidJob(
            f"consistency.globalBatchSize is {size}, and the checkpoint was made with deterministic: true "
            "and without globalBatchSize, where each worker has its own share of the records. Leave "
            "globalBatchSize out to continue from the checkpoint"
        )
    return (Lanes if "lanes" in saved else Ledger).from_state(saved, shard_records=data.shard_records)


def tuning_of(found: Manifest, ours: Tuning) -> Tuning:
    """How a term makes versions that continues from a checkpoint: as that says, unless ours is newer.

    A parameter server begins with the word of its environment, which has no number. The one before it may
    have had a newer one.
    """
    recorded = _recorded(found, ours)
    if not ours.replaces(recorded) and recorded.run == ours.run:
        return recorded
    return ours.model_copy(update={"since": found.version}) if ours.needs_term(recorded) else ours


def of_same_run(found: Manifest, ours: Tuning) -> bool:
    """Whether a checkpoint was written by the run of the job that continues from it."""
    return _recorded(found, ours).run == ours.run


def _recorded(found: Manifest, ours: Tuning) -> Tuning:
    """The tuning that a checkpoint names; ours if it names none."""
    said = found.state["tuning"]
    return read_tuning(said, source="the checkpoint's tuning") if said else ours
