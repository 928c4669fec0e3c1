"""Recognises objects that another library has prepared to divide work among processes itself.

The library is recognised by its name, and need not be installed.
"""

from __future__ import annotations

from traceback import extract_tb

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_ps.errors import InvalidModel, UsageError

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_LIBRARIES = ("accelerate", "transformers", *_LIGHTNING)

_LOOP = (
    "the loop over the data is Lightning's, which divides the work among processes itself and expects as "
    "many batches on each of them, but here each worker gets those that are there. Write the loop yourself: "
    "build the LightningModule without a Trainer, call session.optimizer(optimizer, model), and iterate over "
    "session.loader(...)"
)

_GROUP = (
    "the script sets up torch.distributed, as for torchrun, which fails: {error}. A job needs no process "
    "group: leave out init_process_group and DistributedDataParallel, and pass session.optimizer(...) the "
    "plain model, and session.loader(...) the data set without a DistributedSampler"
)

_RESIZED = (
    "{where}: {error}. If that is a buffer of the model, the job has memory for the shape that it had in "
    "session.optimizer(...). When the first forward gives it its shape, as quantisation does with scales of "
    "each channel, run the model once on a batch before session.optimizer(...). If each worker has its own, "
    "name it in session.optimizer(..., own=[...])"
)


def is_prepared(given: object) -> bool:
    """Whether this is of a class of such a library."""
    return _library_of(given) in _LIBRARIES


def check_wrapper(optimizer: object) -> None:
    """Raise InvalidModel if another library has wrapped the optimizer to divide the work itself."""
    if is_prepared(optimizer):
        raise InvalidModel(
            f"the optimizer is {_library_of(optimizer)}'s {type(optimizer).__name__}, which divides the work "
            "among processes itself. Pass session.optimizer the torch optimizer and the model that you had "
            f"before {_preparing(optimizer)}"
        )


def check_model(model: torch.nn.Module) -> None:
    """Raise InvalidModel if the model is wrapped, and UsageError if another library's loop trains it."""
    kind = type(model).__name__
    sharded = kind == "FullyShardedDataParallel" and _library_of(model) == "torch"
    if sharded or isinstance(model, DistributedDataParallel):
        raise InvalidModel(
            f"the model is wrapped in torch's {kind}, which adds up gradients over a process group of its "
            "own, and the job's workers add them up, too. Leave out the wrapper and init_process_group, and "
            "pass session.optimizer(...) the model within"
        )
    if _library_of(model) in ("accelerate", *_LIGHTNING) and not _is_lightning_module(model):
        raise InvalidModel(
            f"the model is {_library_of(model)}'s {kind}. Pass session.optimizer(...) the model that you had "
            f"before {_preparing(model)}"
        )
    check_loop(model)


def check_loop(model: torch.nn.Module) -> None:
    """Raise UsageError if a Trainer of Lightning, or its Fabric, trains the model."""
    attached = getattr(model, "_trainer", None) is not None or getattr(model, "_fabric", None) is not None
    if attached and _is_lightning_module(model):
        raise UsageError(_LOOP)


def left_over(error: BaseException) -> str:
    """What to do about an error of torch's that a script gets only in a job; "" if it is another one."""
    text = str(error)
    wants = "environment variable" in text and "expected, but not set" in text
    if wants or "Default process group has not been initialized" in text:
        return _GROUP.format(error=text)
    if "resize storage that is not resizable" in text:
        where = "".join(f"{each.filename}:{each.lineno}" for each in extract_tb(error.__traceback__)[-1:])
        return _RESIZED.format(where=where, error=text)
    return ""


def _is_lightning_module(model: torch.nn.Module) -> bool:
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in _LIGHTNING
        for kind in type(model).__mro__
    )


def _preparing(given: object) -> str:
    return "fabric.setup(...)" if _library_of(given) in _LIGHTNING else "accelerator.prepare(...)"


def _library_of(given: object) -> str:
    return type(given).__module__.partition(".")[0]
