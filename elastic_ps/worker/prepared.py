"""What another library has prepared for work that it divides among processes itself."""

from __future__ import annotations

import torch

from elastic_ps.errors import InvalidModel

_LIBRARIES = ("accelerate", "transformers")


def is_prepared(given: object) -> bool:
    """Whether this is of a class of such a library."""
    return _library_of(given) in _LIBRARIES


def check_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidModel if another library has wrapped the optimizer to divide the work itself."""
    if is_prepared(optimizer):
        raise InvalidModel(
            f"the optimizer is {_library_of(optimizer)}'s {type(optimizer).__name__}, which divides the work "
            "among processes itself. Pass session.optimizer the torch optimizer and the model that you had "
            "before accelerator.prepare(...)"
        )


def _library_of(given: object) -> str:
    return type(given).__module__.partition(".")[0]
