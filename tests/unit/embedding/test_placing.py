"""Where rows are: spread, and moved no more than another number of shards needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.embedding.placing import shard_of

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("ids", [np.arange(30_000), np.arange(30_000) * 3 * 2**20])
@pytest.mark.parametrize("shards", [2, 3, 7])
def test_rows_are_spread_whatever_the_ids_are(
    ids: np.ndarray[tuple[int], np.dtype[np.int64]], shards: int
) -> None:
    counts = np.bincount(shard_of(ids, shards), minlength=shards)
    assert abs(counts * shards / len(ids) - 1).max() < 0.05


@given(st.lists(INT64, max_size=20), st.integers(1, 8))
def test_a_row_moves_only_to_a_new_shard(ids: list[int], shards: int) -> None:
    array = np.array(ids, dtype=np.int64)
    before, after = shard_of(array, shards), shard_of(array, shards + 1)
    assert ((after == before) | (after == shards)).all()
    assert (before < shards).all()
