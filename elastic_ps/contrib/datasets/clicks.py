"""Clicks that a known model makes: the best possible AUC is known, too.

Categories follow Zipf's law, as in click logs. The teacher is a factorization machine (Rendle, 2010) whose
weights are hashes of the categories, so it takes no memory. A record is clicked with the probability that the
teacher gives it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from elastic_ps.contrib.models.tables import ids_of_fields, interactions
from elastic_ps.embedding.init import key_of, normal, words

_FACTORS = 2


def clicks(
    records: int,
    test: int = 20_000,
    *,
    fields: int = 8,
    categories: int = 10_000,
    exponent: float = 1.2,
    seed: int = 0,
) -> tuple[TensorDataset, TensorDataset]:
    """A training set and a test set. A record is the same in sets of any size.

    Args:
        records, test: how many records are for training and for the test.
        fields: of a record.
        categories: of each field. The r-th has a probability about in proportion to r ** -exponent.
        exponent: above 0, and not 1.
        seed: another seed gives another teacher and other records.

    Returns:
        Two data sets of tuples: int64 categories of shape (fields,); int64 1 if it was clicked, else 0; and
        the float64 probability of 1.
    """
    options: dict[str, Any] = {"fields": fields, "categories": categories, "exponent": exponent, "seed": seed}
    return _drawn("training", records, **options), _drawn("test", test, **options)


def _drawn(
    part: str, records: int, *, fields: int, categories: int, exponent: float, seed: int
) -> TensorDataset:
    numbers = np.arange(records, dtype=np.int64)
    unit = (words(key_of(seed, part), numbers, fields + 1) >> np.uint64(11)) * 2.0**-53
    power = 1 - exponent
    ranks = (1 + unit[:, :fields] * ((categories + 1) ** power - 1)) ** (1 / power)
    given = torch.from_numpy(ranks.astype(np.int64) - 1)
    probability = teacher(given, seed)
    clicked = (torch.from_numpy(unit[:, fields]) < probability).long()
    return TensorDataset(given, clicked, probability)


def teacher(categories: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The probability of a click, float64 of shape (records,).

    Args:
        categories: int64 of shape (records, fields).
        seed: that of `clicks`.
    """
    records, fields = categories.shape
    ids, key = ids_of_fields(categories).reshape(-1).numpy(), key_of(seed, "teacher")
    drawn = normal(0, 1).first_values(key, ids, 1 + _FACTORS)
    weights = torch.from_numpy(drawn).view(records, fields, 1 + _FACTORS)
    pairs = fields * (fields - 1) / 2
    linear = weights[..., 0].sum(1) * 1.5 / fields**0.5
    return torch.sigmoid(linear + interactions(weights[..., 1:]) * 0.75 / (pairs * _FACTORS) ** 0.5)


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The area under the ROC curve: how likely a positive record has a higher score than a negative one.

    Equal scores count half. It takes time in proportion to n log n.

    Args:
        scores: of shape (records,).
        labels: of the same shape, 1 and 0; or probabilities of 1, which give the expected area. Scores that
            equal these probabilities give the largest possible one, the Bayes AUC.
    """
    positive, order = labels.double(), scores.argsort()
    negative = 1 - positive
    _, places = torch.unique_consecutive(scores[order], return_inverse=True)
    ties = torch.zeros(int(places[-1]) + 1, dtype=torch.float64).index_add_(0, places, negative[order])
    below = ties.cumsum(0) - ties / 2
    same = (positive * negative).sum()  # no record is compared with itself
    right = (positive[order] * below[places]).sum() - same / 2
    return float(right / (positive.sum() * negative.sum() - same))
