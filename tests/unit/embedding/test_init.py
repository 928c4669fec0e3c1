"""The first values of rows, beside a scalar SplitMix64 in Python's integers."""

from __future__ import annotations

import hashlib
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.embedding import constant, hashed, normal, uniform
from elastic_ps.embedding.init import Init, key_of, words
from elastic_ps.errors import UsageError

INT64 = st.integers(-(2**63), 2**63 - 1)
MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_words_are_those_that_splitmix64_is_published_with() -> None:
    """The first outputs of seed 1234567, as in the test of Rosetta Code and of the JDK."""
    assert [mix((1234567 + n * 0x9E3779B97F4A7C15) & MASK) for n in (1, 2)] == [
        6457827717110365317,
        3203168211198807973,
    ]


@given(key=st.integers(0, MASK), ids=st.lists(INT64, min_size=1, max_size=8), count=st.integers(1, 5))
def test_words_are_a_pure_function_of_key_and_id(key: int, ids: list[int], count: int) -> None:
    expected = [
        [mix((seed + n * 0x9E3779B97F4A7C15) & MASK) for n in range(1, count + 1)]
        for seed in (mix((id_ + key) & MASK) ^ key for id_ in ids)
    ]
    assert words(key, np.array(ids, dtype=np.int64), count).tolist() == expected


@pytest.mark.parametrize("init", [uniform(-0.5, 2.0), normal(1.0, 0.5), constant(3.0)])
def test_values_do_not_depend_on_the_other_ids_or_on_the_dimension(init: Init) -> None:
    ids = np.array([5, -1, 2**63 - 1, 5, 0], dtype=np.int64)
    together = init.first_values(1, ids, 7)
    assert together.shape == (5, 7)
    for place in range(len(ids)):
        assert (init.first_values(1, ids[place : place + 1], 3) == together[place, :3]).all()


def test_values_are_distributed_as_asked() -> None:
    ids = np.arange(20_000)
    drawn = uniform(-0.5, 1.5).first_values(1, ids, 4)
    assert -0.5 <= drawn.min() < -0.499
    assert 1.499 < drawn.max() <= 1.5
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    drawn = normal(1.0, 2.0).first_values(1, ids, 4)
    assert drawn.mean() == pytest.approx(1.0, abs=0.03)
    assert drawn.std() == pytest.approx(2.0, abs=0.03)
    assert abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.03
    expected = statistics.NormalDist(1.0, 2.0).cdf(2.0)
    assert (drawn < 2.0).mean() == pytest.approx(expected, abs=0.01)


def test_tables_and_seeds_have_other_values() -> None:
    keys = {key_of(seed, table) for seed in (0, 1) for table in ("user", "item")}
    assert len(keys) == 4


@given(st.lists(st.text("aZ é文", max_size=5), max_size=5))
def test_strings_have_the_id_that_the_guide_states(strings: list[str]) -> None:
    expected = [
        int.from_bytes(hashlib.blake2b(s.encode(), digest_size=8).digest(), "little", signed=True)
        for s in strings
    ]
    assert hashed(strings).tolist() == expected


def test_what_is_no_distribution_is_refused() -> None:
    text: Any = "x"
    with pytest.raises(UsageError, match=r"Constant\(value='x'\): expected a number"):
        constant(text)
    for make in (lambda: uniform(1.0, 0.0), lambda: normal(0.0, -1.0), lambda: constant(float("nan"))):
        with pytest.raises(UsageError, match="takes"):
            make()
