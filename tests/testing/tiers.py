"""Which values of a test's parameters run with each change; the others carry `@pytest.mark.nightly`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

nightly = pytest.mark.nightly


def per_change(values: Iterable[Any], *, keep: Container[Any]) -> list[Any]:
    """All values, for `parametrize`: those that are in `keep` run with each change, the others each night.

    A tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in keep else nightly
        )
        for value in values
    ]


def pairwise(*axes: Sequence[Any]) -> set[tuple[Any, ...]]:
    """Combinations of the axes in which each two values of two axes meet; few of them, always the same."""
    combinations = list(itertools.product(*axes))
    open_pairs = {pair for each in combinations for pair in _pairs(each)}
    found = set()
    while open_pairs:
        best = max(combinations, key=lambda each: len(open_pairs & _pairs(each)))
        found.add(best)
        open_pairs -= _pairs(best)
    return found


def _pairs(combination: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))
