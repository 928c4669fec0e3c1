"""What of a test's parameters runs with each change; the rest carries `@pytest.mark.nightly`.

`per_change` names the values of one parameter. `@pytest.mark.covering(2)` is for tests of several: of their
combinations so many run that each two values of two parameters meet; with 1, each value is there once. An
integration test without that mark runs in one place of those that it has, see `PLACES`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

PLACES = ("shards", "server", "durability", "transport", "lost")
"""Parameters of integration tests that say where the values of a model are, and what of that is lost. A test
runs in one place with each change, for each combination of its other parameters; tests differ in which."""


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
    """Mark those items that are not needed to cover a test's parameters, or that have another place."""
    groups: dict[tuple[Any, int], list[tuple[pytest.Item, Mapping[str, int]]]] = {}
    placed: list[tuple[pytest.Item, str, Mapping[str, int]]] = []
    for item in items:
        mark, call = item.get_closest_marker("covering"), getattr(item, "callspec", None)
        if call is None or item.get_closest_marker("nightly") is not None:
            continue
        test = getattr(item, "originalname", "")
        values = {name: id(value) for name, value in call.params.items()}
        if mark is not None:
            groups.setdefault(((item.path, test), mark.args[0]), []).append((item, values))
        elif item.path.parent.name == "integration":
            placed.append((item, f"{item.path.name}::{test}", values))
    kept = in_one_place([(test, values) for _, test, values in placed])
    _mark([item for item, *_ in placed], kept)
    for (_, strength), group in groups.items():
        _mark([item for item, _ in group], covering([values for _, values in group], strength))


def _mark(items: Sequence[pytest.Item], kept: Collection[int]) -> None:
    for number, item in enumerate(items):
        if number not in kept:
            item.add_marker(pytest.mark.nightly)


def in_one_place(cases: Sequence[tuple[str, Mapping[str, int]]]) -> set[int]:
    """The numbers of those cases of tests that are left if each has one place; see `PLACES`.

    A case is the name of its test, and which value each of its parameters has.
    """
    tests: dict[str, dict[tuple[tuple[str, int], ...], list[int]]] = {}
    for number, (test, values) in enumerate(cases):
        others = tuple(sorted(each for each in values.items() if each[0] not in PLACES))
        tests.setdefault(test, {}).setdefault(others, []).append(number)
    return {
        numbers[(zlib.crc32(test.encode()) + count) % len(numbers)]
        for test, groups in tests.items()
        for count, numbers in enumerate(groups.values())
    }


def covering(combinations: Sequence[Mapping[str, int]], strength: int) -> set[int]:
    """The numbers of few combinations in which all shows what any `strength` parameters can be together."""
    pieces = [set(itertools.combinations(sorted(each.items()), strength)) for each in combinations]
    missing, kept = set[Any]().union(*pieces), set[int]()
    while missing:
        best = max(range(len(pieces)), key=lambda number: len(pieces[number] & missing))
        kept.add(best)
        missing -= pieces[best]
    return kept
