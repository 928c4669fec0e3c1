"""Rows that are fetched ahead: what a script says of its batches, and the thread that fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ps.embedding.ahead import Ahead, Found, Held, Prefetch, no_rows
from elastic_ps.errors import ConnectionLost, UsageError


def test_the_rows_of_a_batch_are_fetched_before_the_batch_in_front_of_it_is_used() -> None:
    events: list[Any] = []

    def fetch(wanted: Mapping[str, Any], staleness: Callable[[], int]) -> None:
        events.append((dict(wanted), staleness()))

    def mode() -> str:
        return "sync" if 2 in events else "async"

    for batch in Prefetch(lambda batch: {"a": batch * 10}, 1, mode).batches([1, 2, 3], fetch):
        events.append(batch)
    assert events == [({}, 1), ({"a": 20}, 1), 1, ({"a": 30}, 1), 2, ({}, 0), 3]
    assert list(Prefetch(dict, 0, lambda: "sync").batches([], fetch)) == []


@pytest.mark.parametrize(("staleness", "mode"), [(1, "sync"), (2, "async"), (-1, "async")])
def test_another_staleness_is_refused(staleness: int, mode: str) -> None:
    with pytest.raises(UsageError, match=f"prefetch_staleness is {staleness}, in mode {mode}; expected 0"):
        Prefetch(dict, staleness, lambda: mode)


def test_rows_need_a_model_with_tables() -> None:
    no_rows({}, lambda: 0)
    with pytest.raises(UsageError, match="the model has no tables that grow"):
        no_rows({"a": [1]}, lambda: 0)


def test_rows_that_a_lost_server_did_not_give_are_not_there() -> None:
    held = Held(np.array([2, 5]), torch.ones(2, 1), 1, 1)
    assert Ahead(lambda: {("a", 0): held}, lambda: 0).rows() == {("a", 0): held}
    places, there = held.find(np.array([1, 2, 5, 9]))
    assert there.tolist() == [False, True, True, False]
    assert places[there].tolist() == [0, 1]

    def fails(error: Exception) -> Ahead:
        def fetch() -> Found:
            raise error

        return Ahead(fetch, lambda: 0)

    assert fails(ConnectionLost("it is gone")).rows() == {}
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError()).rows()
