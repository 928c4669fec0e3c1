"""Values that scripts report become one: over batches, processes and workers."""

from __future__ import annotations

import math

import pytest

from elastic_ps.core.metrics import MOST_NAMES, REDUCTIONS, Metrics, keep, reduce_all, reduce_values


@pytest.mark.parametrize(("how", "expected"), [("mean", 1.75), ("sum", 3.0), ("max", 2.0)])
def test_values_become_one(how: str, expected: float) -> None:
    assert reduce_values([(1.0, 10), (2.0, 30)], how) == expected


def test_what_has_no_weight_counts_only_if_there_is_no_other() -> None:
    reported = [
        Metrics({"loss": 1.0}, {}, 0.5),
        Metrics({"loss": 4.0, "own": 3.0}, {}, 0.5),
        Metrics({"loss": math.nan, "idle": 7.0}, {}, 0.0),
    ]
    assert reduce_all(reported) == {"loss": 2.5, "own": 3.0, "idle": 7.0}


def test_each_name_has_its_reduction() -> None:
    hows = {"tokens": "sum", "norm": "max"}
    reported = [
        Metrics({"tokens": 3.0, "norm": 5.0, "loss": 1.0}, hows, 1),
        Metrics({"tokens": 4.0, "norm": 2.0, "loss": 3.0}, hows, 3),
    ]
    assert reduce_all(reported) == {"tokens": 7.0, "norm": 5.0, "loss": 2.5}
    assert reduce_all([]) == {}


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_what_is_no_number_is_not_hidden(values: tuple[float, float], how: str) -> None:
    assert math.isnan(reduce_values([(value, 1) for value in values], how))


def test_a_reduction_that_an_older_server_does_not_know_is_the_mean() -> None:
    assert reduce_values([(1.0, 1), (2.0, 1)], "median") == 1.5


def test_a_script_that_makes_up_names_does_not_fill_the_memory() -> None:
    kept: dict[str, float] = {}
    for step in range(2 * MOST_NAMES):
        keep(kept, {"accuracy": float(step), f"loss of step {step}": 0.0})
    assert len(kept) == MOST_NAMES
    assert kept["accuracy"] == 2 * MOST_NAMES - 1, "what is reported again and again stays"
    assert f"loss of step {2 * MOST_NAMES - 1}" in kept
    assert "loss of step 0" not in kept
