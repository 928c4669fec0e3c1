"""An optimizer's state in the form that the parameter server takes."""

from __future__ import annotations

import errno
import mmap
import threading
from datetime import timedelta

import pytest
import torch

from elastic_ps.codec import as_bytes, name_of
from elastic_ps.codec.memory import Scratch
from elastic_ps.codec.optimizers import kept_state
from elastic_ps.codec.state import ImportedState, OptimizerState, Snapshot, Stored, read_state
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.errors import StorageUnavailable
from tests.testing import machine
from tests.testing.defaults import defaults
from tests.testing.polling import eventually
from tests.testing.shard import Body

LAYOUT = partition((TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0),), bucket_bytes=1024, shards=1)


def stepped() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A parameter, and Adam after a step with it."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.arange(4.0)
    optimizer.step()
    return parameter, optimizer


def assert_state(
    kept: OptimizerState, parameter: torch.nn.Parameter, expected: torch.optim.Optimizer
) -> None:
    """It is the state of the one parameter of another optimizer."""
    ((piece, entries),) = kept.pieces(LAYOUT.buckets[0], [parameter])
    assert piece == 0
    (state,) = expected.state_dict()["state"].values()
    assert [entry.key for entry in entries] == list(state)
    body = b"".join(bytes(as_bytes(entry.value)) for entry in entries)
    assert body == b"".join(bytes(as_bytes(value.reshape(-1))) for value in state.values())


def test_a_state_may_be_one_that_only_a_gpu_goes_on_with() -> None:
    """With `capturable`, for CUDA graphs, torch refuses to step on the CPU."""
    parameter, optimizer = stepped()
    state = optimizer.state_dict()
    state["param_groups"][0]["capturable"] = True
    new = torch.optim.Adam([parameter], capturable=True)
    assert_state(ImportedState(new, state), parameter, optimizer)
    optimizer.param_groups[0]["capturable"] = True
    assert_state(OptimizerState(optimizer), parameter, optimizer)


def test_a_state_that_a_script_keeps_in_double_precision_is_taken_in_that_of_the_server() -> None:
    """torch makes the counter of Adam's steps in the default dtype."""
    with defaults(torch.float64):
        parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32))
        optimizer = torch.optim.Adam([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ((_, entries),) = OptimizerState(optimizer).pieces(LAYOUT.buckets[0], [parameter])
    given = [(each.key, name_of(each.value.dtype), each.scalar) for each in entries]
    assert given[0] == ("step", "float64", True)
    body = Body(torch.cat([each.value.view(torch.uint8) for each in entries]))
    usual = kept_state(torch.optim.Adam, {}, torch.float32, [4])
    state = read_state(LAYOUT.buckets[0], 0, given, body, usual=usual)
    assert torch.equal(state["step"], torch.tensor(1.0))
    assert torch.equal(state["exp_avg"], entries[1].value)


COUNT = 32


class Changing:
    """Buckets of two tensors each, and a snapshot of them. The values of a tensor are its number."""

    def __init__(self, patience: timedelta, *, room: int = 0) -> None:
        self.tensors = [torch.full((64,), float(number)) for number in range(COUNT)]
        stored = [Stored(number, 0, "value", each) for number, each in enumerate(self.tensors)]
        buckets = {number: stored[2 * number : 2 * number + 2] for number in range(COUNT // 2)}
        self.snapshot = Snapshot(buckets, patience=patience, room=room)

    def change(self) -> None:
        for number, each in enumerate(self.tensors):
            self.snapshot.keep(number // 2)
            each.fill_(-1)

    def read(self) -> list[float]:
        return [float(stored.value[0]) for stored in self.snapshot.read(Scratch())]


def test_changes_wait_for_the_reader_of_a_snapshot_before_they_copy_more_than_its_share() -> None:
    changing = Changing(timedelta(minutes=10))
    thread = threading.Thread(target=changing.change, daemon=True)
    thread.start()
    thread.join(0.2)
    changed = sum(float(each[0]) == -1 for each in changing.tensors)
    assert thread.is_alive(), "nobody reads"
    assert changed <= COUNT * Snapshot.SHARE
    eventually(lambda: float(changing.tensors[0][0]) == -1, "it has begun")
    assert changing.read() == list(range(COUNT))
    thread.join()
    assert changing.snapshot.pause > timedelta(0)


def test_changes_go_on_with_copies_when_the_reader_of_a_snapshot_is_slow() -> None:
    changing = Changing(timedelta(milliseconds=1))
    changing.change()
    assert changing.read() == list(range(COUNT))
    assert all(float(each[0]) == -1 for each in changing.tensors)


def test_changes_of_a_small_model_do_not_wait() -> None:
    changing = Changing(timedelta(minutes=10), room=1 << 20)
    changing.change()  # nobody reads
    assert changing.read() == list(range(COUNT))


def test_a_snapshot_without_memory_for_a_copy_fails_and_changes_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changing = Changing(timedelta(0))
    machine.fails(monkeypatch, mmap, "mmap", OSError(errno.ENOMEM, "Cannot allocate memory"))
    changing.change()
    assert all(float(each[0]) == -1 for each in changing.tensors)
    with pytest.raises(StorageUnavailable, match="no memory for a copy"):
        changing.read()


def test_nothing_is_copied_that_has_been_read_of_a_snapshot() -> None:
    changing = Changing(timedelta(minutes=10))
    assert changing.read() == list(range(COUNT))
    changing.change()
    assert changing.snapshot.pause == timedelta(0)


def test_a_long_tensor_of_a_snapshot_is_read_in_parts() -> None:
    tensors = [torch.arange(10.0), torch.arange(3, dtype=torch.int64)]
    stored = [Stored(number, 0, "value", each) for number, each in enumerate(tensors)]
    snapshot, expected = Snapshot({0: stored}), [each.tolist() for each in tensors]
    read: list[tuple[int, list[float]]] = []
    for part in snapshot.read(Scratch(), most=16):
        read.append((part.tensor, part.value.tolist()))
        snapshot.keep(0)
        for each in tensors:
            each.fill_(-1)
    assert max(len(values) * tensors[number].element_size() for number, values in read) == 16
    assert [[v for n, values in read if n == number for v in values] for number in range(2)] == expected


def test_a_long_tensor_in_another_order_of_memory_is_read_in_parts() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    parts = Snapshot({0: [Stored(0, 0, "value", tensor)]}).read(Scratch(), most=16)
    assert [value for part in parts for value in part.value.tolist()] == tensor.flatten().tolist()
