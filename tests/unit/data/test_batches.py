"""What a worker has in hand: each batch is trained, skipped or given back, whatever the script does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.ledger import Range
from elastic_ps.data.batches import Batches, checked
from elastic_ps.errors import UsageError


def compute(batches: Batches, number: int, **metrics: float) -> None:
    """A batch of three records is loaded, and backward() runs for it."""
    batches.add([Range(0, 3 * number, 3 * number + 3)])
    batches.compute()
    batches.report(metrics)


def test_the_loss_of_an_exchange_is_the_mean_over_the_records_of_its_steps() -> None:
    batches = Batches()
    compute(batches, 0, loss=1.0, other=5.0)
    batches.keep()
    batches.add([Range(0, 3, 4)])
    batches.compute()
    batches.keep()
    batches.report({"loss": 5.0})  # after the step
    batches.gather()
    assert batches.metrics() == {"loss": pytest.approx((3 * 1.0 + 1 * 5.0) / 4), "other": 5.0}
    assert batches.samples == 4
    batches.step_made()
    assert not batches, "nothing is kept any more"


def test_a_step_says_how_its_own_values_are_reduced() -> None:
    batches = Batches()
    compute(batches, 0)
    batches.report({"hits": 1.0}, "sum")
    assert batches.reductions == {"hits": "sum"}
    batches.step_made()
    compute(batches, 1, loss=1.0)
    assert batches.reductions == {}


def test_gradients_that_are_dropped_do_not_touch_the_steps_before() -> None:
    batches = Batches()
    compute(batches, 0)
    batches.keep()
    compute(batches, 1)
    assert batches.skip() == 3
    assert batches.reopen() == 0
    batches.gather()
    assert batches.computed == (Range(0, 0, 3),)
    assert batches.skipped == (Range(0, 3, 6),)


def test_a_value_that_is_reported_before_old_gradients_are_dropped_is_of_its_step() -> None:
    batches = Batches()
    batches.add([Range(0, 0, 3)])
    batches.report({"loss": 2.0})
    assert batches.reopen() == 0
    batches.compute()
    assert batches.metrics() == {"loss": 2.0}


def test_what_is_computed_again_keeps_what_was_reported_of_each_batch() -> None:
    batches = Batches()
    compute(batches, 0, loss=1.0)
    batches.add([Range(0, 3, 4)])
    batches.compute()
    batches.report({"loss": 5.0})
    batches.reopen()
    batches.compute()
    assert batches.metrics() == {"loss": pytest.approx((3 * 1.0 + 1 * 5.0) / 4)}


@given(
    st.lists(st.sampled_from(["load", "backward", "step", "skip", "zero", "exchange", "lose"]), max_size=40)
)
def test_each_record_is_in_one_place(doings: list[str]) -> None:
    """In mode `local`: trained by an exchange, skipped, given back, or still in hand."""
    batches, loaded, steps, trained, lost = Batches(), 0, 0, list[Range](), list[Range]()
    told = list[Range]()
    given: set[Range] = set()
    for doing in doings:
        if doing == "load":
            given.add(Range(0, loaded, loaded + 1))
            batches.add([Range(0, loaded, loaded + 1)])
            loaded += 1
        elif doing == "backward":
            batches.compute()
        elif doing == "step" and batches.computed:
            batches.decide(keep_new=True)
            batches.keep()
            steps += 1
        elif doing == "skip":
            batches.skip()
        elif doing == "zero":
            batches.reopen()
        elif doing == "exchange" and steps and not batches.computed:
            steps = 0
            batches.gather()
            batches.decide(keep_new=True)
            trained += batches.computed
            told += batches.skipped
            batches.step_made()
        elif doing == "lose":
            lost = sorted(given - {*trained, *told})
            given -= set(lost)
            batches.forget(lost=True)
            steps = 0
            assert not batches
    batches.decide()
    batches.skip_computed()
    batches.gather()
    places = [*trained, *told, *batches.computed, *batches.skipped]
    assert len(places) == len(set(places))
    assert set(places) == given


def test_batches_are_grouped_when_a_backward_is_for_one_loaded_before_the_last_backward() -> None:
    batches = Batches()
    batches.compute()  # of gradients that belong to no batch
    batches.add([Range(0, 0, 3)])
    batches.add([Range(0, 3, 5)])
    batches.compute()
    assert not batches.grouped, "the first one may still be skipped"
    batches.compute()
    assert batches.grouped
    assert batches.computed == (Range(0, 3, 5), Range(0, 0, 3))


def test_a_second_backward_for_a_batch_is_not_for_one_that_was_left_out() -> None:
    batches = Batches()
    compute(batches, 0)
    batches.compute()
    batches.step_made()
    batches.add([Range(0, 3, 5)])
    batches.add([Range(0, 5, 9)])
    for weight in (1, 2):
        batches.weigh(weight)
        assert batches.records_of_backward(begins=True) == 4
        batches.compute()
    assert not batches.grouped
    assert (batches.computed, batches.weight) == ((Range(0, 5, 9),), 3)
    assert batches.decide(keep_new=True) == 2


def test_batches_are_grouped_when_a_backward_runs_after_the_loop() -> None:
    batches = Batches()
    batches.add([Range(0, 0, 3)])
    batches.end_loop(of_epoch=False)
    assert not batches.ended
    batches.end_loop(of_epoch=True)
    assert batches.ended
    batches.compute()
    assert batches.grouped


def test_no_batch_is_fresh_once_all_are_computed_on() -> None:
    batches = Batches()
    batches.add([Range(0, 0, 3)])
    assert batches.fresh
    batches.compute_all()
    assert not batches.fresh
    assert batches.samples == 3


def test_skipped_records_are_those_of_all_batches_in_hand() -> None:
    batches = Batches()
    compute(batches, 0)
    batches.add([Range(0, 3, 5)])
    assert batches.skip() == 5
    assert batches.skipped == (Range(0, 0, 3), Range(0, 3, 5))


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


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines", "\ud800", 5, None])
def test_a_name_is_a_short_text(name: Any) -> None:
    with pytest.raises(UsageError, match="has 1 to 200 printable characters; given: "):
        checked({name: 1.0}, "mean")


def test_a_number_that_is_too_large_is_none() -> None:
    with pytest.raises(UsageError, match="'loss' has to be one number, but is 1000000"):
        checked({"loss": 10**400}, "mean")
