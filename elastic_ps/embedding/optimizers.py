"""Optimizers of rows: a step changes the rows that have a gradient, and no others.

Each is *lazy*: what torch's optimizer does to all elements in each step, whether or not they have a gradient,
cannot be done here without touching the whole table. Such options are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch

from elastic_ps.core.settings import FRESH, Divisors
from elastic_ps.embedding.init import require_numbers
from elastic_ps.errors import UsageError

_LAZY = (
    "{name}({option}={value}) changes every row in each step, but a table that grows changes only rows that "
    "have a gradient. {advice}"
)
_L2 = "Add the penalty to the loss, for the rows of the batch; or use FTRL, whose l2 is for touched rows"
_MOMENTUM = "Use LazyAdam, whose moments of a row rest while the row has no gradient"


class Slot(NamedTuple):
    """Numbers that an optimizer keeps for each row.

    Attributes:
        width: how many; None: as many as the row has values.
        first: what they are in a new row.
    """

    name: str
    width: int | None
    first: float


class Touched(NamedTuple):
    """The rows that have a gradient.

    Attributes:
        values: of shape (rows, dim).
        slots: in the order of the optimizer's `slots`, of shape (rows, width).
        gradient: of the shape and dtype of `values`; may be overwritten.
        number: of the steps that the table has made, this one included.
        rate: by what the learning rate is multiplied; see `RowOptimizer.rate_of`.
    """

    values: torch.Tensor
    slots: Sequence[torch.Tensor]
    gradient: torch.Tensor
    number: int
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """What all optimizers of rows have.

    Args:
        lr: the learning rate.
        scheduled: whether a scheduler of the model's optimizer changes it, too: it is multiplied by what the
            scheduler makes of the learning rate of the first parameter group. With `OneCycleLR`, `lr` is the
            largest rate.
        weight_decay, momentum: refused unless 0; see the message.

    Raises:
        UsageError: an argument is out of its range, or is not possible lazily.
    """

    lr: float
    scheduled: bool = False
    weight_decay: float = 0.0
    momentum: float = 0.0

    slots: ClassVar[tuple[Slot, ...]] = ()

    def __post_init__(self) -> None:
        require_numbers(self)
        self._require("lr", 0 <= self.lr < math.inf, "a number >= 0")
        name = type(self).__name__
        for option, advice in (("weight_decay", _L2), ("momentum", _MOMENTUM)):
            if value := getattr(self, option):
                raise UsageError(_LAZY.format(name=name, option=option, value=value, advice=advice))

    def _require(self, option: str, holds: bool, expected: str) -> None:
        if not holds:
            given = getattr(self, option)
            raise UsageError(f"{type(self).__name__}({option}={given!r}): expected {expected}")

    def rate_of(
        self,
        groups: Sequence[Mapping[str, Any]],
        first: Sequence[Mapping[str, Any]],
        divisors: Divisors = FRESH,
    ) -> float:
        """By what the learning rate of a step is multiplied.

        Args:
            groups: the parameter groups of the model's optimizer in this step.
            first: those with which training began, before any scheduler.
            divisors: what the staleness of the step divides learning rates by, as it did those in `groups`.
        """
        scheduled = 1.0
        if self.scheduled and groups and first and "lr" in groups[0]:
            # OneCycleLR has an initial_lr of its own, a small part of its max_lr.
            known = (groups[0][name] for name in ("max_lr", "initial_lr") if name in groups[0])
            begun = float(next(known, first[0].get("lr", 0.0)))
            if begun:
                scheduled = float(groups[0]["lr"]) * divisors.of(groups[0]) / begun
        return scheduled / divisors.of(vars(self))

    def step(self, rows: Touched) -> None:
        """Make a step, in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """`torch.optim.SGD` without momentum and weight decay: on touched rows the same values."""

    def step(self, rows: Touched) -> None:
        """See `RowOptimizer.step`."""
        rows.values.add_(rows.gradient, alpha=-self.lr * rows.rate)


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """`torch.optim.Adagrad` (Duchi et al. 2011): on touched rows the same values.

    Args:
        eps: is added to the root of the sum of squares.
    """

    eps: float = 1e-10

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", None, 0.0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", 0 <= self.eps < math.inf, "a number >= 0")

    def step(self, rows: Touched) -> None:
        """See `RowOptimizer.step`."""
        (total,) = rows.slots
        total.addcmul_(rows.gradient, rows.gradient)
        rows.values.addcdiv_(rows.gradient, total.sqrt().add_(self.eps), value=-self.lr * rows.rate)


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one sum for a row, of the mean of its squared gradients, as FBGEMM and TorchRec have it.

    Args:
        eps: is added to the root of the sum.
    """

    eps: float = 1e-8

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", 1, 0.0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", 0 <= self.eps < math.inf, "a number >= 0")

    def step(self, rows: Touched) -> None:
        """See `RowOptimizer.step`."""
        (total,) = rows.slots
        total.add_(rows.gradient.square().mean(1, keepdim=True))
        rows.values.addcdiv_(rows.gradient, total.sqrt().add_(self.eps), value=-self.lr * rows.rate)


@dataclass(frozen=True, kw_only=True)
class LazyAdam(RowOptimizer):
    """`torch.optim.SparseAdam`: the moments of a row change only when it has a gradient.

    This is not Adam (Kingma and Ba 2015), in which the moments of every row decay in each step. The
    correction of the bias counts the steps of the table.

    Args:
        betas: the decay of the moments.
        eps: is added to the root of the second moment.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg", None, 0.0), Slot("exp_avg_sq", None, 0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        two = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        right = two and all(isinstance(beta, Real) and 0 <= beta < 1 for beta in self.betas)
        self._require("betas", right, "two in [0, 1)")
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        self._require("eps", 0 <= self.eps < math.inf, "a number >= 0")

    def step(self, rows: Touched) -> None:
        """See `RowOptimizer.step`."""
        (first, second), (beta1, beta2) = rows.slots, self.betas
        first.lerp_(rows.gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(rows.gradient, rows.gradient, value=1 - beta2)
        size = self.lr * rows.rate * math.sqrt(1 - beta2**rows.number) / (1 - beta1**rows.number)
        rows.values.addcdiv_(first, second.sqrt().add_(self.eps), value=-size)


@dataclass(frozen=True, kw_only=True)
class FTRL(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches", algorithm 1).

    In the paper rows begin with 0. Here a row begins with its first values, whatever they are. The learning
    rate counts for past steps, too. So a scheduler, and the staleness of a step, multiply the gradient
    instead.

    Args:
        l1: the larger, the more values are exactly 0.
        l2: draws values towards 0, in rows that have a gradient.
        beta: the larger, the smaller are the first steps.
        initial_accumulator: what the sum of squares begins with.
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial_accumulator: float = 0.0

    slots: ClassVar[tuple[Slot, ...]] = (Slot("linear", None, 0.0), Slot("sum", None, 0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("lr", self.lr > 0, "a number > 0, because FTRL divides by it")
        for option in ("l1", "l2", "beta", "initial_accumulator"):
            self._require(option, 0 <= getattr(self, option) < math.inf, "a number >= 0")

    def step(self, rows: Touched) -> None:
        """See `RowOptimizer.step`."""
        linear, total = rows.slots
        # So the closed form gives the first values before the first gradient.
        new = (total == 0) & (linear == 0)
        if rows.rate != 1:
            rows.gradient.mul_(rows.rate)
        before = (total + self.initial_accumulator).sqrt_().masked_fill_(new, -self.beta)
        total.addcmul_(rows.gradient, rows.gradient)
        root = (total + self.initial_accumulator).sqrt_()
        linear.add_(rows.gradient).addcmul_((root - before).div_(self.lr), rows.values, value=-1)
        strength = root.add_(self.beta).div_(self.lr).add_(self.l2)
        shrunk = linear.sign().mul_((linear.abs() - self.l1).clamp_(min=0)).neg_()
        # 0 / 0: no gradient yet and no regularisation, so the value stays.
        torch.where(strength > 0, shrunk / strength, rows.values, out=rows.values)


KINDS: Sequence[type[RowOptimizer]] = (SGD, Adagrad, RowwiseAdagrad, LazyAdam, FTRL)


def check_optimizer(given: object) -> RowOptimizer:
    """Return the optimizer of a table. Raises UsageError if parameter servers have no such one."""
    if isinstance(given, RowOptimizer) and type(given) in KINDS:
        return given
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    raise UsageError(
        f"optimizer={kind}: the rows of a table that grows need an optimizer of rows, such as "
        "elastic_ps.embedding.RowwiseAdagrad(lr=0.05), Adagrad, SGD, LazyAdam or FTRL. Optimizers of torch "
        "train the other parameters"
    )
