"""Mode `local`: what a worker exchanges of the steps that it has made by itself.

The script's optimizer changes the model on this worker. The values that were pulled last stay beside it. At
an exchange the difference between the two is pushed in place of a gradient (the *pseudo-gradient* of Reddi
et al. 2020, "Adaptive Federated Optimization"). The outer rule, which is an ordinary `torch.optim.SGD` on
the parameter server, makes a version of it. So rounds, records, attempts and checkpoints are those of other
modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS
from elastic_ps.errors import InvalidModel
from elastic_ps.training import OuterRule
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.model import Flat


def outer_optimizer(inner: torch.optim.Optimizer, rule: OuterRule) -> torch.optim.SGD:
    """The optimizer that the parameter server runs, for the parameters that the script's own trains.

    Raises:
        InvalidModel: a parameter group has limits, which the parameter server would keep only at exchanges.
    """
    for index, group in enumerate(inner.param_groups):
        for key in (*LIMITS, KEEP_ZEROS):
            if group.get(key) is not None:
                raise InvalidModel(
                    f"param_groups[{index}] has {key}={group[key]!r}, but in mode local the script's own "
                    "optimizer makes the steps, and torch's know no such limits. Leave it out, and bring the "
                    "values within the limits in the script, after optimizer.step()"
                )
    groups = [{"params": list(group["params"])} for group in inner.param_groups]
    return torch.optim.SGD(groups, lr=rule.learning_rate, momentum=rule.momentum, nesterov=rule.momentum > 0)


class LocalSteps:
    """The steps that this worker has made since the last exchange. Belongs to the training thread.

    Args:
        flat: of a model whose trained tensors have memory of their own.
        engine: of a job in mode `local`.

    Attributes:
        made: how many there are.
    """

    def __init__(self, flat: Flat, engine: Engine) -> None:
        consistency = engine.spec.consistency
        assert consistency.steps is not None
        self.made = 0
        self._most = consistency.steps
        self._rate, self._elastic = consistency.outer_rule.learning_rate, consistency.outer_rule.elastic
        self._flat = flat
        self._engine = engine
        self._own: dict[int, torch.Tensor] = {}
        engine.local = self

    def step_made(self) -> None:
        """The script's own optimizer has made a step. Blocks if it is time for an exchange.

        Raises as `Engine.finish_step`.
        """
        self._engine.keep_step()
        self.made += 1
        stopping = self._engine.stopping
        if self.made >= self._most or stopping:
            self.exchange(going_on=not stopping)

    def exchange(self, *, going_on: bool = False) -> None:
        """Push what the steps since the last exchange have changed, and wait for the version. Blocks.

        Does nothing if there are none, or if the script is in the middle of one.

        Args:
            going_on: the script makes more. Then an elastic worker keeps its own values; else it has the
                job's at the end.

        Raises as `Engine.finish_step`.
        """
        engine = self._engine
        if engine.batches.computed or engine.closed:
            return
        if not engine.batches.kept:
            if self._elastic:
                self.void()
            return
        if self._elastic:
            self._set_aside()
            if not engine.refresh():
                return
        engine.begin_exchange()
        for bucket, present in self._contribute():
            engine.ready(bucket, present)
        generation = engine.generation
        engine.finish_step()
        if self._elastic and going_on and generation == engine.generation:
            self._take_back()

    def void(self) -> None:
        """They count for nothing: the model has the values again that were pulled last."""
        self.made = 0
        self._own.clear()
        self._flat.publish()

    def _set_aside(self) -> None:
        """The job's values are about to be pulled into the model, which must not replace this worker's."""
        self._own = {
            index: self._flat.tensors[index].detach().clone()
            for index, spec in enumerate(self._flat.layout.tensors)
            if spec.rule is Rule.GRADIENT
        }

    def _contribute(self) -> Iterator[tuple[Bucket, Sequence[bool]]]:
        """Put what is to be pushed where it is sent from; yields the buckets as `Engine.ready` takes them.

        Values that were set aside move towards those that were pulled.
        """
        self.made = 0
        layout, tensors = self._flat.layout, self._flat.tensors
        for index, spec in enumerate(layout.tensors):
            if spec.rule is Rule.GRADIENT and not tensors[index].requires_grad:
                self._flat.clear_contribution(index)
            elif spec.rule is Rule.GRADIENT:
                self._subtract(index)
            elif spec.rule is not Rule.CONSTANT:
                self._flat.contribution(index).copy_(tensors[index])
        for bucket in layout.pushed:
            trained = [tensors[piece.tensor].requires_grad for piece in bucket.pieces]
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
        """Go on from the values that were set aside."""
        for index, own in self._own.items():
            self._flat.tensors[index].copy_(own)
        self._own.clear()
