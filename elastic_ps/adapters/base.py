"""The frozen base of a model, which each worker loads by itself: see `Session.optimizer(..., base=...)`.

The parameter server has no values of it, only a digest of each tensor, so that all workers have the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elastic_ps.codec import as_bytes, name_of, naming
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.errors import InvalidModel, ModelMismatch, UsageError

_PIECE = 1 << 24
"""How many elements are digested at once. Those of a device are copied."""

_digests = WeakTensorKeyDictionary()
"""The digests of tensors that are alive, so that an evaluator digests its base once."""


class Base:
    """The base of a model. Belongs to the training thread.

    The base are the parameters that no optimizer trains, and the persistent buffers of modules that have no
    trained parameter of their own, as those of quantised layers. Not the statistics of a normalisation that
    is in training mode, since its forward changes them. What `state_dict` adds to a frozen parameter, as the
    scales of a 4-bit one, belongs to the base.

    Args:
        trained: the ids of the parameters that an optimizer trains.
        besides: names of tensors that are not the base's.

    Attributes:
        tensors: by name, each once.

    Raises:
        InvalidModel: a tensor has no bytes to digest.
    """

    def __init__(self, model: torch.nn.Module, *, trained: Collection[int], besides: Collection[str]) -> None:
        saved = naming.saved(model)
        parameters = naming.parameters(model)
        buffers = naming.buffers(model, saved)
        kept = _kept(model, trained)
        frozen = {n: p for n, p in parameters.items() if n not in besides and id(p) not in trained}
        known = {id(tensor) for tensor in (*parameters.values(), *buffers.values())}
        self.tensors: dict[str, torch.Tensor] = frozen | {
            name: buffer for name, buffer in buffers.items() if name not in besides and id(buffer) not in kept
        }
        self._watched = {name: (tensor, _counted(tensor)) for name, tensor in self.tensors.items()}
        self.tensors |= {
            name: value
            for name, value in saved.items()
            if isinstance(value, torch.Tensor) and id(value) not in known and _within(name, frozen)
        }

    def specs(self) -> list[TensorSpec]:
        """Its description, with digests: a pass over all values, the first time."""
        return [
            TensorSpec(
                name, (*tensor.shape,), name_of(tensor.dtype), Rule.EXTERNAL, content=_digest(name, tensor)
            )
            for name, tensor in self.tensors.items()
        ]

    def check(self) -> None:
        """Raise UsageError if the script has changed it, or wants to train it."""
        for name, (tensor, counted) in self._watched.items():
            if _counted(tensor) == counted:
                continue
            if tensor.requires_grad:
                raise UsageError(
                    f"{name} has requires_grad=True now, but it was frozen in session.optimizer(..., "
                    "base='external'), so the job does not train it. Call requires_grad_() before that"
                )
            raise UsageError(
                f"the script, or a forward, has changed {name}, which belongs to the base: no checkpoint and "
                "no other worker would get the change. If it changes in training, call model.train() before "
                "session.optimizer(...), accelerator.prepare(...) or fabric.setup(...). Or name it or its "
                "module in averaged=[...] of session.optimizer, or in own=[...] if each worker has its own. "
                "If it must not change, put its module into eval mode"
            )


def require(model: torch.nn.Module, base: Iterable[TensorSpec]) -> set[str]:
    """All names of the tensors of a checkpoint's base, which the model has to have. Digests them once.

    Raises:
        ModelMismatch: the model has another base.
    """
    saved, names, wrong = naming.saved(model), set[str](), list[str]()
    for spec in base:
        tensor = saved.get(spec.name)
        if not isinstance(tensor, torch.Tensor):
            wrong.append(f"{spec.name} is not in the model")
        elif str(ours := _spec(spec.name, tensor)) != str(spec):
            wrong.append(f"{ours} is {spec} in the base of the checkpoint")
        elif _digest(spec.name, tensor) != spec.content:
            wrong.append(f"{spec.name} has other values")
        names |= {spec.name} | {name for name, other in saved.items() if other is tensor}
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ModelMismatch(
            "the model does not have the base that the checkpoint was trained on: "
            f"{'; '.join(wrong[:8])}{more}. Load the base as the training script does, before "
            "load_checkpoint. For another base or dtype, export the adapters (`elastic-ps export DIR OUT`), "
            "and load them with PEFT"
        )
    return names


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, (*tensor.shape,), name_of(tensor.dtype), Rule.EXTERNAL)


def _kept(model: torch.nn.Module, trained: Collection[int]) -> set[int]:
    """The ids of the buffers that the job keeps."""
    return {
        id(buffer)
        for module in model.modules()
        for buffer in module.buffers(recurse=False)
        if any(id(parameter) in trained for parameter in module.parameters(recurse=False))
        or (module.training and getattr(module, "track_running_stats", False))
    }


def _within(name: str, frozen: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a frozen parameter, such as `weight.absmax` to `weight`."""
    return any(name[:place] in frozen for place, each in enumerate(name) if each == ".")


def _counted(tensor: torch.Tensor) -> tuple[int, bool]:
    """Values that change when a tensor is changed in place, or is to be trained."""
    return -1 if tensor.is_inference() else tensor._version, tensor.requires_grad


def _digest(name: str, tensor: torch.Tensor) -> str:
    """SHA-256 of the values, half of it, in hexadecimal."""
    state = (_counted(tensor)[0], tensor.data_ptr())
    if (known := _digests.get(tensor)) is not None and known[0] == state:
        return str(known[1])
    made = hashlib.sha256()
    try:
        values = tensor.data
        flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
        for start in range(0, flat.numel(), _PIECE):
            made.update(as_bytes(flat[start : start + _PIECE].cpu()))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InvalidModel(
            f"{name} is a {type(tensor).__name__} of {tensor.dtype}, whose values cannot be compared "
            "with those of other workers. Name it in session.optimizer(..., own=[...]), and make sure that "
            "all workers have the same"
        ) from error
    _digests[tensor] = state, made.hexdigest()[:32]
    return made.hexdigest()[:32]
