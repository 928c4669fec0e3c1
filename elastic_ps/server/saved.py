"""Checks whether a job can continue from a checkpoint, before anything is built from its state.

A checkpoint comes from a directory that others can write to. Mistakes in it have to be found here, where the
checkpoint before it can be used instead. Found later, they would crash each parameter server that starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_ps.api.job import BUCKET_BYTES, Data, TrainingJobSpec
from elastic_ps.api.tuning import read_tuning
from elastic_ps.checkpoint.tensors import MASTER, PULLED, Reader
from elastic_ps.codec import dtype_of, name_of
from elastic_ps.codec.optimizers import WIDE, Optimizers, usual_state
from elastic_ps.codec.several import SEPARATOR, Kind
from elastic_ps.core.divergence import Trend
from elastic_ps.core.membership import Stay
from elastic_ps.core.partition import Rule, partition
from elastic_ps.core.script_state import from_text
from elastic_ps.core.settings import NOT_SENT, Settings, check_constraints
from elastic_ps.core.sizing import CROWDED, SMALLEST
from elastic_ps.errors import CheckpointCorrupt, InvalidJob, InvalidModel, UserError
from elastic_ps.server import kept
from elastic_ps.server.state import INCARNATIONS_PER_TERM, Model


class _Saved(BaseModel):
    """The types of what `kept.to_checkpoint` gives."""

    model_config = ConfigDict(strict=True)
    settings: str
    ledger: dict[str, Any] | None
    order: dict[str, Any]
    members: list[Stay]
    metrics: dict[str, float]
    loss: list[tuple[int, float]]
    trend: Trend
    round: dict[str, Any]
    chiefs: list[tuple[int, int]]
    stopped: str
    assigned: int
    bucket_bytes: int
    script_state: str
    tuning: str


def require_usable(reader: Reader, *, spec: TrainingJobSpec) -> None:
    """Raise CheckpointCorrupt unless a job of this spec can continue from the checkpoint.

    Raises:
        InvalidJob: the checkpoint may be whole, but optimizers of the user's own that it was made with are
            not named in the spec, cannot be imported, or do not go on from it.
    """
    version, name = reader.manifest.version, reader.manifest.optimizer
    optimizers = Optimizers(spec.parameter_server.optimizers)
    own = [each for each in name.split(SEPARATOR) if ":" in each]
    for each in own:
        try:
            optimizers.class_of(each)
        except InvalidModel as error:
            raise InvalidJob(f"the checkpoint of version {version} was made with it: {error}") from error
    changed = ""  # what may be wrong instead of the checkpoint
    try:
        settings, kinds = _try(reader, spec, optimizers)
        changed = " or ".join(sorted({*own}))
        _try_optimizer(reader, settings, kinds)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        RuntimeError,
        TypeError,
        UserError,
        ValueError,
    ) as error:
        text = f"no job can continue from the checkpoint of version {version}: {_words(error)}"
        if not changed:
            raise CheckpointCorrupt(text) from error
        raise InvalidJob(
            f"{text}. If {changed} has changed since it was made, bring back what it was"
        ) from error


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())[:500]
    return repr(error)[:500]


def _try(reader: Reader, spec: TrainingJobSpec, optimizers: Optimizers) -> tuple[Settings, Sequence[Kind]]:
    """The settings, and the class of each parameter group."""
    manifest = reader.manifest
    saved = _Saved.model_validate_json(json.dumps(manifest.state))
    settings = Settings.from_json(saved.settings)
    kinds = optimizers.classes_of(manifest.optimizer, len(settings.groups))
    for stay in saved.members:
        counts = (stay.worker, stay.incarnation, stay.steps, stay.records, stay.late, stay.call)
        if min(counts) < 0 or stay.incarnation >= (manifest.term + 1) * INCARNATIONS_PER_TERM:
            raise ValueError(f"the numbers of a member are impossible: {stay}")
    if not 0 <= saved.assigned <= manifest.version:
        raise ValueError(f"values cannot have been assigned in version {saved.assigned}")
    if saved.bucket_bytes % SMALLEST or not 0 <= saved.bucket_bytes <= CROWDED:
        raise ValueError(f"buckets of {saved.bucket_bytes} bytes are never chosen")
    size = spec.parameter_server.bucket_bytes or saved.bucket_bytes or BUCKET_BYTES
    layout = partition(manifest.specs, bucket_bytes=size, shards=1)  # mutant: equal
    # What the job says otherwise of records is a person's mistake, and not the checkpoint's.
    consistency = spec.consistency.model_copy(update={"global_batch_size": None})
    kept.from_checkpoint(
        manifest.state,
        term=manifest.term,
        lease=spec.worker.lease_duration,
        consistency=consistency,
        data=Data(**saved.order),
        version=manifest.version,
        model=Model(layout, manifest.optimizer),
    )
    from_text(saved.script_state)
    if saved.tuning:
        read_tuning(saved.tuning, source="tuning")
    return settings, kinds


def _try_optimizer(reader: Reader, settings: Settings, kinds: Sequence[Kind]) -> None:
    """The settings make the optimizers, and the state is such that they can step with it."""
    manifest = reader.manifest
    for index, group in enumerate(settings.groups):
        check_constraints(group, index)
        if NOT_SENT & group.keys():
            raise ValueError(f"not hyperparameters: {sorted(NOT_SENT & group.keys())}")

    @cache
    def usual(group: int, dtype: str) -> dict[str, tuple[str, bool]]:
        """The state after one step: key -> (dtype, whether it is a scalar)."""
        return usual_state(kinds[group], settings.groups[group], dtype_of(dtype))

    for index, tensor in enumerate(manifest.specs):
        if tensor.rule is not Rule.GRADIENT:
            continue
        stepped = name_of(WIDE.get(tensor.dtype, dtype_of(tensor.dtype)))
        if not 0 <= tensor.group < len(settings.groups):
            raise ValueError(
                f"{tensor.name} is in parameter group {tensor.group}, but there are {len(settings.groups)}"
            )
        expected, found = usual(tensor.group, stepped), reader.keys(index)
        if found.pop(MASTER, (stepped, False)) != (stepped, False):
            raise ValueError(f"{tensor.name}: its master weights are not of dtype {stepped}")
        if found.pop(PULLED, (tensor.dtype, False)) != (tensor.dtype, False):
            raise ValueError(f"{tensor.name}: what workers have pulled is not of dtype {tensor.dtype}")
        different = {key for key in expected.keys() & found.keys() if expected[key] != found[key]}
        # SGD makes its buffer when it finds none.
        lazy = kinds[tensor.group] is torch.optim.SGD
        missing = expected.keys() - found.keys() if found and not lazy else set()
        if different or missing:
            raise ValueError(f"{tensor.name}: the optimizer's state has {found}; expected {expected}")
