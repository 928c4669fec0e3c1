"""Whether a job learns nothing, from the losses that it reports."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.rules import NOT_LOCALLY, names_of
from elastic_ps.core.divergence import Finding, Trend, advice

STEPS = 1000
START = 2.3


def found(losses: Iterable[float], *, of: int = STEPS) -> list[tuple[str, int]]:
    """What is found, and from which loss on; "" for nothing. There are `of` losses in the whole job."""
    trend, told = Trend(), list[tuple[str, int]]()
    for number, loss in enumerate(losses, start=1):
        trend.add(number / of, loss)
        told.append((trend.found.reason if trend.found else "", number))
    return [(reason, next(iter(group))[1]) for reason, group in groupby(told, key=lambda each: each[0])]


def learning(step: float, *, start: float = START, end: float = 0.1) -> float:
    """The loss of a job that is well."""
    return end + (start - end) * math.exp(-5 * step / STEPS)


def noisy(curve: Sequence[float], *, seed: int, by: float = 0.3) -> list[float]:
    """Each value times a positive number whose mean is 1."""
    rng = random.Random(seed)
    return [value * math.exp(rng.gauss(-by * by / 2, by)) for value in curve]


LEARNING = [learning(step) for step in range(STEPS)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("of", [30, 100, STEPS])
def test_of_a_job_that_learns_nothing_is_found(seed: int, of: int) -> None:
    assert found(noisy(LEARNING[:: STEPS // of], seed=seed), of=of) == [("", 1)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [0.0, 0.05, 0.1, 0.3, 1.5])
def test_an_easy_first_batch_is_not_what_a_noisy_loss_has_to_fall_below(first: float, seed: int) -> None:
    """As of a large model that learns a little more, of images without an object, or of empty texts."""
    curve = [learning(step, start=2.0, end=1.6) for step in range(STEPS)]
    assert found([first, *noisy(curve[1:], seed=seed, by=0.15)]) == [("", 1)]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_stays_where_it_was_is_no_better_from_half_of_the_job_on(seed: int) -> None:
    """A dead network comes to a loss a little below that of its first values, of log(10) for ten classes."""
    losses = noisy([2.32, *[math.log(10)] * (STEPS - 1)], seed=seed, by=0.02)
    assert found(losses) == [("", 1), ("LossNoBetter", STEPS // 2)]


@pytest.mark.parametrize("worse", [[4e8, 900.0], [2.6] * 19])
def test_a_model_that_explodes_at_once_is_compared_with_its_first_loss(worse: list[float]) -> None:
    """Else a dead network would be better than the mean of the first window."""
    losses = [START, *worse, *[START] * (STEPS - 1 - len(worse))]
    assert found(losses) == [("", 1), ("LossNoBetter", STEPS // 2)]


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_loss_that_explodes_at_once_is_compared_with_the_next_losses(seed: int) -> None:
    losses = [1.0, 1e6, 5e5, 1e4, *noisy([1.0] * (10 * STEPS), seed=seed, by=0.1)]
    assert [reason for reason, _ in found(losses, of=len(losses))][:2] == ["", "LossNoBetter"]


def test_a_loss_that_explodes_at_once_and_stays_large_is_far_above_its_best_after_a_tenth() -> None:
    reason, at = found([START, *[50.0] * (STEPS - 1)])[1]
    assert (reason, at) == ("LossFarAboveBest", STEPS // 10)


@pytest.mark.parametrize(("times", "seen"), [(9, False), (11, True)])
def test_a_loss_far_above_its_best_is_found_when_that_has_lasted_for_a_tenth(times: int, seen: bool) -> None:
    """Here the best is half of the loss at the start."""
    losses = [START] * 20 + [START / 2] * 180 + [times * START / 2] * 250
    told = found(losses)
    assert [reason for reason, _ in told] == ["", "LossFarAboveBest"][: 1 + seen]
    assert all(300 <= at <= 320 for _, at in told[1:])


def test_a_loss_that_is_many_times_its_best_and_below_that_of_the_start_is_well() -> None:
    """Where a model has learned all of its records by heart, a loss may be anything close to 0."""
    assert found([learning(step, end=0) for step in range(600)] + [1e-9] * 100 + [0.5] * 300) == [("", 1)]


def test_a_spike_is_forgiven_and_so_is_a_plateau_in_the_first_half() -> None:
    assert found([*LEARNING[:300], *[1e6] * 60, *LEARNING[360:]]) == [("", 1)]
    plateau = [START] * 450 + [learning(2 * step) for step in range(550)]
    assert found(plateau) == [("", 1)]


def test_what_was_learned_and_lost_is_no_better_than_at_the_start_until_it_is_learned_again() -> None:
    told = found([*LEARNING[:600], *[0.95 * START] * 200, *LEARNING[800:]])
    assert [reason for reason, _ in told] == ["", "LossNoBetter", ""]
    assert 700 <= told[1][1] <= 720
    assert 800 <= told[2][1] <= 821


def test_a_loss_that_falls_a_little_when_nothing_was_learned_is_still_no_better() -> None:
    """As that of a network that has died while the learning rate falls: else the job would end as well."""
    told = found([*[START] * 700, *[0.93 * START] * 300])
    assert told == [("", 1), ("LossNoBetter", STEPS // 2)]
    assert found([START] * 200 + [0.96 * START] * 800) == [("", 1)], "a little is much for some models"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_found_at_once_and_forgotten_after_a_tenth(value: float) -> None:
    told = found([*LEARNING[:10], value, *LEARNING[11:]])
    assert told == [("", 1), ("LossNotFinite", 11), ("", 111)]
    assert found([*LEARNING[:10], *[value] * 990])[1:] == [("LossNotFinite", 11)]
    assert found([value]) == [("LossNotFinite", 1)], "the first one, too"


def test_of_a_loss_that_is_ever_negative_only_that_it_is_not_finite_is_found() -> None:
    """As in reinforcement learning, where it goes up and down around zero."""
    rng = random.Random(1)
    losses = [rng.gauss(0.0, 1.0) for _ in range(STEPS)]
    assert found(losses) == [("", 1)]
    assert found([1.0, -1.0, *[1e9] * 998]) == [("", 1)]
    assert found([*losses[:500], math.nan, *losses[501:]])[1] == ("LossNotFinite", 501)


def test_of_few_losses_their_size_says_nothing() -> None:
    assert found([1.0] * 29, of=29) == [("", 1)]
    assert found([1.0] * 60, of=60)[1:] == [("LossNoBetter", 30)]


def test_a_job_whose_first_loss_comes_late_is_compared_with_nothing() -> None:
    """As one that begins to report its loss late."""
    trend = Trend()
    for number in range(400, STEPS):
        trend.add(number / STEPS, 0.1)
        assert trend.found is None


@pytest.mark.parametrize("loss", [START, 50 * START, math.nan])
def test_a_term_that_continues_judges_anew_by_the_same_start(loss: float) -> None:
    trend = Trend()
    for number in range(1, 601):
        trend.add(number / STEPS, START if number < 400 else loss)
    assert trend.found is not None
    trend.begin_again()
    assert trend.found is None
    told = []
    for number in range(601, STEPS):
        trend.add(number / STEPS, loss)
        told += [number] if trend.found is not None else []
    assert told[0] in ([601] if math.isnan(loss) else range(700, 721))


def test_a_finished_job_that_trains_more_epochs_does_not_lose_its_good_name() -> None:
    """Its loss cannot fall much further, and how much of the job is done has fallen to a half."""
    trend = Trend()
    for number, loss in enumerate(LEARNING, start=1):
        trend.add(number / STEPS, loss)
    trend.begin_again()
    for number in range(STEPS, 2 * STEPS):
        trend.add(number / (2 * STEPS), LEARNING[-1])
        assert trend.found is None


@pytest.mark.parametrize(
    ("consistency", "compression", "said"),
    [
        ({}, {}, ["max_grad_norm"]),
        ({"mode": "async"}, {}, ["mode: bounded"]),
        ({"mode": "async", "stalenessScale": "none"}, {}, ["stalenessScale: damped", "mode: bounded"]),
        ({"mode": "bounded", "maxStaleness": 8}, {}, ["maxStaleness to less than 8"]),
        ({"mode": "bounded", "maxStaleness": 1, "stalenessScale": "none"}, {}, ["stalenessScale: damped"]),
        ({"mode": "local", "steps": 50}, {}, ["steps to fewer than 50", "outer: average"]),
        ({"mode": "local", "steps": 1, "outer": "average"}, {}, []),
        ({}, {"codec": "signsgd"}, ["max_grad_norm", "loses less than signsgd"]),
        (
            {},
            {"codec": "int8", "rules": [{"match": "*", "codec": "topk"}]},
            ["max_grad_norm", "loses less than topk"],
        ),
        ({"mode": "async"}, {"codec": "bf16", "values": "topk"}, ["mode: bounded", "send values with"]),
        ({}, {"codec": "auto"}, ["max_grad_norm", "compression.maxError to less than 0.02"]),
        ({}, {"codec": "auto", "maxError": 0.5}, ["max_grad_norm", "compression.maxError to less than 0.5"]),
        ({}, {"codec": "auto", "maxError": 0}, ["max_grad_norm"]),
    ],
)
def test_the_advice_names_what_a_job_of_that_kind_can_change(
    consistency: dict[str, Any], compression: dict[str, Any], said: Sequence[str]
) -> None:
    parts = Consistency.model_validate(consistency), Compression.model_validate(compression)
    text = advice(Finding("LossNoBetter", ""), *parts)
    assert all(
        each in text
        for each in [
            "lower the learning rate",
            'under a name other than "loss"',
            'session.metric("generator_loss", value)',
            *said,
        ]
    )
    assert text.count(";") == len(said), "and nothing else"
    fixed = names_of(Consistency, NOT_LOCALLY) if parts[0].mode == "local" else ()
    assert not {*re.findall(r"set consistency\.(\w+)", text)} & {*fixed}, "a running job can change that"
    assert "look for the record" in advice(Finding("LossNotFinite", ""), *parts)
