"""How values that scripts report become one: over batches, processes and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

Reduction: TypeAlias = Literal["mean", "sum", "max"]
"""`mean` is weighted by samples."""

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

MOST_NAMES = 1000
"""Names whose values the job keeps: a script may make up a new one in each step, by mistake."""


class Metrics(NamedTuple):
    """What was reported together.

    Attributes:
        values: by name.
        reductions: how a value and others of its name become one, where that is not their mean.
        weight: samples.
    """

    values: Mapping[str, float]
    reductions: Mapping[str, str]
    weight: float


def reduce_all(reported: Sequence[Metrics]) -> dict[str, float]:
    """One value for each name that anybody has reported. If reductions differ, the first one counts."""
    found: dict[str, float] = {}
    for name in {name: None for each in reported for name in each.values}:
        those = [each for each in reported if name in each.values]
        how = those[0].reductions.get(name, "mean")
        found[name] = reduce_values(((each.values[name], each.weight) for each in those), how)
    return found


def reduce_values(given: Iterable[tuple[float, float]], how: str) -> float:
    """One value out of pairs (value, weight), of which there is at least one.

    A value without weight counts only if there is no other. What is not a number makes the result that.
    """
    pairs = list(given)
    pairs = [(value, weight) for value, weight in pairs if weight] or [(pairs[0][0], 1.0)]
    values = [value for value, _ in pairs]
    if how == "sum":
        return sum(values)
    if how == "max":
        return math.nan if any(map(math.isnan, values)) else max(values)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def keep(kept: dict[str, float], reported: Mapping[str, float]) -> None:
    """Keep what is reported. Above `MOST_NAMES`, what was reported longest ago is forgotten."""
    for name, value in reported.items():
        kept.pop(name, None)
        kept[name] = value
    for oldest in list(kept)[: max(0, len(kept) - MOST_NAMES)]:
        del kept[oldest]
