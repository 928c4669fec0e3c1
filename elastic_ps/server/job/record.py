"""The job's record in a checkpoint: the state with which a new term begins, and the check of it.

Others can write to the directory of checkpoints. So a record is checked before anything is built from it,
while the previous checkpoint can still be used instead. A mistake that is found later would crash each
parameter server that starts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_ps.api.consistency import LOCAL_STAYS, Consistency
from elastic_ps.api.job import BUCKET_BYTES, Data, TrainingJobSpec
from elastic_ps.api.mutable import MutableFields, describe, read_mutable
from elastic_ps.api.status import JOINS_AGAIN
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import dtype_of, name_of
from elastic_ps.codec.optimizers import MASTER, PULLED, Optimizers, steps_whole_tensors, usual_state, wide
from elastic_ps.codec.several import SEPARATOR, Kind
from elastic_ps.codec.state import fits
from elastic_ps.core.all_reduce import StateHolders
from elastic_ps.core.balance import Balance
from elastic_ps.core.chiefs import Chiefs
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.divergence import Trend
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.late_records import LateRecords
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Member
from elastic_ps.core.pace import Pace
from elastic_ps.core.partition import Rule, partition
from elastic_ps.core.portions import PortionedLedger
from elastic_ps.core.progress import Curve, Distribution
from elastic_ps.core.results import Results
from elastic_ps.core.script_state import from_text
from elastic_ps.core.settings import ALLOWED, NOT_SENT, WHOLE_TENSORS, Settings, check_constraints
from elastic_ps.core.sizing import CROWDED, SMALLEST
from elastic_ps.core.stages import StageEvent
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable, InvalidJob, InvalidModel, UserError
from elastic_ps.server.job.state import INCARNATIONS_PER_TERM, JobState
from elastic_ps.server.orders import Model


class JobRecord(BaseModel):
    """The state of a job at a version, without the model; see `JobState`."""

    model_config = ConfigDict(strict=True)
    settings: str
    ledger: dict[str, Any] | None
    fingerprint: str
    order: dict[str, Any]
    members: list[Member]
    metrics: dict[str, float]
    loss: list[tuple[int, float]]
    loss_stride: int = 1
    trend: Trend
    staleness: tuple[list[tuple[int, int]], int]
    round: dict[str, Any]
    stopped: str
    assigned: int
    bucket_bytes: int
    chief: int | None
    chiefs: list[tuple[int, int]]
    script_state: str
    tuning: str

    @classmethod
    def of(cls, state: JobState) -> Self:
        return cls.model_construct(
            settings=state.settings_of_version.to_json(),
            ledger=state.ledger.state() if state.ledger else None,
            fingerprint=state.fingerprint,
            order=state.data.model_dump(include={"shuffle", "seed"}),
            members=state.members.all(),
            metrics=state.results.metrics,
            loss=state.results.loss.points,
            loss_stride=state.results.loss.stride,
            trend=state.results.trend,
            staleness=(list(state.results.staleness.counts.items()), state.results.staleness.largest),
            round=state.last_round,
            stopped=state.stopped,
            assigned=state.assigned,
            bucket_bytes=state.bucket_bytes,
            chief=state.chiefs.now,
            chiefs=list(state.chiefs.of.items()),
            script_state=state.script_state,
            tuning=state.mutable.to_json(),
        )

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Self:
        """Raises ValidationError if `saved` is not a record."""
        return cls.model_validate_json(json.dumps(saved))

    def continued(
        self,
        *,
        term: int,
        lease: timedelta,
        consistency: Consistency,
        data: Data,
        version: int,
        model: Model,
        change: str = "",
        all_reduce: bool = False,
        shares: int | None = None,
    ) -> JobState:
        """The state of `version` for a new term: the members are gone, and the rest is unchanged.

        Args:
            change: why the term begins, if nothing was lost.
            all_reduce: the workers make the steps. The shards have the values of `version`.
            shares: as many workers have fixed shares (`Consistency.fixed_workers`); None: not compared.

        Raises:
            InvalidJob: `data` has another order of records, so other ones would have been trained; or the
                workers had other shares.
        """
        for key, before in self.order.items():
            if (given := getattr(data, key)) != before:
                raise InvalidJob(
                    f"data.{key} is {json.dumps(given)}, and the checkpoint of version {version} was made "
                    f"with {json.dumps(before)}. In the new order some records would be trained again, and "
                    f"others never; set data.{key} to {json.dumps(before)} to continue from the checkpoint"
                )
        state_holders = StateHolders(version) if all_reduce else None
        state = JobState(term, lease, consistency, data, model=model, state_holders=state_holders)
        state.note(StageEvent.RESUME)
        state.settings = Settings.from_json(self.settings)
        state.rounds.version = version
        if self.ledger is not None:
            state.ledger = _restored(self.ledger, data, consistency.global_batch_size, shares)
        state.fingerprint = self.fingerprint
        in_order = change or (state.ledger is not None and state.ledger.finished)
        for member in self.members:
            if not member.outcome:
                member.outcome, member.left_version = "left" if in_order else "lost", version
                member.reason = change if in_order else JOINS_AGAIN
            member.ended = None
            state.members.departed.append(member)
        state.last_round, state.stopped = self.round, self.stopped
        state.assigned, state.bucket_bytes = self.assigned, self.bucket_bytes
        state.chiefs = Chiefs(self.chief, dict(self.chiefs), dict.fromkeys(epoch for epoch, _ in self.chiefs))
        state.script_state = self.script_state
        staleness = Distribution(dict(self.staleness[0]), self.staleness[1])
        loss = Curve(points=self.loss, stride=self.loss_stride)
        state.results = Results(self.metrics, loss, self.trend, staleness=staleness)
        self.trend.begin_again()
        return state


def to_checkpoint(state: JobState) -> dict[str, Any]:
    """The state of a version without tensors, as plain data: the model's description and its `JobRecord`."""
    assert state.model is not None
    return {**state.model.description, **JobRecord.of(state).model_dump()}


def foreseen(state: JobState, contributions: Sequence[Contribution], *, decided: float) -> dict[str, Any]:
    """The `JobRecord` after the round is booked, as plain data. `state` does not change."""
    after = copy.copy(state)
    after.members = state.members.copy()
    after.rounds = state.rounds.copy()
    after.ledger = state.ledger.copy() if state.ledger else None
    after.results, after.pace, after.balance = state.results.copy(), Pace(), Balance()
    after.late_records = LateRecords()
    after.book(contributions, decided, decided=decided)
    return JobRecord.of(after).model_dump()


def _restored(
    saved: dict[str, Any], data: Data, size: int | None, shares: int | None
) -> Ledger | FixedSchedule:
    if "shares" not in saved and size is not None:
        return replace(PortionedLedger.from_state(saved, shard_records=data.shard_records), size=size)
    if size is not None:
        raise InvalidJob(
            f"consistency.globalBatchSize is {size}, and the checkpoint was made with deterministic: true "
            "and without globalBatchSize, where each worker has its own share of the records. Leave "
            "globalBatchSize out to continue from the checkpoint"
        )
    before = len(saved.get("shares", ()))
    if shares is not None and before != min(shares, saved["records"]):
        such, do = "without such shares", "leave deterministic out"
        if before:
            such, do = f"with deterministic: true and worker.replicas: {before}", "set the same"
        raise InvalidJob(
            "with consistency.deterministic and without globalBatchSize, each worker has its own share of "
            f"the records, and the checkpoint was made {such}; {do} to continue from it"
        )
    kind = FixedSchedule if "shares" in saved else Ledger
    return kind.from_state(saved, shard_records=data.shard_records)


def mutable_of(found: Manifest, ours: MutableFields) -> MutableFields:
    """The mutable fields of a term that continues from a checkpoint: those in it, unless ours are newer.

    A parameter server begins with the fields of its environment, which have no number. The previous parameter
    server may have had newer ones. Raises InvalidJob if one of them alone is of mode `local`.
    """
    recorded = _recorded(found)
    if not ours.replaces(recorded) and recorded.run == ours.run:
        return recorded
    if (ours.consistency.mode == "local") != (recorded.consistency.mode == "local"):
        raise InvalidJob(
            f"consistency is ({describe(ours.consistency)}), and the checkpoint of version {found.version} "
            f"was made with ({describe(recorded.consistency)}), but {LOCAL_STAYS}. To begin a new job with "
            "the values of the checkpoint, see Fine-tuning in docs/cookbook.md"
        )
    return ours.model_copy(update={"since": found.version}) if ours.needs_term(recorded) else ours


def of_same_run(found: Manifest, ours: MutableFields) -> bool:
    """Whether the present run of the job has written the checkpoint."""
    return _recorded(found).run == ours.run


def _recorded(found: Manifest) -> MutableFields:
    return read_mutable(found.state["tuning"], source="the checkpoint's tuning")


def require_usable(reader: Reader, *, spec: TrainingJobSpec) -> None:
    """Raise CheckpointCorrupt unless a job of this spec can continue from the checkpoint.

    Raises:
        CheckpointUnreadable: a field of the job's record is missing or of another type.
        InvalidJob: the checkpoint may be whole, but this torch lacks the optimizer that it was made with, or
            the spec does not name the user's own, or that cannot be imported or cannot continue from it.
    """
    version, name = reader.manifest.version, reader.manifest.optimizer
    optimizers = Optimizers(spec.parameter_server.optimizers)
    own = [each for each in name.split(SEPARATOR) if ":" in each]
    for each in {*name.split(SEPARATOR)} & {*own, *ALLOWED, *WHOLE_TENSORS}:
        try:
            optimizers.class_of(each)
        except InvalidModel as error:
            raise InvalidJob(f"the checkpoint of version {version} needs this optimizer: {error}") from error
    try:
        saved = JobRecord.read(reader.manifest.state)
        MutableFields.model_validate_json(saved.tuning)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())[:500]
        raise CheckpointUnreadable(
            f"no job can continue from the checkpoint of version {version}, whose record of the job has "
            f"fields that this version of elastic-ps does not read: {wrong}"
        ) from error
    changed = ""  # optimizers that may be the cause instead of the checkpoint
    mistakes = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, UserError, ValueError
    try:
        settings, kinds = _try(reader.manifest, saved, spec, optimizers)
        changed = " or ".join(sorted({*own}))
        _try_optimizer(reader, settings, kinds)
    except mistakes as error:
        text = f"no job can continue from the checkpoint of version {version}: {repr(error)[:500]}"
        if not changed:
            raise CheckpointCorrupt(text) from error
        raise InvalidJob(
            f"{text}. If {changed} has changed since the checkpoint was written, restore its previous state"
        ) from error


def _try(
    manifest: Manifest, saved: JobRecord, spec: TrainingJobSpec, optimizers: Optimizers
) -> tuple[Settings, Sequence[Kind]]:
    """The settings, and the optimizer's class of each parameter group."""
    settings = Settings.from_json(saved.settings)
    kinds = optimizers.classes_of(manifest.optimizer, len(settings.groups))
    for member in saved.members:
        counts = (member.worker, member.incarnation, member.steps, member.records, member.late, member.call)
        if min(counts) < 0 or member.incarnation >= (manifest.term + 1) * INCARNATIONS_PER_TERM:
            raise ValueError(f"the numbers of a member are impossible: {member}")
    if not 0 <= saved.assigned <= manifest.version:
        raise ValueError(f"values cannot have been assigned in version {saved.assigned}")
    if saved.bucket_bytes % SMALLEST or not 0 <= saved.bucket_bytes <= CROWDED:
        raise ValueError(f"buckets of {saved.bucket_bytes} bytes are never chosen")
    size = spec.parameter_server.bucket_bytes or saved.bucket_bytes or BUCKET_BYTES
    layout = partition(manifest.every, bucket_bytes=size, shards=1)  # mutant: equal
    # If the job has another size of batches, that is a person's mistake, not one of the checkpoint.
    consistency = spec.consistency.model_copy(update={"global_batch_size": None})
    saved.continued(
        term=manifest.term,
        lease=spec.worker.lease_duration,
        consistency=consistency,
        data=Data(**saved.order),
        version=manifest.version,
        model=Model(layout, manifest.optimizer),
    )
    from_text(saved.script_state)
    return settings, kinds


def _try_optimizer(reader: Reader, settings: Settings, kinds: Sequence[Kind]) -> None:
    """Raise ValueError unless optimizers with these settings can step with the state."""
    manifest = reader.manifest
    for index, group in enumerate(settings.groups):
        check_constraints(group, index)
        if NOT_SENT & group.keys():
            raise ValueError(f"not hyperparameters: {sorted(NOT_SENT & group.keys())}")

    @cache
    def usual(group: int, dtype: str, shape: Sequence[int]) -> dict[str, tuple[str, bool]]:
        """The state after one step: key -> (dtype, whether it is a scalar)."""
        return usual_state(kinds[group], settings.groups[group], dtype_of(dtype), shape)

    for index, tensor in enumerate(manifest.specs):
        if tensor.rule is not Rule.GRADIENT:
            continue
        stepped = name_of(wide(dtype_of(tensor.dtype)))
        if not 0 <= tensor.group < len(settings.groups):
            raise ValueError(
                f"{tensor.name} is in parameter group {tensor.group}, but there are {len(settings.groups)}"
            )
        shape = tensor.shape if steps_whole_tensors(kinds[tensor.group]) else (2,)
        expected, found = usual(tensor.group, stepped, shape), reader.keys(index)
        if found.pop(MASTER, (stepped, False)) != (stepped, False):
            raise ValueError(f"{tensor.name}: its master weights are not of dtype {stepped}")
        if found.pop(PULLED, (tensor.dtype, False)) != (tensor.dtype, False):
            raise ValueError(f"{tensor.name}: what workers have pulled is not of dtype {tensor.dtype}")
        different = {key for key in expected.keys() & found.keys() if not fits(found[key], expected[key])}
        # SGD makes its buffer if there is none.
        lazy = kinds[tensor.group] is torch.optim.SGD
        missing = expected.keys() - found.keys() if found and not lazy else set()
        if different or missing:
            raise ValueError(f"{tensor.name}: the optimizer's state has {found}; expected {expected}")
