"""The names of a model's tensors on the parameter server and in checkpoints.

A tensor that several modules share has its first name; the others are its aliases. Additions of
`torch.compile` to a name are left out.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from elastic_ps.core.partition import uncompiled


def saved(model: torch.nn.Module) -> dict[str, Any]:
    """The model's tensors under each of their names, and the other entries of its `state_dict`."""
    return {uncompiled(name): value for name, value in model.state_dict(keep_vars=True).items()}


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters, in order of registration."""
    return {uncompiled(name): parameter for name, parameter in model.named_parameters()}


def buffers(model: torch.nn.Module, persistent: Container[str]) -> dict[str, torch.Tensor]:
    """The model's persistent buffers, in order of registration.

    Args:
        persistent: the names that `saved` has.
    """
    named = {uncompiled(name): buffer for name, buffer in model.named_buffers()}
    return {name: buffer for name, buffer in named.items() if name in persistent}
