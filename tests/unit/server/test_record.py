"""A checkpoint is input from outside: whatever no job can continue from is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.checkpoint.store import Store
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import dtype_of
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.portions import PortionedLedger
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable, InvalidJob
from elastic_ps.server.job import record
from elastic_ps.server.job.record import require_usable
from elastic_ps.server.orders import Model
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import layout_from_message
from tests.testing.defaults import defaults
from tests.testing.service import TENSORS, Worker, environment, serving

SPEC = TrainingJobSpec.model_validate({"entrypoint": "train:main"})


def stepped(directory: Path, *tensors: TensorSpec) -> Reader:
    """Of the checkpoint of a job with Adam that has made a step. The tensors have four elements in all."""
    with serving(environment(checkpoints=directory)) as (listener, server):
        worker = Worker(listener)
        if worker.join(optimizer="Adam", tensors=tensors).initialise:
            worker.ask(pb.InitRequest(caller=worker.caller(), bucket=0), torch.zeros(4))
            worker.ask(pb.InitDoneRequest(caller=worker.caller()))
        worker.step(0)
        server.close(keep=True)
    return Store(directory).open(1)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with stepped(tmp_path, *TENSORS) as reader:
        yield reader


def settings(**group: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the hyperparameters."""

    def change(state: dict[str, Any]) -> None:
        changed = json.loads(state["settings"])
        changed["groups"][0].update(group)
        state["settings"] = json.dumps(changed)

    return change


def member(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["members"][0].update(fields)


def fields(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(changed)


def test_what_a_job_has_written_can_be_continued_from(reader: Reader) -> None:
    require_usable(reader, spec=SPEC)
    state = json.loads(json.dumps(reader.manifest.state))
    member(incarnation=(2 << 32) - 1)(state)
    reader.manifest = replace(reader.manifest, state=state)
    require_usable(reader, spec=SPEC)  # the last one that a worker of term 1 can have got


def test_a_checkpoint_is_usable_whatever_dtype_is_the_default(reader: Reader) -> None:
    """torch makes the counter of Adam's steps with it, and a module of the user's own may set it."""
    with defaults(torch.float64):
        require_usable(reader, spec=SPEC)


def test_a_job_continues_with_a_parameter_without_dimensions(tmp_path: Path) -> None:
    """A temperature, say. It is stepped flat, so its state has one element, and is no scalar."""
    scale = TensorSpec("scale", (), "float32", Rule.GRADIENT, 0)
    with stepped(tmp_path, TensorSpec("w", (3,), "float32", Rule.GRADIENT, 0), scale) as reader:
        require_usable(reader, spec=SPEC)


def test_a_job_that_shares_records_in_another_way_leaves_the_checkpoint_as_it_is(reader: Reader) -> None:
    """With fixed shares no constant number of records can be taken over. Without, they can."""
    spec = TrainingJobSpec.model_validate({"entrypoint": "train:main", "consistency": {"globalBatchSize": 6}})
    state = json.loads(json.dumps(reader.manifest.state))
    given: dict[str, Any] = {"term": 2, "lease": spec.worker.lease_duration, "consistency": spec.consistency}
    model = Model(partition(reader.manifest.specs, bucket_bytes=1024, shards=1), "Adam")
    given |= {"data": spec.data, "version": 1, "model": model}
    assert isinstance(record.JobRecord.read(state).continued(**given).ledger, PortionedLedger)
    state["ledger"] = FixedSchedule(20, 1, 4, 2).state()
    reader.manifest = replace(reader.manifest, state=state)
    require_usable(reader, spec=spec)
    with pytest.raises(
        InvalidJob, match="globalBatchSize is 6, and the checkpoint was made with deterministic"
    ):
        record.JobRecord.read(state).continued(**given)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (2, ""),
        (1, "made with deterministic: true and worker.replicas: 2; set the same"),
        (3, "made with deterministic: true and worker.replicas: 2; set the same"),
        (0, "made with deterministic: true and worker.replicas: 2; set the same"),
    ],
)
def test_shares_of_records_stay_those_of_as_many_workers(reader: Reader, shares: int, message: str) -> None:
    model = Model(partition(reader.manifest.specs, bucket_bytes=1024, shards=1), "Adam")
    given: dict[str, Any] = {"term": 2, "lease": SPEC.worker.lease_duration, "consistency": SPEC.consistency}
    given |= {"data": SPEC.data, "version": 1, "model": model, "shares": shares}
    state = json.loads(json.dumps(reader.manifest.state))
    with (
        pytest.raises(InvalidJob, match="made without such shares; leave deterministic out")
        if shares
        else nullcontext()
    ):
        record.JobRecord.read(state).continued(**given)
    state["ledger"] = FixedSchedule(20, 1, 4, 2).state()
    with pytest.raises(InvalidJob, match=message) if message else nullcontext():
        record.JobRecord.read(state).continued(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (member(steps=-1), "the numbers of a member are impossible"),
        (member(records=-1), "the numbers of a member are impossible"),
        (member(incarnation=2 << 32), "the numbers of a member are impossible"),
        (fields(assigned=2), "cannot have been assigned in version 2"),
        (fields(bucket_bytes=-65536), "buckets of -65536 bytes are never chosen"),
        (fields(bucket_bytes=1), "buckets of 1 bytes are never chosen"),
        (fields(bucket_bytes=1 << 40), "buckets of 1099511627776 bytes are never chosen"),
        (fields(assigned=-1), "cannot have been assigned in version -1"),
        (fields(settings="{"), "Expecting"),
        (fields(ledger={"records": 20}), "KeyError"),
        (settings(fused=True), "not hyperparameters: \\['fused'\\]"),
        (settings(clamp=[2, 1]), "clamp"),
        (settings(eps=-1.0), "Invalid epsilon"),
        (settings(betas=[0.9]), "IndexError"),
    ],
)
def test_a_state_that_is_impossible_is_refused(
    reader: Reader, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    state = json.loads(json.dumps(reader.manifest.state))
    change(state)
    reader.manifest = replace(reader.manifest, state=state)
    with pytest.raises(CheckpointCorrupt, match=message) as refused:
        require_usable(reader, spec=SPEC)
    assert not isinstance(refused.value, CheckpointUnreadable)
    assert str(refused.value).startswith("no job can continue from the checkpoint of version 1: ")


def test_a_field_of_another_type_is_of_another_version(reader: Reader) -> None:
    state = {**json.loads(json.dumps(reader.manifest.state)), "loss": "none"}
    reader.manifest = replace(reader.manifest, state=state)
    with pytest.raises(CheckpointUnreadable, match="loss: Input should be a valid"):
        require_usable(reader, spec=SPEC)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"group": 1}, "is in parameter group 1, but there are 1"),
        ({"group": -1}, "is in parameter group -1"),
        ({"dtype": "float64"}, "the optimizer's state has"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(reader: Reader, tensor: dict[str, Any], message: str) -> None:
    tensors = [{**reader.manifest.tensors[0], **tensor}]
    reader.manifest = replace(reader.manifest, tensors=tensors)
    with pytest.raises(CheckpointCorrupt, match=message):
        require_usable(reader, spec=SPEC)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("LBFGS", "LBFGS"),
        ("NAdam", "the optimizer's state has"),
        ("Adam+SGD", "have 2 parameter groups, but there are 1"),
    ],
)
def test_another_optimizer_than_the_state_is_of_is_refused(
    reader: Reader, optimizer: str, message: str
) -> None:
    reader.manifest = replace(reader.manifest, optimizer=optimizer)
    with pytest.raises(CheckpointCorrupt, match=message):
        require_usable(reader, spec=SPEC)


def half(directory: Path) -> Reader:
    """Of the checkpoint of a model in half precision, whose first values have come, with a buffer."""
    tensors = (
        TensorSpec("w", (4,), "bfloat16", Rule.GRADIENT, 0),
        TensorSpec("mean", (2,), "float32", Rule.MEAN, -1),
    )
    with serving(environment(checkpoints=directory)) as (listener, _):
        worker = Worker(listener)
        layout = layout_from_message(worker.join(tensors=tensors).layout)
        for bucket in layout.buckets:
            values = torch.zeros(bucket.elements, dtype=dtype_of(bucket.dtype))
            worker.ask(pb.InitRequest(caller=worker.caller(), bucket=bucket.index), values)
        worker.ask(pb.InitDoneRequest(caller=worker.caller()))
    return Store(directory).open(0)


def test_master_weights_are_of_the_dtype_that_is_stepped(tmp_path: Path) -> None:
    with half(tmp_path) as reader:
        require_usable(reader, spec=SPEC)
        trained, buffer = reader.manifest.tensors
        reader.manifest = replace(reader.manifest, tensors=[{**trained, "dtype": "float64"}, buffer])
        with pytest.raises(CheckpointCorrupt, match="w: its master weights are not of dtype float64"):
            require_usable(reader, spec=SPEC)
