"""The hash table and the rows behind it, beside a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.embedding.columns import Column, Rows
from elastic_ps.embedding.table import OVERHEAD

IDS = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))


@given(st.lists(st.tuples(st.booleans(), st.lists(IDS, max_size=30)), max_size=12))
def test_rows_are_found_as_in_a_dictionary(changes: list[tuple[bool, list[int]]]) -> None:
    column = Column(np.int64)
    rows, there = Rows([column]), dict[int, int]()
    for version, (add, given_) in enumerate(changes):
        ids = sorted(set(given_))
        if add:
            new = np.array([each for each in ids if each not in there], dtype=np.int64)
            numbers = rows.add(new, np.ones(len(new), dtype=np.int64), version)
            column.array[numbers] = new
            there |= dict.fromkeys(new.tolist(), version)
        else:
            gone = np.array([each for each in ids if each in there], dtype=np.int64)
            rows.remove(rows.find(gone))
            there = {id_: seen for id_, seen in there.items() if id_ not in gone}
        asked = np.array([*given_, *there], dtype=np.int64)
        found = rows.find(asked)
        assert (found >= 0).tolist() == [each in there for each in asked.tolist()]
        assert (column.array[found[found >= 0]] == asked[found >= 0]).all()
        assert len(rows) == len(there)
    assert sorted(rows.ids.array[rows.seen_since(0)].tolist()) == sorted(there)
    seen = rows.seen_before(len(changes) - 1)
    assert sorted(rows.ids.array[seen].tolist()) == sorted(
        i for i, s in there.items() if s < len(changes) - 1
    )


def test_many_rows_come_and_go_within_the_stated_memory() -> None:
    rows, generator = Rows(), np.random.default_rng(0)
    there: set[int] = set()
    for version in range(30):
        ids = np.unique(generator.integers(-(2**63), 2**63 - 1, 2000))
        rows.add(ids, np.ones(len(ids), dtype=np.int64), version)
        there |= set(ids.tolist())
        if version % 3 == 0:
            old = rows.seen_before(version - 4)
            there -= set(rows.ids.array[old].tolist())
            rows.remove(old)
        else:
            assert rows.nbytes <= OVERHEAD * rows.extent
    assert (rows.find(np.array(sorted(there))) >= 0).all()
    assert (rows.find(np.arange(1000)) == -1).all()
    assert rows.extent < 30 * 2000  # rows that are free are used again


def test_a_column_keeps_its_values_when_it_grows() -> None:
    column = Column(np.float32, 3, rows=10)
    column.array[:10] = np.arange(30).reshape(10, 3)
    column.reserve(1_000_000)
    assert column.array[:10].tolist() == np.arange(30).reshape(10, 3).tolist()
    assert not column.array[-1].any()
    view = column.array
    with pytest.raises(BufferError):
        column.reserve(10_000_000)
    assert view.shape[1] == 3


@pytest.mark.parametrize("begin", range(0, 12_000, 1_000))
def test_id_0_is_looked_for_in_places_all_over(begin: int) -> None:
    """Its hash is 0, and its distance a quarter: four places in turn, if that stayed the same."""
    rows = Rows()
    ids = np.arange(begin + 1, begin + 751, dtype=np.int64)
    rows.add(ids, np.ones(len(ids), dtype=np.int64), 0)
    assert rows.find(np.array([0], dtype=np.int64)).tolist() == [-1]
