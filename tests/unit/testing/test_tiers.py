"""Which combinations of a test's parameters run with each change."""

from __future__ import annotations

import itertools

import pytest

from tests.testing.tiers import covering, per_change


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
