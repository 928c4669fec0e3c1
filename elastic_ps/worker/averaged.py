"""Mode `local` with several processes in a worker: each local step is one step of all of them.

Before the script's optimizer makes a step, every process gets the mean of their gradients, weighted by the
records of their slices. All processes get the same bytes. So optimizers that begin with the same values and
the same state have the same afterwards, and nothing else has to be sent from process to process until the
next exchange.

Gradients are added up in shared memory of their own. The memory that exchanges are pushed from may be under
way while the next local steps are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_ps.codec import as_tensor, dtype_of
from elastic_ps.core.partition import ITEM_SIZE, Rule
from elastic_ps.errors import InvalidModel
from elastic_ps.transport.memory import Allocate
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.model import Flat
from elastic_ps.worker.summed import add_gradients

_STEP = "optimizer.step()"


class _Mine(NamedTuple):
    """What a process tells process 0: which parameters have a gradient, and the loss, if it is a number."""

    present: Sequence[bool]
    loss: float | None


class _Mean(NamedTuple):
    """What process 0 answers; the gradients are in its part of the memory."""

    present: Sequence[bool]
    loss: float | None


class _Part:
    """One process's gradients.

    Attributes:
        flat: those of one dtype, one after the other.
        views: by the numbers of the parameters, in their shapes.
    """

    def __init__(self, allocate: Allocate, parameters: Sequence[torch.Tensor], dtypes: Sequence[str]) -> None:
        sizes = _sizes(parameters, dtypes)
        self.flat = {dtype: as_tensor(allocate(nbytes), dtype_of(dtype)) for dtype, nbytes in sizes.items()}
        self.views: list[torch.Tensor] = []
        used = dict.fromkeys(sizes, 0)
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            start = used[dtype]
            used[dtype] += parameter.numel()
            self.views.append(self.flat[dtype][start : used[dtype]].view(parameter.shape))


class Averaged:
    """The gradients of one worker's processes. Belongs to the training thread.

    All processes make it together.

    Args:
        flat: of the model; every parameter that is trained is in it.
        engine: of a worker with several processes.

    Raises:
        UsageError: the system has no shared memory for the gradients.
    """

    def __init__(self, flat: Flat, engine: Engine) -> None:
        self._engine, self._world = engine, engine.world
        specs = flat.layout.tensors
        trained = [i for i, spec in enumerate(specs) if spec.rule is Rule.GRADIENT and spec.elements]
        self._parameters = [flat.tensors[index] for index in trained]
        self._names = [specs[index].name for index in trained]
        dtypes = [specs[index].dtype for index in trained]
        sizes = list(_sizes(self._parameters, dtypes).values())
        self._parts = [
            _Part(self._world.allocate(sizes), self._parameters, dtypes) for _ in range(self._world.size)
        ]

    def of(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer that evaluates the loss itself, so that all processes evaluate it.

        Gradients are the mean, and so is the loss that it returns: all processes come to the same decisions.
        """

        def averaged() -> Any:
            loss = closure()
            number = _number(loss)
            mean = self.take(number)
            if mean is None:
                return loss
            return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

        return averaged

    @torch.no_grad()
    def take(self, loss: float | None = None) -> float | None:
        """Replace the gradients by their mean over the processes. Blocks until all processes are here.

        A gradient that a process does not have counts as zero, unless no process has it. A process whose
        slice has no records does not count.

        Args:
            loss: of this process's slice, as a number.

        Returns the mean of the losses; None if a process has none.

        Raises:
            UsageError: the step has no batch; or the processes are at different places of the script.
            InvalidModel: a gradient is sparse.
        """
        weights = self._engine.weights()
        mine = _Mine([parameter.grad is not None for parameter in self._parameters], loss)
        self._require_dense()
        if not self._world.leads:
            self._put()
        mean = self._world.consult(_STEP, mine, lambda every: self._add_up(every, weights))
        for parameter, there, view in zip(self._parameters, mean.present, self._parts[0].views, strict=True):
            if not there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(view)
            else:
                parameter.grad.copy_(view)
        return mean.loss

    def _put(self) -> None:
        """Copy this process's gradients into its part."""
        views = self._parts[self._world.rank].views
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _add_up(self, every: Sequence[_Mine], weights: Sequence[float]) -> _Mean:
        """In process 0, when all are here: so nobody reads the last step's mean any more, which lies here."""
        self._put()
        own, *others = self._parts
        for name, total in own.flat.items():
            add_gradients(
                total,
                weights[0],
                [(part.flat[name], share) for part, share in zip(others, weights[1:], strict=True)],
            )
        counted = [mine.present for mine, share in zip(every, weights, strict=True) if share]
        return _Mean([any(each) for each in zip(*counted, strict=True)], _mean_of(every, weights))

    def _require_dense(self) -> None:
        for parameter, name in zip(self._parameters, self._names, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InvalidModel(
                    f"the gradient of {name} is sparse, and worker.processes above 1 adds up dense gradients "
                    "only. Use nn.Embedding(..., sparse=False), or processes: 1"
                )


def _sizes(parameters: Sequence[torch.Tensor], dtypes: Sequence[str]) -> dict[str, int]:
    """How many bytes the gradients of each dtype have."""
    sizes: dict[str, int] = {}
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * ITEM_SIZE[dtype]
    return sizes


def _mean_of(every: Sequence[_Mine], weights: Sequence[float]) -> float | None:
    """The mean of the losses. What has no weight is not looked at."""
    total = 0.0
    for mine, share in zip(every, weights, strict=True):
        if mine.loss is None:
            return None
        if share:
            total += mine.loss * share
    return total


def _number(loss: object) -> float | None:
    """A loss as a number; None if it is something else. Waits for the device that computes it."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None
