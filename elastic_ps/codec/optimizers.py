"""What an optimizer of torch keeps for a parameter, and what its constructor takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from elastic_ps.codec.delayed import OURS
from elastic_ps.codec.memory import name_of

WIDE = {"float16": torch.float32, "bfloat16": torch.float32}
"""Half precision is too coarse to add small numbers up in. Sums of gradients are kept in single precision,
and so is what the optimizer steps, the *master* (Micikevicius et al. 2018, "Mixed Precision Training").
"""


class Entry(NamedTuple):
    """One tensor of a parameter's state: key, dtype, and whether it is one number for all elements."""

    key: str
    dtype: str
    scalar: bool


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """The class with this name, of torch.optim or our own. Raises AttributeError: there is none."""
    return OURS[name] if name in OURS else getattr(torch.optim, name)


def constructor_arguments(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that the optimizer's constructor takes.

    It checks them, and some it does not look up in the groups: Adagrad's first state is made by it.
    """
    known = inspect.signature(class_of(name)).parameters
    return {key: value for key, value in group.items() if key in known}


def usual_state(
    name: str, group: Mapping[str, Any], dtype: torch.dtype, *, whole: bool = False
) -> dict[str, tuple[str, bool]]:
    """The state that an optimizer keeps for a parameter after one step: key -> (dtype, whether a scalar).

    Args:
        name: of a class of torch.optim.
        group: the hyperparameters of the parameter's group.
        dtype: of the parameter.
        whole: the parameter has no dimensions.

    Raises:
        TypeError, ValueError, RuntimeError: it does not take these hyperparameters, or cannot step.
    """
    parameter = torch.nn.Parameter(torch.zeros(() if whole else (2,), dtype=dtype))
    arguments: Any = constructor_arguments(name, group)
    optimizer = class_of(name)([{**group, "params": [parameter]}], **arguments)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        key: (name_of(value.dtype), value.dim() == 0) if torch.is_tensor(value) else ("float64", True)
        for key, value in optimizer.state[parameter].items()
    }
