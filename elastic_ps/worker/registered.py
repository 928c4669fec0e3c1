"""Notices that a model has other tensors than those that `session.optimizer` was given.

The job trains and saves those that it was given. A script may have assigned a buffer anew (`self.center =
...`), pruned the model, or replaced a layer. What is assigned to a buffer is part of the job, as with
DistributedDataParallel, which sends whatever buffers a model has: it is copied to the job's buffer, which
then takes its place in the model again. All else is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from elastic_ps.core.partition import uncompiled
from elastic_ps.errors import UsageError

_PARAMETER = (
    "Prune, parametrize, load with assign=True and replace layers before session.optimizer(...). Later, "
    "change values in place, within torch.no_grad(), and call session.assign(model); to keep pruned weights "
    "at zero, use the option keep_zeros of a parameter group. If each worker has its own, name it in "
    "session.optimizer(..., own=[...])"
)
_BUFFER = (
    "If the first forward makes it, or gives it its shape, run the model once on a batch before "
    "session.optimizer(...). If it need not be saved, register it with persistent=False. If each worker has "
    "its own, name it in session.optimizer(..., own=[...])"
)
_HISTORY = "Assign it within torch.no_grad(), or detach() it"
_SHARED = "Assign a copy, as clone() makes it"


class Registered:
    """Where a model has the job's tensors. Belongs to the training thread.

    Args:
        own: names of modules and tensors that the job leaves alone, without what `torch.compile` adds.
    """

    def __init__(self, model: torch.nn.Module, own: Sequence[str] = ()) -> None:
        self._model, self._own = model, own
        self._given = self._named()
        self._note()

    def _named(self) -> dict[str, torch.Tensor]:
        """The parameters and persistent buffers, under each of their names, but for the worker's own."""
        saved = self._model.state_dict(keep_vars=True)
        buffers = self._model.named_buffers(remove_duplicate=False)
        named = chain(
            self._model.named_parameters(remove_duplicate=False),
            ((name, buffer) for name, buffer in buffers if name in saved),
        )
        return {name: tensor for name, tensor in named if not self._is_own(uncompiled(name))}

    def _is_own(self, name: str) -> bool:
        return any(name == own or name.startswith(f"{own}.") for own in self._own)

    def _note(self) -> None:
        """Note what there is, so that most calls of `settle` need not look at names."""
        self._places: list[Mapping[str, Any]] = [
            place
            for module in self._model.modules()
            for place in (module._parameters, module._buffers, module._modules)  # noqa: SLF001 (others copy)
        ]
        self._held = self._now()

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(place.values() for place in self._places)]

    def settle(self) -> None:
        """Take over what was assigned to buffers. Raises UsageError if anything else is not as it was."""
        now = self._now()
        if len(now) == len(self._held) and all(map(operator.is_, now, self._held)):
            return
        named, given = self._named(), self._given
        assigned = [name for name in {**given, **named} if named.get(name) is not given.get(name)]
        for name in assigned:
            if problem := self._problem(name, given.get(name), named):
                raise UsageError(
                    "the model has other tensors than session.optimizer(...) was given, which are those that "
                    f"the job trains and saves: {uncompiled(name)} {'. '.join(problem)}"
                )
        with torch.no_grad():
            values = [named[name].clone() for name in assigned]  # some may be what others were
            for name, value in zip(assigned, values, strict=True):
                given[name].copy_(value)
                module, _, key = name.rpartition(".")
                setattr(self._model.get_submodule(module), key, given[name])
        self._note()

    def _problem(
        self, name: str, given: torch.Tensor | None, named: Mapping[str, torch.Tensor]
    ) -> tuple[str, str] | None:
        """Why what has this name now is no buffer whose value can be taken over, and what to do."""
        tensor = named.get(name)
        parameter = isinstance(given, torch.nn.Parameter) or isinstance(tensor, torch.nn.Parameter)
        advice = _PARAMETER if parameter else _BUFFER
        if given is None:
            return "is new", advice
        if tensor is None:
            return "is not there any more", advice
        if _kind(given) != _kind(tensor):
            return f"was {_described(given)} and is {_described(tensor)}", advice
        if parameter:
            return "was replaced", advice
        if tensor.requires_grad:
            return "was assigned a value that has a gradient function", _HISTORY
        for other in named:
            if not self._goes_with(name, other, named):
                return f"was assigned, and shares memory with {uncompiled(other)}, or does no more", _SHARED
        return None

    def _goes_with(self, name: str, other: str, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether two names still stand for one tensor, or still for two."""
        if self._given.get(other) is self._given[name]:
            return named[other] is named[name]
        return not named[name].numel() or _memory(named[other]) != _memory(named[name])


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """In what a tensor is like the one whose place it takes."""
    return isinstance(tensor, torch.nn.Parameter), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _described(tensor: torch.Tensor) -> str:
    what = "a parameter" if isinstance(tensor, torch.nn.Parameter) else "a buffer"
    return f"{what}, {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
