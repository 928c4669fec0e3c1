"""Values that scripts report become one: over batches, processes and workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from elastic_ps.core.ledger import Range
from elastic_ps.core.metrics import MOST_NAMES, REDUCTIONS, Metrics, keep, reduce_all, reduce_values
from elastic_ps.data.batches import Batches, checked
from elastic_ps.errors import UsageError


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


def test_the_last_value_of_a_batch_counts_and_batches_become_one() -> None:
    batches = Batches()

    def compute(start: int, stop: int) -> None:
        batches.add([Range(0, start, stop)])
        batches.compute()

    compute(0, 3)
    batches.report({"loss": 9.0, "tokens": 9.0}, "sum")
    batches.report({"tokens": torch.tensor(2)}, "sum")
    batches.report({"loss": 1.0})
    compute(3, 4)
    batches.report({"loss": 5.0})
    batches.report({"tokens": 4.0}, "sum")
    assert batches.metrics() == {"loss": 2.0, "tokens": 6.0}
    batches.keep()
    compute(4, 8)
    batches.report({"loss": 2.0})
    batches.report({"tokens": 10.0}, "max")
    batches.keep()
    batches.gather()
    assert batches.metrics() == {"loss": 2.0, "tokens": 10.0}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), r"a tensor of torch\.float32 with shape \[2, 3\]"),
        (torch.zeros((), dtype=torch.complex64), "a tensor of torch.complex64"),
        ("good", "'good'"),
        (None, "None"),
    ],
)
def test_what_is_no_number_is_named(value: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"'accuracy' has to be one number, but is {words}"):
        checked({"loss": 1.0, "accuracy": value}, "mean")


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(UsageError, match="got reduce='median'; expected one of mean, sum, max"):
        checked({"loss": 1.0}, "median")


def test_gradients_do_not_stay() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    assert not checked({"loss": loss}, "mean")["loss"].requires_grad


def test_a_script_that_makes_up_names_does_not_fill_the_memory() -> None:
    kept: dict[str, float] = {}
    for step in range(2 * MOST_NAMES):
        keep(kept, {"accuracy": float(step), f"loss of step {step}": 0.0})
    assert len(kept) == MOST_NAMES
    assert kept["accuracy"] == 2 * MOST_NAMES - 1, "what is reported again and again stays"
    assert f"loss of step {2 * MOST_NAMES - 1}" in kept
    assert "loss of step 0" not in kept


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines", "\ud800", 5, None])
def test_a_name_is_a_short_text(name: Any) -> None:
    with pytest.raises(UsageError, match="is a text of 1 to 200 printable characters; given: "):
        checked({name: 1.0}, "mean")


def test_a_number_that_is_too_large_is_none() -> None:
    with pytest.raises(UsageError, match="'loss' has to be one number, but is 1000000"):
        checked({"loss": 10**400}, "mean")
