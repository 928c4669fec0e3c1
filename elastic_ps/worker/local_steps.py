"""Mode `local`: what a worker exchanges of the steps that it has made by itself.

The script's optimizer changes the model on this worker. The values that were pulled last stay beside it. At
an exchange the difference between the two is pushed in place of a gradient (the *pseudo-gradient* of Reddi
et al. 2020, "Adaptive Federated Optimization"). The outer rule, which is an ordinary optimizer on the
parameter server, makes a version of it. So rounds, records, attempts and checkpoints are those of other
modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch

from elastic_ps.api.consistency import OuterRule
from elastic_ps.codec import as_tensor, dtype_of
from elastic_ps.codec.delayed import DelayedNesterov
from elastic_ps.core.fragments import fragments, steps_before, turn
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Rule
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS
from elastic_ps.data.states import Part
from elastic_ps.errors import InvalidModel
from elastic_ps.transport.memory import Allocate
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.flat import Flat
from elastic_ps.worker.summed import add_gradients

_STEP = "optimizer.step()"


def outer_optimizer(inner: torch.optim.Optimizer, rule: OuterRule, *, workers: int) -> torch.optim.Optimizer:
    """The optimizer that the parameter server runs, for the parameters that the script's own trains.

    Args:
        workers: how many the job has at first.

    Raises:
        InvalidModel: a parameter group has limits, which the parameter server would keep only at exchanges.
    """
    refuse_limits(inner, "in mode local")
    groups = [{"params": list(group["params"])} for group in inner.param_groups]
    if rule.delayed:
        return DelayedNesterov(groups, lr=rule.learning_rate, momentum=rule.momentum, every=workers)
    ahead = rule.nesterov and rule.momentum > 0
    return torch.optim.SGD(groups, lr=rule.learning_rate, momentum=rule.momentum, nesterov=ahead)


def refuse_limits(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise InvalidModel if a parameter group has limits, which torch's optimizers do not keep.

    Args:
        where: the script's own optimizer makes the steps, in words.
    """
    for index, group in enumerate(optimizer.param_groups):
        for key in (*LIMITS, KEEP_ZEROS):
            if group.get(key) is not None:
                raise InvalidModel(
                    f"param_groups[{index}] has {key}={group[key]!r}, but {where} the script's own "
                    "optimizer makes the steps, and torch's know no such limits. Leave it out, and bring the "
                    "values within the limits in the script, after optimizer.step()"
                )


class LocalSteps:
    """The steps that this worker has made since the last exchange. Belongs to the training thread.

    With `fragments`, each exchange is about one of them. The others keep what this worker has made of them,
    and the values that it began with, until it is their turn. An exchange after which this worker makes no
    more steps for now is about all of them.

    With `overlap`, an exchange goes on while the script makes its next steps. When the version is taken over,
    what these have changed is added to it. So it is part of the next exchange, as if they had been made after
    it.

    Args:
        flat: of a model whose trained tensors have memory of their own.
        engine: of a job in mode `local`.

    Attributes:
        made: how many there are.
    """

    def __init__(self, flat: Flat, engine: Engine) -> None:
        self._consistency = engine.spec.consistency
        self.made = 0
        rule = self._consistency.outer_rule
        self._rate, self._elastic = rule.learning_rate, rule.elastic
        self._flat = flat
        self._engine = engine
        self._own: dict[int, torch.Tensor] = {}
        self._started: dict[int, torch.Tensor] = {}  # the values that an exchange under way is about
        self._fragments = fragments(flat.layout, self._consistency.fragments or 1)
        self._every = frozenset().union(*self._fragments)
        self._trained = [0] * len(self._fragments)  # records since each fragment was exchanged last
        self._exchanges = 0
        engine.local = self

    def step_made(self) -> None:
        """The script's own optimizer has made a step. Blocks if it is time for an exchange.

        Raises as `Engine.finish_step`.
        """
        engine = self._engine
        engine.keep_step()
        self.made += 1
        self._trained = [records + engine.batches.last_kept for records in self._trained]
        if engine.records.part is Part.LAST_STEP:
            self.exchange()
            return
        if self.made >= (self._consistency.overlap or 0) and not self._finish():
            return
        # Where workers are balanced by speed, an exchange may be due after fewer steps than `overlap` says.
        if self.made >= self._due and self._finish() and (at := self._at()) is not None:
            self._exchange(turn(at, len(self._fragments), scattered=self._asks), going_on=True)

    @property
    def _due(self) -> int:
        """How many steps there are between the last exchange and the next one."""
        exchange = self._engine.exchange
        steps = exchange.told.steps if exchange is not None else 0
        said = self._engine.spec.consistency.steps  # it may change while the job runs
        return steps_before(self._exchanges, steps or said or 1, len(self._fragments))

    @property
    def _asks(self) -> bool:
        """Whether it depends on the round that is open which fragment is exchanged."""
        return self._consistency.quorum is not None and len(self._fragments) > 1

    def _at(self) -> int | None:
        """What the next fragment follows from. Blocks. Workers of the same round exchange the same one.

        Returns None if this worker had to join again.
        """
        if self._asks:
            return self._engine.open_round()
        return self._engine.version if self._consistency.waits_for_all else self._exchanges

    def exchange(self) -> None:
        """Push what the steps since the last exchanges have changed, and wait for the version. Blocks.

        The model has the job's values then. Does nothing if there are no such steps, or if the script is in
        the middle of one.

        Raises as `Engine.finish_step`.
        """
        self._flat.check()
        if not self._finish():
            return
        if any(self._trained):
            self._exchange(None, going_on=False)
        elif self._elastic and not (self._engine.batches.computed or self._engine.closed):
            self.void()

    def _exchange(self, fragment: int | None, *, going_on: bool) -> None:
        """See `exchange`.

        Args:
            fragment: what it is about; None for all of them.
            going_on: the script makes more steps. Then an elastic worker keeps its own values.
        """
        engine = self._engine
        if engine.batches.computed or engine.closed or not self._finish():
            return
        buckets = self._every if fragment is None else self._fragments[fragment]
        besides = self._every - buckets
        if self._elastic:
            self._set_aside(besides)
            if not engine.refresh(besides):
                return
        samples = max(self._trained) if fragment is None else self._trained[fragment]
        starts = going_on and bool(self._consistency.overlap)
        if starts:
            self._started = self._now(besides)
        engine.begin_exchange(samples, besides)
        for bucket, present in self._contribute(besides):
            engine.ready(bucket, present)
        self.made = 0
        self._exchanges += 1
        for number in range(len(self._fragments)) if fragment is None else (fragment,):
            self._trained[number] = 0
        if starts:
            engine.start_exchange()
            return
        drops = engine.records.drops
        engine.finish_step()
        if self._elastic and going_on and drops == engine.records.drops:
            self._take_back()

    def void(self) -> None:
        """They count for nothing: the model has the values again that were pulled last."""
        self._engine.cancel_exchange()
        self.made = 0
        self._trained = [0] * len(self._fragments)
        self._own.clear()
        self._started.clear()
        self._flat.publish()

    def _finish(self) -> bool:
        """Take over what the exchange under way has come to, if there is one. Blocks.

        Returns False if it is lost, and with it the steps that were made since.
        """
        if self._engine.started is None:
            return True
        try:
            if not self._engine.finish_exchange():
                return False
            self._take_over()
        except BaseException:  # all of the model, or some of it, is of another version than what was pulled
            self._engine.leave_step()
            raise
        self._started.clear()
        self._flat.publish(besides={bucket.index for bucket in self._flat.layout.pushed})
        return True

    @torch.no_grad()
    def _take_over(self) -> None:
        """Make the model what the exchange has come to, with what was changed since it was started."""
        for index, before in self._started.items():
            tensor, rule = self._flat.tensors[index], self._flat.layout.tensors[index].rule
            _go_on(tensor, before, self._flat.value(index).to(tensor.device), rule)

    def _changing(self, besides: Set[int]) -> Iterator[int]:
        """The tensors that the exchange replaces: those that it is about, and the buffers."""
        yield from self._exchanged(besides)
        for index, spec in enumerate(self._flat.layout.tensors):
            if spec.rule not in (Rule.GRADIENT, Rule.CONSTANT):
                yield index

    def _exchanged(self, besides: Set[int]) -> Iterator[int]:
        """The tensors of gradients that the exchange is about."""
        for index, spec in enumerate(self._flat.layout.tensors):
            if spec.rule is Rule.GRADIENT and besides.isdisjoint(self._flat.buckets_of[index]):
                yield index

    def _set_aside(self, besides: Set[int]) -> None:
        """The job's values are about to be pulled into the model, which must not replace this worker's."""
        self._own = self._now(besides)

    def _now(self, besides: Set[int]) -> dict[int, torch.Tensor]:
        """A copy of what the exchange replaces, as it is on this worker."""
        return {index: self._flat.tensors[index].detach().clone() for index in self._changing(besides)}

    def _contribute(self, besides: Set[int]) -> Iterator[tuple[Bucket, Sequence[bool]]]:
        """Put what is to be pushed where it is sent from; yields the buckets as `Engine.ready` takes them.

        Parameters that were set aside move towards those that were pulled.
        """
        layout, tensors = self._flat.layout, self._flat.tensors
        for index in self._exchanged(besides):
            if tensors[index].requires_grad:
                self._subtract(index)
            else:
                self._flat.clear_contribution(index)
        for index, spec in enumerate(layout.tensors):
            if spec.rule is Rule.SUM:
                self._flat.put(index, tensors[index])
            elif spec.rule not in (Rule.GRADIENT, Rule.CONSTANT):
                self._flat.contribution(index).copy_(self._own.get(index, tensors[index]))
        for bucket in layout.pushed:
            there = bucket.index not in besides
            trained = [there and tensors[piece.tensor].requires_grad for piece in bucket.pieces]
            yield bucket, trained if bucket.rule is Rule.GRADIENT else ()

    @torch.no_grad()
    def _subtract(self, index: int) -> None:
        contribution, own = self._flat.contribution(index), self._own.get(index)
        contribution.copy_(self._flat.tensors[index] if own is None else own)
        torch.sub(self._flat.value(index), contribution, out=contribution)
        if own is not None:
            own.add_(contribution.to(own.device), alpha=self._rate)

    @torch.no_grad()
    def _take_back(self) -> None:
        """Go on from the parameters that were set aside. Buffers stay what the exchange has made of them."""
        for index, own in self._own.items():
            if self._flat.layout.tensors[index].rule is Rule.GRADIENT:
                self._flat.tensors[index].copy_(own)
        self._own.clear()


def _go_on(tensor: torch.Tensor, before: torch.Tensor, value: torch.Tensor, rule: Rule) -> None:
    """Make `tensor` the new `value`, with what this worker has changed since it had the values `before`.

    What is no quantity has no difference, so an element that has changed stays: a flag, what was set to or
    from Inf, and what scripts assign (`Rule.BROADCAST`).
    """
    if rule is Rule.GRADIENT:
        tensor.sub_(before).add_(value)
        return
    changed = tensor
    if rule is not Rule.BROADCAST and tensor.dtype is not torch.bool:
        moved = tensor - before + value
        changed = torch.where(moved.isnan(), tensor, moved)
    tensor.copy_(torch.where(tensor == before, value, changed))


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
    """With several processes in a worker, each local step is one step of all of them. All make it together.

    Before the script's optimizer makes a step, every process gets the mean of their gradients, weighted by
    the records of their slices. All processes get the same bytes. So optimizers that begin with the same
    values and the same state have the same afterwards, and nothing else has to be sent from process to
    process until the next exchange. Belongs to the training thread.

    Gradients are added up in shared memory of their own. The memory that exchanges are pushed from may be
    under way while the next local steps are made.

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
