"""Several optimizers are one for everything that looks at parameter groups, and stay what they are."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.several import Several, kinds_of
from elastic_ps.core.settings import Settings
from elastic_ps.errors import InvalidModel
from tests.testing.shard import Rig, one_bucket, ones, tensor


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape))


def make() -> dict[str, torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [
        {"params": [parameter(2), parameter(3)]},
        {"params": [parameter(1)], "lr": 0.5},
    ]
    return {"slow": torch.optim.SGD(groups, lr=0.1, momentum=0.9), "quick": torch.optim.Adam([parameter(4)])}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def step(optimizer: torch.optim.Optimizer) -> None:
    for each in parameters_of(optimizer):
        each.grad = torch.full_like(each, 0.5)
    optimizer.step()


def test_the_name_is_of_each_group() -> None:
    parts, optimizers = make(), Optimizers()
    name = optimizers.name_of(Several(parts))
    assert name == "SGD+SGD+Adam"
    assert optimizers.classes_of(name, 3) == kinds_of(Several(parts))
    assert optimizers.name_of(Several({"one": parts["slow"]})) == "SGD"
    assert optimizers.classes_of("SGD", 2) == [torch.optim.SGD, torch.optim.SGD]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("SGD+Adam", "have 2 parameter groups, but there are 3"),
        ("SGD+SGD+LBFGS", "LBFGS cannot run"),
        ("SGD++Adam", "the optimizer  cannot run"),
        ("SGD+SGD+own:Lion", "own:Lion cannot run on the parameter server: the job names none"),
    ],
)
def test_a_name_from_elsewhere_is_checked(name: str, match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        Optimizers().classes_of(name, 3)


def test_a_step_is_that_of_each() -> None:
    together, apart = Several(make()), make()
    assert together.step(lambda: 3) == 3
    assert all(torch.equal(each, torch.ones_like(each)) for each in parameters_of(together)), "no gradients"
    step(together)
    for optimizer in apart.values():
        step(optimizer)
    expected = [each for optimizer in apart.values() for each in parameters_of(optimizer)]
    for ours, theirs in zip(parameters_of(together), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_states_are_split_joined_and_loaded() -> None:
    first = Several(make())
    step(first)
    whole = copy.deepcopy(first.state_dict())
    assert [group["params"] for group in whole["param_groups"]] == [[0, 1], [2], [3]]
    split = first.split(whole)
    assert split["quick"]["state"].keys() == {0}
    assert split["quick"]["param_groups"][0]["params"] == [0]
    assert first.join(split) == whole
    second = Several(make())
    groups = list(second.param_groups)
    whole["param_groups"][1]["lr"] = 0.25
    second.load_state_dict(whole)
    assert all(a is b for a, b in zip(second.param_groups, groups, strict=True)), "schedulers know them"
    assert all(a is b for a, b in zip(second.parts["slow"].param_groups, groups[:2], strict=True))
    assert groups[1]["lr"] == 0.25
    loaded: dict[str, Any] = second.state_dict()
    assert loaded["state"].keys() == whole["state"].keys()
    assert torch.equal(loaded["state"][3]["exp_avg"], whole["state"][3]["exp_avg"])
    with pytest.raises(ValueError, match="the state is of slow; expected slow, quick"):
        first.join({"slow": split["slow"]})


def test_a_bucket_has_pieces_of_several_classes() -> None:
    """Also where one class is made in two ways: torch takes Adagrad's first state from the constructor."""
    groups: tuple[dict[str, Any], ...] = (
        {"lr": 1.0, "initial_accumulator_value": 3.0, "eps": 0.0},
        {"lr": 1.0, "initial_accumulator_value": 0.0, "eps": 0.0},
        {"lr": 0.5, "momentum": 0.5},
    )
    tensors = [replace(tensor(name, 2), group=group) for name, group in (("a", 2), ("b", 0), ("c", 1))]
    rig = Rig(one_bucket(*tensors), optimizer="Adagrad+Adagrad+SGD", settings=Settings(groups))
    for _ in range(2):
        rig.push(0, ones(6), present=[True, True, True])
        rig.commit(0, samples=1)
    first, second = 1 / 4**0.5 + 1 / 5**0.5, 1 + 1 / 2**0.5
    expected = torch.tensor([-0.5 - 0.75, -first, -second]).repeat_interleave(2)
    torch.testing.assert_close(rig.values(), expected)
    rig.push(0, ones(6), present=[True, False, False])
    rig.commit(0, samples=1)
    expected[:2] -= 0.5 * 1.75
    torch.testing.assert_close(rig.values(), expected)
    kept = {(entry.tensor, entry.key) for entry in rig.shard.state()}
    assert kept == {(0, "momentum_buffer"), (1, "sum"), (1, "step"), (2, "sum"), (2, "step")}
