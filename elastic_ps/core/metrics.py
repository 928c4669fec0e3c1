"""Combines reported values over batches, processes and workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

Reduction: TypeAlias = Literal["mean", "sum", "max"]
"""`mean` is weighted by samples."""


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _sum(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(value for value, _ in pairs)


def _max(pairs: Sequence[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    return math.nan if any(map(math.isnan, values)) else max(values)


REDUCTIONS: Mapping[str, Callable[[Sequence[tuple[float, float]]], float]] = {
    "mean": _mean,
    "sum": _sum,
    "max": _max,
}
"""Each reduction of pairs (value, weight). `codec.reductions` has those of tensors."""

MOST_NAMES = 1000
"""The most names that the job keeps: a script may invent a new one in each step by mistake."""


class Metrics(NamedTuple):
    """Values that were reported together.

    Attributes:
        values: the values, by name.
        reductions: how to combine values of a name, if not by their mean.
        weight: the weight in means, in samples.
    """

    values: Mapping[str, float]
    reductions: Mapping[str, str]
    weight: float


def reduce_all(reported: Sequence[Metrics]) -> dict[str, float]:
    """Combine reports into one value for each name. If reductions differ, the first one counts."""
    found: dict[str, float] = {}
    for name in {name: None for each in reported for name in each.values}:
        those = [each for each in reported if name in each.values]
        how = those[0].reductions.get(name, "mean")
        found[name] = reduce_values(((each.values[name], each.weight) for each in those), how)
    return found


def reduce_values(given: Iterable[tuple[float, float]], how: str) -> float:
    """Combine pairs (value, weight), of which there is at least one.

    A value with weight 0 counts only if there is no other. NaN makes the result NaN.
    """
    pairs = list(given)
    pairs = [(value, weight) for value, weight in pairs if weight] or [(pairs[0][0], 1.0)]
    return REDUCTIONS.get(how, _mean)(pairs)


def keep(kept: dict[str, float], reported: Mapping[str, float]) -> None:
    """Keep reported values. Above `MOST_NAMES`, those reported longest ago are forgotten."""
    for name, value in reported.items():
        kept.pop(name, None)
        kept[name] = value
    for oldest in list(kept)[: max(0, len(kept) - MOST_NAMES)]:
        del kept[oldest]
