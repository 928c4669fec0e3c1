"""What of a test's parameters runs with each change; the rest carries `@pytest.mark.nightly`.

`per_change` names the values of one parameter. `@pytest.mark.covering(2)` is for tests of several: of their
combinations so many run that each two values of two parameters meet; with 1, each value is there once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def per_change(values: Iterable[Any], *, keep: Collection[Any]) -> list[Any]:
    """All values, for `parametrize`; those that are not to be kept run each night.

    A tuple is the values of several parameters.
    """
    every = list(values)
    assert all(each in every for each in keep), "what is to be kept is one of the values"
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)), marks=() if each in keep else pytest.mark.nightly
        )
        for each in every
    ]


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark those items of a test with `covering` that are not needed to cover its parameters."""
    groups: dict[tuple[Any, int], list[tuple[pytest.Item, Mapping[str, int]]]] = {}
    for item in items:
        mark, call = item.get_closest_marker("covering"), getattr(item, "callspec", None)
        if mark is not None and call is not None and item.get_closest_marker("nightly") is None:
            key = (item.path, getattr(item, "originalname", "")), mark.args[0]
            values = {name: id(value) for name, value in call.params.items()}
            groups.setdefault(key, []).append((item, values))
    for (_, strength), group in groups.items():
        kept = covering([values for _, values in group], strength)
        for number, (item, _) in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.nightly)


def covering(combinations: Sequence[Mapping[str, int]], strength: int) -> set[int]:
    """The numbers of few combinations in which all shows what any `strength` parameters can be together."""
    pieces = [set(itertools.combinations(sorted(each.items()), strength)) for each in combinations]
    missing, kept = set[Any]().union(*pieces), set[int]()
    while missing:
        best = max(range(len(pieces)), key=lambda number: len(pieces[number] & missing))
        kept.add(best)
        missing -= pieces[best]
    return kept
