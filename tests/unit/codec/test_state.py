"""An optimizer's state in the form that the parameter server takes."""

from __future__ import annotations

import torch

from elastic_ps.codec import as_bytes
from elastic_ps.codec.state import ImportedState, OptimizerState
from elastic_ps.core.partition import Rule, TensorSpec, partition

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
