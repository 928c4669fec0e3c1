"""Checks several optimizers of a script, which are to train one model together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic_ps.codec import naming
from elastic_ps.codec.several import Several
from elastic_ps.errors import InvalidModel

_EXAMPLE = 'as in {"generator": torch.optim.Adam(...), "critic": torch.optim.SGD(...)}'


def together(optimizers: Mapping[str, torch.optim.Optimizer], model: torch.nn.Module) -> Several:
    """These optimizers as one.

    Raises:
        InvalidModel: they have no names, one is no optimizer, or a parameter is in two of them.
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
