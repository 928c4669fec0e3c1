"""Notices what a script does to its model and optimizers that a job cannot follow, and says what to do.

`Registered`: the model has other tensors than `session.optimizer` was given, which the job trains and saves.
A buffer that was assigned anew (`self.center = ...`) is copied to the job's buffer, which takes its place in
the model again, so that it is part of the job as with DistributedDataParallel. All else is refused.

`WriteDetector`: the script has changed values that the next version would overwrite. The bits of values are
compared when they arrive and before they are replaced: copies of little memory, else sums. Of large memory
most steps take a part of each page, chosen at random: a change of 4 KiB or more is noticed at once, a smaller
one when it is repeated.
Values that a step does not replace, or that are on another device, are looked at less often, and when torch's
counters say that they were written to. (The counters miss what is written through `.data`.)

`check_wrapper`, `check_model`, `check_loop`: another library has prepared an object to divide work among
processes itself. It is recognised by its name, and need not be installed.
"""

from __future__ import annotations

import logging
import operator
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from traceback import extract_tb
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from elastic_ps.codec.memory import PARTS, Bits
from elastic_ps.core.partition import Layout, Rule, uncompiled
from elastic_ps.data.source import LIGHTNING, is_prepared, library_of
from elastic_ps.errors import InvalidModel, UsageError

_PARAMETER = (
    "Do all pruning, parametrizing, loading with assign=True and replacing of layers before "
    "session.optimizer(...). Later, in mode sync, change values in place, within torch.no_grad(), and call "
    "session.assign(model); to keep pruned weights at zero, use the option keep_zeros of a parameter group. "
    "If each worker keeps values of its own there, name the tensor in session.optimizer(..., own=[...])"
)
_BUFFER = (
    "If the first forward creates this buffer or sets its shape, run the model once on a batch before "
    "session.optimizer(...). If the buffer need not be saved, register it with persistent=False. If each "
    "worker keeps values of its own there, name the buffer in session.optimizer(..., own=[...])"
)
_HISTORY = "Assign it within torch.no_grad(), or detach() it"
_SHARED = "Change it in place with copy_(), or assign a clone()"


class Registered:
    """Knows where a model has the job's tensors. Belongs to the training thread.

    Args:
        own: names of modules and tensors that the job leaves alone, without what `torch.compile` adds.
        check: called by `settle`.
    """

    def __init__(
        self, model: torch.nn.Module, own: Sequence[str] = (), check: Callable[[], None] | None = None
    ) -> None:
        self._model, self._own, self._check = model, tuple(f"{name}." for name in own), check
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
        return {name: tensor for name, tensor in named if not f"{uncompiled(name)}.".startswith(self._own)}

    def _note(self) -> None:
        """Note what there is, so that most calls of `settle` need not look at names."""
        self._places: list[Mapping[str, Any]] = [
            place
            for module in self._model.modules()
            for place in (module._parameters, module._buffers, module._modules)  # noqa: SLF001 (others copy)
        ]
        self._noted = self._now()

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(operator.methodcaller("values"), self._places))]

    def settle(self) -> None:
        """Take over what was assigned to buffers. Raises UsageError if anything else is not as it was."""
        if self._check is not None:
            self._check()
        now = self._now()
        if len(now) == len(self._noted) and all(map(operator.is_, now, self._noted)):
            return
        named, given = self._named(), self._given
        assigned = [name for name in {**given, **named} if named.get(name) is not given.get(name)]
        for name in assigned:
            if problem := self._problem(name, given.get(name), named):
                raise UsageError(
                    "the model has changed since session.optimizer(...), but the job trains and saves the "
                    f"tensors that it got there: {uncompiled(name)} {'. '.join(problem)}"
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
        """Why the tensor with this name cannot be taken over as a buffer, and what to do."""
        tensor = named.get(name)
        parameter = isinstance(given, torch.nn.Parameter) or isinstance(tensor, torch.nn.Parameter)
        advice = _PARAMETER if parameter else _BUFFER
        if given is None:
            return "is new", advice
        if tensor is None:
            return "no longer exists", advice
        if _kind(given) != _kind(tensor):
            return f"was {_described(given)} and is {_described(tensor)}", advice
        if parameter:
            return "was replaced", advice
        if tensor.requires_grad:
            return "was assigned a value that has a gradient function", _HISTORY
        for other in named:
            if not self._goes_with(name, other, named):
                return f"has begun or ceased to share memory with {uncompiled(other)}", _SHARED
        return None

    def _goes_with(self, name: str, other: str, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether two names are still of one tensor, or still of two."""
        if self._given.get(other) is self._given[name]:
            return named[other] is named[name]
        return not named[name].numel() or _memory(named[other]) != _memory(named[name])


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """The properties that a tensor shares with the one whose place it takes."""
    return isinstance(tensor, torch.nn.Parameter), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _described(tensor: torch.Tensor) -> str:
    what = "a parameter" if isinstance(tensor, torch.nn.Parameter) else "a buffer"
    return f"{what}, {tensor.dtype} {list(tensor.shape)} on {tensor.device}"


ALWAYS = 4
"""How many of the first versions are looked at as a whole."""

EVERY = 64
"""Afterwards each version whose number is a multiple of this is looked at as a whole."""


class WriteDetector:
    """Notices that a script has changed parameters. Belongs to the training thread.

    Args:
        trained, constant: flat memory that values are pulled into, of parameters with and without optimizer;
            none of those that the script trains on this worker, and no tables: torch's counters alone notice
            changes of a table, so that a step does not look at all of it.
        tensors: the model's, in the layout's order.
        apart: which of these have memory of their own.
        pulled: gives the pulled values of one of these.
    """

    def __init__(
        self,
        layout: Layout,
        trained: Sequence[torch.Tensor],
        constant: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        apart: Sequence[int],
        pulled: Callable[[int], torch.Tensor],
    ) -> None:
        self._trained, self._constant = [Bits(flat) for flat in trained], [Bits(flat) for flat in constant]
        self._tensors, self._pulled = tensors, pulled
        rules = [spec.rule for spec in layout.tensors]
        self._fixed = [i for i, rule in enumerate(rules) if rule is Rule.CONSTANT]
        watched = {Rule.GRADIENT, Rule.CONSTANT} if trained else {Rule.CONSTANT}
        self._watched = [i for i, rule in enumerate(rules) if rule in watched]
        self._tables = {i for i, spec in enumerate(layout.tensors) if spec.sparse}
        self._apart = [i for i in apart if i in set(self._watched) - self._tables]
        self._closed = False
        self._written = False  # the script writes to values that only the job can change, as counters say
        self._arrivals = 0
        self._random = random.Random(0)  # what a script does every so many steps must not always miss it
        self._whole = True  # all is looked at of the values that have arrived last
        self._part: int | None = None  # what `_digests` are of
        self._digests: list[int | bytes] = []
        self._constant_digests: list[int | bytes] = []
        self._counters: list[int] = []

    def open(self) -> None:
        """Values are about to arrive."""
        self._closed = False

    def close(self) -> None:
        """The values have arrived."""
        self._arrivals += 1
        self._whole = self._arrivals <= ALWAYS or self._arrivals % EVERY == 0
        self._part = None if self._whole or self._written else self._random.randrange(PARTS)
        self._digests = [bits.digest(self._part) for bits in self._trained]
        if not self._constant_digests:
            self._constant_digests = [bits.digest() for bits in self._constant]
        self._counters = self._versions()
        self._closed = True

    def changed(self, *, thorough: bool = False) -> list[int] | None:
        """The tensors that were changed since values arrived: [] if it is not known which; None: none.

        `thorough`: look at all tensors.
        """
        if not self._closed:
            return None
        touched = [
            index
            for index, before, now in zip(self._watched, self._counters, self._versions(), strict=True)
            if before != now
        ]
        self._written |= bool(touched)
        broken = not self._tables.isdisjoint(touched)
        broken |= self._digests != [bits.digest(self._part) for bits in self._trained]
        if thorough or touched or self._whole:
            broken |= self._constant_digests != [bits.digest() for bits in self._constant]
            different = self._different()
            touched = [i for i in touched if i not in self._apart or i in different]
            broken |= bool(different)
            touched = sorted({*touched, *different})
        return touched if broken else None

    def changed_constants(self) -> list[int] | None:
        """Like `changed`, of the tensors without optimizer alone."""
        different = [i for i in self._different() if i in self._fixed]
        if not different and self._constant_digests == [bits.digest() for bits in self._constant]:
            return None
        now = dict(zip(self._watched, self._versions(), strict=True))
        before = dict(zip(self._watched, self._counters, strict=True))
        return sorted({*different, *(i for i in self._fixed if before[i] != now[i])})

    def _different(self) -> list[int]:
        return [i for i in self._apart if not torch.equal(self._tensors[i].cpu(), self._pulled(i))]

    def _versions(self) -> list[int]:
        return [self._tensors[index]._version for index in self._watched]


logger = logging.getLogger(__name__)

_APART = (
    "an AveragedModel is not part of the job's model. It sees only this worker's steps, and workers do not "
    "all make the same number. To average once per epoch, save the model where session.is_chief is true, and "
    "average the files. To average each step, make it part of the model, and name it in "
    'session.optimizer(..., averaged=[...]). See "Averages of the model" in docs/cookbook.md'
)


class Averages:
    """Warns of an `AveragedModel` that the present thread makes apart from the job's model.

    Args:
        over: whether all records are trained, so that each worker may average as it likes.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over, self._thread = over, threading.get_ident()
        self._made = weakref.WeakSet[torch.nn.Module]()
        self._begun = False
        _averages.append(self)

    def close(self) -> None:
        """Look no more."""
        _averages[:] = [each for each in _averages if each is not self]

    def made(self, module: torch.nn.Module) -> None:
        """Note an `AveragedModel`."""
        if threading.get_ident() == self._thread:
            self._made.add(module)
            self._look()

    def begin(self, model: torch.nn.Module) -> None:
        """The job trains this model, and each `AveragedModel` that is part of it."""
        self._made -= {*model.modules()}
        self._begun = True
        self._look()

    def _look(self) -> None:
        if self._begun and self._made and not self._over():
            logger.warning(_APART)
            self.close()


_averages: list[Averages] = []


def _registered(parent: torch.nn.Module, *_: object) -> None:
    if isinstance(parent, AveragedModel):
        for each in tuple(_averages):
            each.made(parent)


# Torch's own list of such hooks must not change while a thread builds a model.
register_module_module_registration_hook(_registered)


_LOOP = (
    "the loop over the data is Lightning's, which divides the work among processes itself and expects the "
    "same number of batches on each, but in a job each worker gets the batches that are there. Use "
    "Trainer(strategy=ElasticStrategy()) of elastic_ps.integrations.lightning, see docs/guides/lightning.md. "
    "Or write the loop yourself: build the LightningModule without a Trainer, call "
    "session.optimizer(optimizer, model), and iterate over session.loader(...)"
)

_GROUP = (
    "the script sets up torch.distributed, as for torchrun. That fails: {error}. A job needs no process "
    "group: leave out init_process_group and DistributedDataParallel, and pass session.optimizer(...) the "
    "plain model, and session.loader(...) the data set without a DistributedSampler"
)

_RESIZED = (
    "{where}: {error}. If that is a buffer of the model, its shape must be the one that it had in "
    "session.optimizer(...). If the first forward sets the shape, as for the scales of a quantised layer, "
    "run the model once on a batch before session.optimizer(...). If each worker keeps values of its own "
    "there, name the buffer in session.optimizer(..., own=[...])"
)


def check_wrapper(optimizer: object) -> None:
    """Raise InvalidModel if another library has wrapped the optimizer to divide the work itself."""
    if is_prepared(optimizer) and hasattr(optimizer, "optimizer"):  # it wraps another one
        raise InvalidModel(
            f"the optimizer is {library_of(optimizer)}'s {type(optimizer).__name__}, which divides the work "
            "among processes itself. Pass session.optimizer the torch optimizer and the model that you had "
            f"before {_preparing(optimizer)}"
        )


def check_model(model: object) -> None:
    """Raise InvalidModel if it is wrapped, UsageError if it is no module or another loop trains it."""
    kind = type(model).__name__
    sharded = kind == "FullyShardedDataParallel" and library_of(model) == "torch"
    if sharded or isinstance(model, DistributedDataParallel):
        raise InvalidModel(
            f"the model is wrapped in torch's {kind}, which adds up gradients over a process group of its "
            "own, and the job's workers add them up, too. Leave out the wrapper and init_process_group, and "
            "pass session.optimizer(...) the model within"
        )
    if library_of(model) in ("accelerate", *LIGHTNING) and not _is_lightning_module(model):
        raise InvalidModel(
            f"the model is {library_of(model)}'s {kind}. Pass session.optimizer(...) the model that you had "
            f"before {_preparing(model)}"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            "session.optimizer(optimizer, model) takes a torch.nn.Module as its second argument, "
            f"not a {kind}"
        )
    check_loop(model)


def check_loop(model: torch.nn.Module) -> None:
    """Raise UsageError if a Trainer of Lightning, or its Fabric, trains the model by itself."""
    trainer = getattr(model, "_trainer", None) or getattr(model, "_fabric", None)
    in_job = getattr(getattr(trainer, "strategy", None), "trains_in_job", False)
    if trainer is not None and not in_job and _is_lightning_module(model):
        raise UsageError(_LOOP)


def left_over(error: BaseException) -> str:
    """Advice on an error of torch's that occurs only in a job; "" for other errors."""
    text = str(error)
    wants = "environment variable" in text and "expected, but not set" in text
    if wants or "Default process group has not been initialized" in text:
        return _GROUP.format(error=text)
    if "resize storage that is not resizable" in text:
        where = "".join(f"{each.filename}:{each.lineno}" for each in extract_tb(error.__traceback__)[-1:])
        return _RESIZED.format(where=where, error=text)
    return ""


def _is_lightning_module(model: object) -> bool:
    return any(
        kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in LIGHTNING
        for kind in type(model).__mro__
    )


def _preparing(given: object) -> str:
    return "fabric.setup(...)" if library_of(given) in LIGHTNING else "accelerator.prepare(...)"
