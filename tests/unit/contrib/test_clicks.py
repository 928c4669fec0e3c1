"""Clicks of a known model, and the AUC of scores."""

from __future__ import annotations

import itertools

import pytest
import torch

from elastic_ps.contrib.datasets import auc, clicks
from elastic_ps.contrib.datasets.clicks import teacher


@pytest.mark.parametrize("seed", range(3))
def test_the_auc_is_the_share_of_pairs_in_the_right_order(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(4, (12,), generator=random).double()
    for labels in (
        torch.randint(2, (12,), generator=random),
        torch.rand(12, generator=random, dtype=torch.float64),
    ):
        right = total = 0.0
        for one, other in itertools.permutations(range(12), 2):
            weight = float(labels[one] * (1 - labels[other]))
            total += weight
            right += weight * (float(scores[one] > scores[other]) + float(scores[one] == scores[other]) / 2)
        assert auc(scores, labels) == pytest.approx(right / total, abs=1e-12)


def test_clicks_are_those_of_the_teacher() -> None:
    training, test = (each.tensors for each in clicks(20_000, 20_000, fields=4, categories=50))
    assert not torch.equal(training[0], test[0])
    categories, clicked, probability = test
    assert int(categories.min()) == 0
    assert int(categories.max()) == 49
    torch.testing.assert_close(probability, teacher(categories))
    error = (probability * (1 - probability)).sum().sqrt() / len(clicked)
    assert abs(float(clicked.double().mean() - probability.mean())) < 4 * error
    assert auc(probability, clicked) == pytest.approx(auc(probability, probability), abs=0.015)
    assert auc(probability, probability) > 0.75
    counts = categories[:, 0].bincount()
    assert float(counts[0] / counts[9]) > 5, "Zipf's law"


def test_a_record_is_the_same_however_many_there_are() -> None:
    few, many = (clicks(count, 1)[0].tensors for count in (10, 20))
    assert all(torch.equal(a, b[:10]) for a, b in zip(few, many, strict=True))
    assert not torch.equal(few[0], clicks(10, 1, seed=1)[0].tensors[0])
