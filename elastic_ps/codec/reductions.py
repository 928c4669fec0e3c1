"""The table of reductions: how the contributions of workers, or of processes, to a bucket become one.

`core.metrics` has those of single numbers, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from elastic_ps.codec.optimizers import wide
from elastic_ps.core.partition import Rule

Weighed: TypeAlias = Sequence[tuple[torch.Tensor, float]]
"""Contributions with their shares of the weight. One without weight is not read."""


class Reduction(NamedTuple):
    """How contributions to buckets with one rule become one.

    Attributes:
        name: "mean" is weighted; "first" is the contribution of the lowest index.
        dtype: the dtype in which a group adds up contributions of a dtype.
        add: adds a contribution to a sum of others. It gets the sum, the contribution, the contribution's
            share of the weight, the share of the others, and a bound of all magnitudes. If a share is small,
            1 minus the other one differs from it by rounding.
        join: makes the first of several contributions their reduction. It gets that one, its share of the
            weight, and the others.
    """

    name: Literal["mean", "sum", "max", "first"]
    dtype: Callable[[torch.dtype], torch.dtype]
    add: Callable[[torch.Tensor, torch.Tensor, float, float, float], object]
    join: Callable[[torch.Tensor, float, Weighed], object]


def _add_gradient(
    total: torch.Tensor, gradient: torch.Tensor, share: float, rest: float, bound: float
) -> None:
    """The mean of gradients, in one pass over memory. This does not overflow."""
    if bound > torch.finfo(total.dtype).max / 2:  # their difference might overflow
        total.mul_(rest).add_(gradient, alpha=share)
    elif share <= rest:
        torch.lerp(total, gradient.to(total.dtype), share, out=total)
    else:  # lerp takes the other share from 1, in the dtype of the sum
        torch.lerp(gradient.to(total.dtype), total, rest, out=total)


def _join_gradients(own: torch.Tensor, weight: float, others: Weighed) -> None:
    total = own if own.dtype in (torch.float32, torch.float64) else own.float()
    if weight:
        total.mul_(weight)
    else:
        total.zero_()  # whatever it is: NaN, too
    for other, share in others:
        if share:
            total.add_(other, alpha=share)
    if total is not own:
        own.copy_(total)


def _add_to_mean(total: torch.Tensor, value: torch.Tensor, share: float, _rest: float, _bound: float) -> None:
    """The mean of equal values is that value to the bit, so a constant does not drift by rounding.

    Nothing overflows, since shares are below 1.
    """
    value = value.to(total.dtype)
    mixed = total * (1 - share) + value * share
    total.copy_(torch.where(total == value, total, mixed))


def _join_means(own: torch.Tensor, _weight: float, others: Weighed) -> None:
    """Equal values stay as they are to the bit, infinite ones, too."""
    base = own.clone()
    for other, share in others:
        if share:
            own.add_((other - base).masked_fill_(other == base, 0), alpha=share)


def _by_twos(
    combine: Callable[[torch.Tensor, torch.Tensor], object],
) -> Callable[[torch.Tensor, float, Weighed], None]:
    def join(own: torch.Tensor, _weight: float, others: Weighed) -> None:
        for other, share in others:
            if share:
                combine(own, other)

    return join


def _maximum(total: torch.Tensor, other: torch.Tensor, *_: float) -> None:
    torch.maximum(total, other, out=total)


def _sum(total: torch.Tensor, other: torch.Tensor, *_: float) -> None:
    total.add_(other)


def _first(*_: object) -> None:
    pass


def _wider(dtype: torch.dtype) -> torch.dtype:
    """A dtype to add up in; gloo does not know all integers."""
    return wide(dtype) if dtype.is_floating_point else torch.int64


REDUCTIONS: Mapping[Rule, Reduction] = {
    Rule.GRADIENT: Reduction("mean", wide, _add_gradient, _join_gradients),
    # In float64 the mean of equal values is that value, to the bit.
    Rule.MEAN: Reduction("mean", lambda _: torch.float64, _add_to_mean, _join_means),
    Rule.MAXIMUM: Reduction("max", lambda _: torch.int64, _maximum, _by_twos(_maximum)),
    Rule.SUM: Reduction("sum", _wider, _sum, _by_twos(_sum)),
    Rule.BROADCAST: Reduction("first", lambda dtype: dtype, _first, _first),
}
"""The reduction of each rule whose buckets are pushed."""
