"""Which combinations of a test's parameters run with each change."""

from __future__ import annotations

import itertools

import pytest

from tests.testing.tiers import covering, in_one_place, per_change


def test_few_combinations_have_all_pairs() -> None:
    sizes = {"mode": 4, "place": 3, "shards": 2}
    every = [
        dict(zip(sizes, each, strict=True)) for each in itertools.product(*(range(n) for n in sizes.values()))
    ]
    kept = [every[number] for number in covering(every, 2)]
    for one, other in itertools.combinations(sizes, 2):
        pairs = {(each[one], each[other]) for each in kept}
        assert pairs == set(itertools.product(range(sizes[one]), range(sizes[other])))
    assert len(kept) < len(every)
    assert len(covering(every, 1)) == 4


def test_each_combination_of_other_parameters_has_one_place() -> None:
    tests = [f"test_{number}" for number in range(9)]
    sizes = {"mode": 3, "shards": 2, "durability": 2}
    values = [
        dict(zip(sizes, each, strict=True)) for each in itertools.product(*(range(n) for n in sizes.values()))
    ]
    cases = [(test, each) for test in tests for each in values]
    kept = [cases[number] for number in sorted(in_one_place(cases))]
    assert [(test, each["mode"]) for test, each in kept] == [*itertools.product(tests, range(3))]
    assert {(each["shards"], each["durability"]) for _, each in kept} == {*itertools.product((0, 1), (0, 1))}


def test_what_is_not_kept_is_for_the_night() -> None:
    kept, other = per_change(["tcp", "grpc"], keep=["tcp"])
    assert not kept.marks
    assert [mark.name for mark in other.marks] == ["nightly"]


def test_a_value_to_keep_that_there_is_not_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="one of the values"):
        per_change(["tcp"], keep=["udp"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("one", "abc")
@pytest.mark.parametrize("other", "xy")
def test_a_test_whose_parameters_are_to_be_covered_says_so(
    request: pytest.FixtureRequest, one: str, other: str
) -> None:
    """By the hook in `tests/conftest.py`."""
    chosen = {"ax", "by", "cx"}
    assert (request.node.get_closest_marker("nightly") is None) == (one + other in chosen)
