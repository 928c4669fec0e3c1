"""The outer optimizer of asynchronous local steps, which torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """SGD with Nesterov's momentum that is updated and used once in `every` steps.

    It is that of Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", with c = 0 there.
    If workers that began with about the same values each made a step with the whole momentum, the model would
    overshoot. So each gradient makes a step with 1/`every` of the learning rate, and the mean of `every`
    gradients enters the momentum. With 1 it is `torch.optim.SGD` with Nesterov's momentum.

    Args:
        params: as for torch's optimizers.
        lr: the learning rate of `every` gradients together.
        momentum: the factor of the momentum.
        every: the number of workers; at least 1.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, every: int = 1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, every = self.state[parameter], int(group["every"])
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)  # since the last momentum
            state["waiting"] = torch.zeros_like(parameter)
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["waiting"] += gradient
        parameter.sub_(gradient, alpha=group["lr"] / every)
        if (waiting := int(state["step"])) >= every:  # more, if `every` has changed
            momentum = state["momentum_buffer"].mul_(group["momentum"])
            momentum.add_(state["waiting"], alpha=1 / waiting)
            state["waiting"].zero_()
            state["step"].zero_()
            parameter.sub_(momentum, alpha=group["lr"] * group["momentum"])


OURS: dict[str, type[torch.optim.Optimizer]] = {"DelayedNesterov": DelayedNesterov}
