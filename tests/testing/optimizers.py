"""Optimizers of a user's own, as a job names them in parameterServer.optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", with a sign that has no leap at 0.

    With a leap, round-off would decide where a value near 0 goes, and nothing could be compared.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0
    ) -> None:
        if lr <= 0:
            raise ValueError(f"lr is {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                update = momentum.mul(first).add(parameter.grad, alpha=1 - first)
                update.div_(update.abs() + 1e-4)
                parameter.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
                momentum.mul_(second).add_(parameter.grad, alpha=1 - second)


class Trying(torch.optim.Optimizer):
    """Its step is `change(parameter, gradient, state)`, which a subclass has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.change(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(change, alpha=group["lr"])

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        raise NotImplementedError


class Counted(Trying):
    """It keeps a number of Python, which has to be one after it was saved, too."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter
        state["step"] = state.get("step", 0) + 1
        assert isinstance(state["step"], int)
        count: int = len(range(state["step"]))
        return gradient.div(count)


class Normed(Trying):
    """It looks at the whole of a parameter."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del state
        share: torch.Tensor = parameter.norm() / gradient.norm()
        return gradient * share


class Lars(Trying):
    """You et al. 2017, "Large Batch Training of Convolutional Networks"."""

    whole_tensors = True

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum"]
        return momentum.mul_(0.9).add_(gradient * (parameter.norm() / gradient.norm()))


class Lamb(Trying):
    """You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"."""

    whole_tensors = True

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
        state["step"] += 1
        first = state["first"].lerp_(gradient, 0.1) / (1 - 0.9 ** state["step"])
        second = state["second"].lerp_(gradient.square(), 0.01) / (1 - 0.99 ** state["step"])
        change = first / (second.sqrt() + 1e-6)
        scaled: torch.Tensor = change * (parameter.norm() / change.norm())
        return scaled


class Together(Trying):
    """Its step of a parameter depends on the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        del closure
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([p.grad.view(-1) for p in with_gradient]).norm()
        for parameter in with_gradient:
            parameter.sub_(parameter.grad / norm)


class Sketched(Trying):
    """Its state has neither the parameter's dimensions nor single ones."""

    whole_tensors = True

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter
        state["sketch"] = torch.zeros(4)
        return gradient


class Forgetful(Trying):
    """It keeps something where nobody finds it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step(closure)

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter, state
        return gradient / self.steps


class Referring(Trying):
    """Its state is the gradient itself, whose memory is used again."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter
        before: torch.Tensor = state.get("before", gradient)
        state["before"] = gradient
        return gradient + before


class Listed(Trying):
    """Its state is a list."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter
        state.setdefault("before", []).append(gradient.clone())
        return gradient


class Factored(Trying):
    """Its state has another shape than the parameter."""

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        del parameter
        state["first"] = gradient.view(-1)[:1].clone()
        return gradient


class Sized(Trying):
    """Its state is factored if a matrix is large."""

    whole_tensors = True

    def change(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> torch.Tensor:
        large = parameter.dim() == 2 and min(parameter.shape) >= 6
        square = gradient.square().mean(1, keepdim=True) if large else gradient.square()
        key = "row" if large else "full"
        total: torch.Tensor = square + state.get(key, 0)
        state[key] = total
        return gradient / (total.sqrt() + 1e-3)


class Failing(Trying):
    """It has no step."""


NOT_ONE = torch.nn.Linear
