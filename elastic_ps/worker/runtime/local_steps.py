"""Mode `local`: a worker makes steps by itself, and exchanges what they have changed.

The script's optimizer changes the model on this worker. The values that were pulled last stay beside it. At
an exchange the difference between the two is pushed in place of a gradient (the *pseudo-gradient* of Reddi
et al. 2020, "Adaptive Federated Optimization"). The outer rule, which is an ordinary optimizer on the
parameter server, makes a version of it. So rounds, records, attempts and checkpoints are those of other
modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from elastic_ps.api.consistency import OuterRule
from elastic_ps.codec.delayed import DelayedNesterov
from elastic_ps.core.fragments import fragments, steps_before, turn
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS
from elastic_ps.core.working import Event
from elastic_ps.data.states import Presence
from elastic_ps.errors import ElasticPSError, InvalidModel, RefusalCode, Refused, UsageError
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.runtime.gradients import Gradients
from elastic_ps.worker.runtime.runtime import Runtime
from elastic_ps.worker.strategies.local_group import MeanGradients
from elastic_ps.worker.strategies.strategy import Started


def outer_optimizer(inner: torch.optim.Optimizer, rule: OuterRule, *, workers: int) -> torch.optim.Optimizer:
    """The optimizer that the parameter server runs, for the parameters that the script's own trains.

    A group has an `eps` if the script's own is adaptive; see `Settings.slowed`.

    Args:
        workers: how many the job has at first.

    Raises:
        InvalidModel: a parameter group has limits, which the parameter server would keep only at exchanges.
    """
    _refuse_limits(inner)
    groups = [{"params": [*g["params"]]} | ({"eps": 0.0} if "eps" in g else {}) for g in inner.param_groups]
    if rule.delayed:
        return DelayedNesterov(groups, lr=rule.learning_rate, momentum=rule.momentum, every=workers)
    nesterov = rule.nesterov and rule.momentum > 0
    return torch.optim.SGD(groups, lr=rule.learning_rate, momentum=rule.momentum, nesterov=nesterov)


def _refuse_limits(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidModel if a parameter group has limits, which torch's optimizers do not keep."""
    for index, group in enumerate(optimizer.param_groups):
        for key in (*LIMITS, KEEP_ZEROS):
            if group.get(key) is not None:
                raise InvalidModel(
                    f"param_groups[{index}] has {key}={group[key]!r}, but in mode local the script's own "
                    "optimizer makes the steps, and torch optimizers have no such limits. Leave it out, and "
                    "bring the values within the limits in the script, after optimizer.step()"
                )


class LocalSteps:
    """The steps that this worker has made since the last exchange. Belongs to the training thread.

    With `fragments`, each exchange is about one of them. The others keep this worker's values, and those that
    it began with, until their turn. An exchange after which this worker makes no more steps for now is about
    all of them.

    With `overlap`, an exchange goes on while the script makes its next steps. When the version is taken over,
    the change by these steps is added to it, and so becomes part of the next exchange.

    Args:
        flat: of a model whose trained tensors have memory of their own.
        make_step: has the script's own optimizer, or the given one of several, make a step.

    Attributes:
        made: how many there are.
        on_version: how many steps the script has made since this worker got its version.
        started: the exchange that goes on while the script makes its next steps.
    """

    def __init__(
        self,
        flat: Flat,
        runtime: Runtime,
        gradients: Gradients,
        make_step: Callable[[Callable[[], Any] | None, torch.optim.Optimizer | None], Any],
    ) -> None:
        self._gradients, self._make_step = gradients, make_step
        self._mean = None if runtime.world.alone else MeanGradients(flat, runtime.world, self._parts)
        self._consistency = runtime.spec.consistency
        self.made = self.on_version = 0
        rule = self._consistency.outer_rule
        self._rate, self._elastic = rule.learning_rate, rule.elastic
        self._flat, self._runtime = flat, runtime
        self._own: dict[int, torch.Tensor] = {}
        self.started: Started | None = None
        self._before: dict[int, torch.Tensor] = {}  # the values that an exchange under way is about
        self._fragments = fragments(flat.layout, self._consistency.fragments or 1)
        self._every = frozenset().union(*self._fragments)
        self._trained = [0] * len(self._fragments)  # records since each fragment was exchanged last
        self._weights = [0.0] * len(self._fragments)  # what the steps on them weigh
        self._weighed = False  # whether the script has said that
        self._exchanges = 0
        runtime.local = self

    def step(self, closure: Callable[[], Any] | None, part: torch.optim.Optimizer | None) -> Any:
        """The script's own optimizer makes a step; see `ElasticOptimizer.step_of`."""
        if closure is not None:
            closure = self._required(closure) if self._mean is None else self._mean.of(closure)
        elif self._mean is not None:
            self._mean.take()
        made = closure is not None or self._is_due()
        loss = self._make_step(closure, part)
        self._flat.check()  # not before: a closure computes on the model, and may assign buffers
        if made and (closure is None or self._is_due()):
            self._gradients.reset()
            self._step_made()
        return loss

    def _required(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which raises UsageError before the optimizer steps if the step belongs to no batch."""

        def required() -> Any:
            loss = closure()
            self._is_due()
            return loss

        return required

    def _is_due(self) -> bool:
        """Whether the script has made gradients for a step. Raises UsageError if that belongs to no batch."""
        if self._runtime.has_no_step:
            return False
        self._runtime.require_batch()
        return True

    def _parts(self) -> tuple[float | None, list[float]]:
        """The weight that the script gave this process's part of the step, and all processes' shares.

        The shares are those of the records. Raises UsageError if the step belongs to no batch.
        """
        self._runtime.require_batch()
        return self._runtime.parts()

    def _step_made(self) -> None:
        """The script's own optimizer has made a step. Blocks if it is time for an exchange.

        Raises as `Runtime.finish_step`.
        """
        runtime = self._runtime
        runtime.log_skipped(runtime.batches.decide(keep_new=True))
        weight = runtime.batches.weight if self._mean is None else self._mean.weight
        runtime.batches.keep()
        self.made += 1
        self.on_version += 1
        records = runtime.batches.last_kept
        if any(self._trained) and self._weighed != (weight is not None):
            raise UsageError(
                "session.weigh was called for only some of the steps exchanged together. Call it "
                "before the backward() of each step, or of none"
            )
        self._weighed = weight is not None
        self._trained = [before + records for before in self._trained]
        self._weights = [before + (weight or records) for before in self._weights]
        if runtime.records.presence is Presence.LAST_STEP:
            self.exchange()
            return
        if self.made >= (self._consistency.overlap or 0) and not self._finish():
            return
        steps = runtime.strategy.info.steps or runtime.spec.consistency.steps or 1  # they may change
        due = steps_before(self._exchanges, steps, len(self._fragments))
        # Where workers are balanced by speed, an exchange may be due after fewer steps than `overlap` says.
        if self.made >= due and self._finish() and (at := self._at()) is not None:
            self._exchange(turn(at, len(self._fragments), scattered=self._asks), going_on=True)

    @property
    def _asks(self) -> bool:
        """Whether it depends on the round that is open which fragment is exchanged."""
        return self._consistency.quorum is not None and len(self._fragments) > 1

    def _at(self) -> int | None:
        """The number that chooses the next fragment, the same for all workers of a round. Blocks.

        Returns None if this worker had to join again.
        """
        runtime = self._runtime
        if not self._asks:
            return runtime.version if self._consistency.waits_for_all else self._exchanges
        step = runtime.new_step(runtime.version)
        with runtime.rejoining():  # the round that is open waits for this worker from now on
            try:
                return runtime.world.decide("the start of an exchange", lambda: runtime.client.begin(step)[0])
            except Refused as refusal:
                if refusal.code is RefusalCode.LATE:
                    return step.base  # so is the exchange
                raise
        return None

    def exchange(self) -> None:
        """Push what the steps since the last exchanges have changed, and get the version. Blocks.

        Does nothing if there are no such steps, or if the script is in the middle of one.

        Raises as `Runtime.finish_step`.
        """
        self._flat.check()
        if not self._finish():
            return
        if any(self._trained):
            self._exchange(None, going_on=False)
        elif self._elastic and not (self._runtime.batches.computed or self._runtime.closed):
            self.void()

    def _exchange(self, fragment: int | None, *, going_on: bool) -> None:
        """See `exchange`.

        Args:
            fragment: its number; None for all of them.
            going_on: the script makes more steps. Then an elastic worker keeps its own values.
        """
        runtime = self._runtime
        if runtime.batches.computed or runtime.closed or not self._finish():
            return
        starts = going_on and bool(self._consistency.overlap)
        try:
            if not self._begin(fragment, starts=starts) or starts:
                return
        except ElasticPSError:
            raise
        except BaseException:  # nobody knows how much of it is sent, and of which version the model is
            runtime.give_up_step()
            raise
        drops = runtime.drops
        runtime.finish_step()
        if self._elastic and going_on and drops == runtime.drops:
            # Go on from the parameters that were set aside. Buffers stay what the exchange has made of them.
            with torch.no_grad():
                for index, own in self._own.items():
                    if self._flat.layout.tensors[index].rule is Rule.GRADIENT:
                        self._flat.tensors[index].copy_(own)
            self._own.clear()

    def _begin(self, fragment: int | None, *, starts: bool) -> bool:
        """Begin an exchange; see `_exchange`. An elastic worker blocks for the job's values first.

        Returns False if this worker had to join again.
        """
        runtime = self._runtime
        excluded = self._every - (self._every if fragment is None else self._fragments[fragment])
        if self._elastic:
            self._own = self._now(excluded)  # the job's values must not replace this worker's
            fetched = False
            with runtime.rejoining():
                runtime.strategy.fetch(runtime.strategy.version, contributor=False, excluded=excluded)
                fetched = True
            if not fetched:
                return False
        about = range(len(self._fragments)) if fragment is None else (fragment,)
        samples = max(self._trained[number] for number in about)
        weight = max(self._weights[number] for number in about) if self._weighed else None
        if starts:
            self._before = self._now(excluded)
        runtime.batches.gather()  # all steps since the last exchange are one for the parameter server
        runtime.begin(samples, weight, excluded)
        for bucket, present in self._contribute(excluded):
            runtime.ready(bucket, present)
        self.made, self.on_version = 0, self.on_version if starts else 0
        self._exchanges += 1
        for number in about:
            self._trained[number], self._weights[number] = 0, 0.0
        if starts:
            self._start()
        return True

    def void(self) -> None:
        """Undo these steps: the model gets the values that were pulled last."""
        self.cancel()
        self.made = self.on_version = 0
        self._trained, self._weights = [0] * len(self._fragments), [0.0] * len(self._fragments)
        self._own.clear()
        self._before.clear()
        self._flat.publish()

    def _finish(self) -> bool:
        """Take over the version of the exchange under way, if there is one. Blocks.

        Returns False if the exchange is lost, and with it the steps that were made since.
        """
        runtime, started = self._runtime, self.started
        if started is None:
            return True
        try:
            try:
                if not runtime.await_version(started.future.finish, started.settings, started.number):
                    return False  # its steps are void, and those since
            finally:
                self.cancel()
            self._take_over()
        except BaseException as error:  # some of the model may be of another version than what was pulled
            runtime.give_up_step()
            if isinstance(error, Refused) and error.code is RefusalCode.NOT_FINITE:
                runtime.batches.leave_out(started.ranges)
            raise
        self._before.clear()
        self._flat.publish(excluded={bucket.index for bucket in self._flat.layout.pushed})
        return True

    def _start(self) -> None:
        """End the exchange that has begun, without waiting for the version."""
        runtime = self._runtime
        step, ending, settings = runtime.ending()
        about = step.number, runtime.batches.computed, runtime.version, runtime.made
        runtime.batches.step_made()
        self.started = Started(runtime.strategy.start(ending), settings, *about)
        runtime.working.note(Event.START)

    def cancel(self) -> None:
        """End the exchange under way, if there is one. Blocks."""
        if self.started is not None:
            self.started.future.cancel()
            self.started = None

    @torch.no_grad()
    def _take_over(self) -> None:
        """Give the model the version of the exchange, with what has changed since it was started."""
        self.on_version = 0
        for index, before in self._before.items():
            tensor, rule = self._flat.tensors[index], self._flat.layout.tensors[index].rule
            _go_on(tensor, before, self._flat.value(index).to(tensor.device), rule)

    def _exchanged(self, excluded: Set[int]) -> Iterator[int]:
        """The trained parameters of the fragment."""
        for index, spec in enumerate(self._flat.layout.tensors):
            if spec.rule is Rule.GRADIENT and excluded.isdisjoint(self._flat.buckets_of[index]):
                yield index

    def _now(self, excluded: Set[int]) -> dict[int, torch.Tensor]:
        """Copies of the tensors that the exchange replaces: parameters of the fragment, and buffers."""
        specs = enumerate(self._flat.layout.tensors)
        buffers = [index for index, spec in specs if spec.rule not in (Rule.GRADIENT, Rule.CONSTANT)]
        replaced = [*self._exchanged(excluded), *buffers]
        return {index: self._flat.tensors[index].detach().clone() for index in replaced}

    def _contribute(self, excluded: Set[int]) -> Iterator[tuple[Bucket, Sequence[bool]]]:
        """Put what is to be pushed where it is sent from; yields the buckets as `Runtime.ready` takes them.

        Parameters that were set aside move towards those that were pulled.
        """
        layout, tensors = self._flat.layout, self._flat.tensors
        trained = {index for index in self._exchanged(excluded) if self._subtract(index)}
        for index, spec in enumerate(layout.tensors):
            if spec.rule is Rule.SUM:
                self._flat.put(index, tensors[index])
            elif spec.rule not in (Rule.GRADIENT, Rule.CONSTANT):
                self._flat.writable_contribution(index).copy_(self._own.get(index, tensors[index]))
        for bucket in layout.pushed:
            present = [piece.tensor in trained for piece in bucket.pieces]
            yield bucket, present if bucket.rule is Rule.GRADIENT else ()

    @torch.no_grad()
    def _subtract(self, index: int) -> bool:
        """Put the change of a parameter; returns False if it has been frozen all the time."""
        tensor, own, value = self._flat.tensors[index], self._own.get(index), self._flat.value(index)
        contribution = self._flat.writable_contribution(index).copy_(tensor if own is None else own)
        if not tensor.requires_grad and torch.equal(contribution.to(tensor.dtype), value.to(tensor.dtype)):
            self._flat.clear_contribution(index)
            return False
        torch.sub(value, contribution, out=contribution)
        if own is not None:
            own.add_(contribution.to(own.device), alpha=self._rate)
        return True


def _go_on(tensor: torch.Tensor, before: torch.Tensor, value: torch.Tensor, rule: Rule) -> None:
    """Make `tensor` the new `value`, plus what this worker has changed since the values `before`.

    Flags, Inf and what scripts assign (`Rule.BROADCAST`) have no difference: an element of these that this
    worker has changed stays.
    """
    if rule is Rule.GRADIENT:
        tensor.sub_(before).add_(value)
        return
    changed = tensor
    if rule is not Rule.BROADCAST and tensor.dtype is not torch.bool:
        moved = tensor - before + value
        changed = torch.where(moved.isnan(), tensor, moved)
    tensor.copy_(torch.where(tensor == before, value, changed))
