"""The delayed Nesterov momentum, against its definition."""

from __future__ import annotations

import copy

import pytest
import torch

from elastic_ps.codec.delayed import DelayedNesterov
from elastic_ps.codec.optimizers import usual_state
from tests.testing.defaults import defaults


def gradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(steps)]


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int) -> torch.Tensor:
    for gradient in gradients(steps):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_each_time_is_nesterovs_momentum() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    found = stepped(DelayedNesterov([ours], lr=0.7, momentum=0.9, every=1), ours, 7)
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    torch.testing.assert_close(found, stepped(sgd, theirs, 7))


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_it_is_the_algorithm_of_the_paper(steps: int) -> None:
    every, rate, beta = 3, 0.7, 0.9
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    found = stepped(DelayedNesterov([parameter], lr=rate, momentum=beta, every=every), parameter, steps)
    theta, momentum = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    waiting = torch.zeros(5, dtype=torch.float64)
    for number, gradient in enumerate(gradients(steps), start=1):
        waiting = waiting + gradient
        if number % every == 0:
            momentum = beta * momentum + waiting / every
            theta = theta - rate * (beta * momentum + gradient / every)
            waiting = torch.zeros_like(waiting)
        else:
            theta = theta - rate * gradient / every
    torch.testing.assert_close(found, theta)


def test_the_mean_change_enters_the_momentum_although_the_number_of_workers_changes() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = DelayedNesterov([parameter], lr=0.7, momentum=0.9, every=8)
    for every in (8, 8, 8, 8, 2):
        optimizer.param_groups[0]["every"] = every
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].item() == pytest.approx(1.0)


def test_its_state_is_what_a_checkpoint_needs() -> None:
    """What has stepped three times and is loaded in the middle goes on as it would have."""
    group = {"lr": 0.7, "momentum": 0.9, "every": 2}
    with defaults(torch.bfloat16):
        assert usual_state(DelayedNesterov, group, torch.float32) == {
            "step": ("float32", True),
            "waiting": ("float32", False),
            "momentum_buffer": ("float32", False),
        }
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = DelayedNesterov([parameter], every=2)
    stepped(optimizer, parameter, 3)
    other = torch.nn.Parameter(parameter.detach().clone())
    loaded = DelayedNesterov([other], every=2)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(stepped(optimizer, parameter, 4), stepped(loaded, other, 4))
