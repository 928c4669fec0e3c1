"""Several optimizers as one, each with its own parameters, such as those of a GAN's networks.

Each parameter group keeps the class that steps it. So for the layout, hyperparameters, schedulers and
checkpoints, which use groups, several optimizers are one with more groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.codec import naming
from elastic_ps.errors import InvalidModel

SEPARATOR = "+"
"""Separates the classes' names, one for each parameter group, of several optimizers."""

Kind = type[torch.optim.Optimizer]

_EXAMPLE = 'as in {"generator": torch.optim.Adam(...), "critic": torch.optim.SGD(...)}'


class Several(torch.optim.Optimizer):
    """Steps several optimizers. Its parameter groups are theirs, in order.

    Args:
        parts: the optimizers, by name, in order. Their parameter groups stay the same objects.

    Raises:
        ValueError: a parameter is in two of them.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self.parts = dict(parts)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        super().__init__(parameters_of(groups), {})
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Each optimizer makes a step. A parameter without a gradient stays as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's format, like that of one optimizer with all parameter groups."""
        return self.join({name: part.state_dict() for name, part in self.parts.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. Raises like torch's optimizers."""
        for name, state in self.split(state_dict).items():
            part = self.parts[name]
            groups = part.param_groups
            part.load_state_dict(state)
            for group, loaded in zip(groups, part.param_groups, strict=True):
                group.update(loaded)
            part.param_groups = groups

    def split(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Split a result of `state_dict` into those of the optimizers, by name."""
        found: dict[str, dict[str, Any]] = {}
        rest, first = list(state["param_groups"]), 0
        for name, part in self.parts.items():
            mine, rest = rest[: len(part.param_groups)], rest[len(part.param_groups) :]
            end = first + sum(len(group["params"]) for group in mine)
            found[name] = {
                "state": {n - first: kept for n, kept in state["state"].items() if first <= n < end},
                "param_groups": [{**g, "params": [n - first for n in g["params"]]} for g in mine],
            }
            first = end
        return found

    def join(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The inverse of `split`. Raises ValueError if the states are of other optimizers."""
        if states.keys() != self.parts.keys():
            raise ValueError(
                f"the state is of {', '.join(map(str, states))}; expected {', '.join(self.parts)}"
            )
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for name in self.parts:
            one = states[name]
            state |= {first + number: kept for number, kept in one["state"].items()}
            groups += [
                {**g, "params": [first + number for number in g["params"]]} for g in one["param_groups"]
            ]
            first += sum(len(group["params"]) for group in one["param_groups"])
        return {"state": state, "param_groups": groups}


def parameters_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups with only the parameters, for torch's constructor, which must not change the originals.

    It refuses groups of which only some have parameter names (`param_names`).
    """
    return [{"params": group["params"]} for group in groups]


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The parts of an optimizer: itself, unless it is `Several`."""
    return list(optimizer.parts.values()) if isinstance(optimizer, Several) else [optimizer]


def kinds_of(optimizer: torch.optim.Optimizer) -> list[Kind]:
    """The class that steps each of its parameter groups."""
    return [type(part) for part in parts_of(optimizer) for _ in part.param_groups]


def name_of_all(
    parts: Sequence[torch.optim.Optimizer], name_of: Callable[[torch.optim.Optimizer], str]
) -> str:
    """The name of one optimizer, or those of several, one for each parameter group."""
    if len(parts) == 1:
        return name_of(parts[0])
    return SEPARATOR.join(name_of(part) for part in parts for _ in part.param_groups)


def together(optimizers: Mapping[str, torch.optim.Optimizer], model: torch.nn.Module) -> Several:
    """These optimizers as one.

    Raises:
        InvalidModel: they have no names, one is not an optimizer, or a parameter is in two of them.
    """
    if not optimizers:
        raise InvalidModel(f"session.optimizer got no optimizer; expected one or several, {_EXAMPLE}")
    names = {id(parameter): name for name, parameter in naming.parameters(model).items()}
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        if not isinstance(name, str) or not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidModel(
                f"session.optimizer got {name!r}: {type(optimizer).__name__}; expected names and torch "
                f"optimizers, {_EXAMPLE}"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                first = owner.setdefault(id(parameter), name)
                if first != name:
                    which = names.get(id(parameter), "a parameter")
                    raise InvalidModel(
                        f"{which} is in the optimizers {first!r} and {name!r}; give it to one of them"
                    )
    return Several(optimizers)
